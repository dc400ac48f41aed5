"""Which blocks hold which tokens: the prefix cache. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shards.kv.keys import block_keys, root_key
from shards.nouns import CacheChange, CacheEvent


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block whose KV may be shared: `token_ids` (little-endian uint32) behind all that `parent` stands for.

    Two of them are the same prefix only if they are the same object; `key` is a name for the outside.
    """

    block: int
    key: int
    domain: str
    parent: CachedBlock | None
    token_ids: bytes
    children: int = 0


class PrefixCache:
    """Finds cached blocks by what they hold: domain, parent and tokens, all compared exactly.

    Keys only lead to a candidate: xxh3 does not resist an adversary, so a block whose key is taken by other tokens is
    a miss, is not cached, and nothing may be cached or found behind it.
    A cached block's parent is cached; `check()` proves it. Changes are collected as events until drained.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        # insertion order puts parents before children, which a snapshot relies on
        self._by_key: dict[int, CachedBlock] = {}
        self._changes: list[tuple[CacheChange, list[int]]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_key.values())

    def __contains__(self, cached: CachedBlock) -> bool:
        return self._by_key.get(cached.key) is cached

    def __repr__(self) -> str:
        return f"PrefixCache({len(self)} blocks, {len(self._changes)} changes to tell)"

    def key(self, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> int:
        """The key of one full block of tokens behind `parent`, or behind the root of `domain`."""
        return block_keys(token_ids, root_key(self._model, domain) if parent is None else parent.key)[0]

    def find(self, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """The cached block with exactly these tokens behind exactly this parent, if there is one."""
        found = self._by_key.get(self.key(parent, token_ids, domain=domain))
        if found and found.parent is parent and found.token_ids == token_ids and found.domain == domain:
            return found
        return None

    def extend_path(
        self, path: list[CachedBlock], tokens_of: Callable[[int], bytes], *, limit: int, domain: str
    ) -> None:
        """Make `path` the longest cached prefix of at most `limit` blocks: drop what was evicted, add what was stored.

        `tokens_of(i)` are the tokens of the i-th block.
        """
        while path and path[-1] not in self:
            path.pop()
        while len(path) < limit:
            found = self.find(path[-1] if path else None, tokens_of(len(path)), domain=domain)
            if found is None:
                break
            path.append(found)

    def add(self, block: int, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """Cache `block`; None if its key is taken or `parent` is cached no more."""
        key = self.key(parent, token_ids, domain=domain)
        if key in self._by_key or (parent is not None and parent not in self):
            return None
        cached = self._by_key[key] = CachedBlock(block, key, domain, parent, token_ids)
        if parent is not None:
            parent.children += 1
        self._tell(CacheChange.STORED, key)
        return cached

    def remove(self, cached: CachedBlock) -> None:
        """Forget a block that has no children."""
        assert not cached.children, "children are evicted before their parents"
        del self._by_key[cached.key]
        if cached.parent is not None:
            cached.parent.children -= 1
        self._tell(CacheChange.EVICTED, cached.key)

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._changes.append((CacheChange.CLEARED, []))

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """All that is cached, as one event, parents before children; nothing if nothing is."""
        return (CacheEvent(CacheChange.STORED, tuple(self._by_key)),) if self._by_key else ()

    @property
    def has_events(self) -> bool:
        """Is there a change that nobody was told?"""
        return bool(self._changes)

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """The changes since the last call, in order."""
        events = tuple(CacheEvent(change, tuple(keys)) for change, keys in self._changes)
        self._changes.clear()
        return events

    def check(self) -> None:
        """Prove that parents are cached and children counted."""
        children = dict.fromkeys(self._by_key, 0)
        for key, cached in self._by_key.items():
            assert cached.key == key == self.key(cached.parent, cached.token_ids, domain=cached.domain), "a wrong key"
            if cached.parent is not None:
                assert cached.parent in self, "a cached block has lost its parent"
                assert cached.parent.domain == cached.domain, "a chain crosses domains"
                children[cached.parent.key] += 1
        assert all(children[key] == cached.children for key, cached in self._by_key.items()), "children miscounted"

    def _tell(self, change: CacheChange, key: int) -> None:
        if not self._changes or self._changes[-1][0] is not change:
            self._changes.append((change, []))
        self._changes[-1][1].append(key)
