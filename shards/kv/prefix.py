"""The prefix cache: finds the blocks that hold given tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shards.kv.adapter_domain import domain_root, tenant_domain
from shards.kv.keys import block_keys
from shards.nouns import CacheChange, CacheEvent

DEVICE, HOST, DISK = "device", "host", "disk"
"""The tiers: the network reads and writes the device; blocks in the host tier wait to be copied back, and blocks on
disk to be read into the host tier. The prefix cache has the first two, and `shards.kv.disk` the blocks on disk."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block with shareable KV: `token_ids` (little-endian uint32) behind the whole prefix of `parent`.

    Two of them are the same prefix only if they are the same object; `key` is a name for use outside. Its KV is in
    device block `block`, in host slot `slot`, or in both. `depth` blocks come before it. `children` are cached in any
    tier of memory, `device_children` on the device. `worth` orders eviction, see `shards.kv.idle`. `chain` is the hash
    of the prefix that `shards.kv.raw_block` has computed; empty before.
    """

    block: int | None
    key: int
    domain: str
    parent: CachedBlock | None
    token_ids: bytes
    depth: int
    slot: int | None = None
    children: int = 0
    device_children: int = 0
    worth: float = float("-inf")
    chain: bytes = b""

    def __repr__(self) -> str:
        return f"CachedBlock({self.key:#x}: depth {self.depth}, block {self.block}, slot {self.slot})"


class PrefixCache:
    """Finds cached blocks by domain, parent and tokens, all compared exactly.

    A key only leads to a candidate, since xxh3 does not resist an adversary. A block with a key taken by other tokens
    is a miss and is not cached, and nothing can be cached or found behind it.

    The parent of a cached block is cached, and the parent of a block on the device is on the device; `check()` proves
    it. So a found prefix is a number of blocks on the device, followed by blocks in the host tier.

    Changes are collected as events until drained, in order within each tier. Tiers are counted separately, so their
    relative order has no meaning, and moving a hundred blocks makes two events.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        # insertion order puts parents before children, which a snapshot relies on
        self._by_key: dict[int, CachedBlock] = {}
        self._changes: list[tuple[CacheChange, str, list[int]]] = []
        self._last_of: dict[str, tuple[CacheChange, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_key.values())

    def __contains__(self, cached: CachedBlock) -> bool:
        return self._by_key.get(cached.key) is cached

    def __repr__(self) -> str:
        return f"PrefixCache({len(self)} blocks, {len(self._changes)} changes to report)"

    def key(self, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> int:
        """The key of one full block of tokens behind `parent`, or behind the root of `domain`."""
        return block_keys(token_ids, domain_root(self._model, domain) if parent is None else parent.key)[0]

    def find(self, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """The cached block with exactly these tokens behind exactly this parent, if there is one."""
        found = self._by_key.get(self.key(parent, token_ids, domain=domain))
        if found and found.parent is parent and found.token_ids == token_ids and found.domain == domain:
            return found
        return None

    def named(self, key: int, *, domain: str | None = None) -> CachedBlock | None:
        """The cached block that `key` names in `domain`, or in any. Not good enough for reading KV."""
        found = self._by_key.get(key)
        return found if found is not None and domain in (None, found.domain) else None

    def of_tenant(self, key: int, *, domain: str) -> CachedBlock | None:
        """The cached block that `key` names in the tenant's `domain`, by whichever adapter. Good enough for a pin."""
        found = self._by_key.get(key)
        return found if found is not None and domain == tenant_domain(found.domain) else None

    def extend_path(
        self, path: list[CachedBlock], tokens_of: Callable[[int], bytes], *, limit: int, domain: str
    ) -> None:
        """Make `path` the longest cached prefix of at most `limit` blocks: drop evicted blocks, append stored ones.

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
        """Cache `block` of the device; None if its key is taken or `parent` is no longer cached."""
        cached = self.admit(parent, token_ids, domain=domain)
        if cached is not None:
            self.place(cached, block)
        return cached

    def admit(self, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """A new cached block, for which the caller has a place in a tier at once; None as in `add`."""
        key = self.key(parent, token_ids, domain=domain)
        if key in self._by_key or (parent is not None and parent not in self):
            return None
        depth = 0 if parent is None else parent.depth + 1
        cached = self._by_key[key] = CachedBlock(None, key, domain, parent, token_ids, depth)
        if parent is not None:
            parent.children += 1
        return cached

    def place(self, cached: CachedBlock, block: int) -> None:
        """Record that the KV of `cached` is also in `block` of the device; its parent's is there already."""
        assert cached.block is None, "a cached block is in one device block"
        cached.block = block
        if cached.parent is not None:
            cached.parent.device_children += 1
        self.tell(CacheChange.STORED, DEVICE, cached.key)

    def displace(self, cached: CachedBlock) -> None:
        """Remove `cached`, which has no children there, from the device. Forgotten if it is nowhere else."""
        assert not cached.device_children, "children are evicted before their parents"
        cached.block = None
        if cached.parent is not None:
            cached.parent.device_children -= 1
        self.tell(CacheChange.EVICTED, DEVICE, cached.key)
        self._forget_unless_held(cached)

    def keep(self, cached: CachedBlock, slot: int) -> None:
        """Record that the KV of `cached` is also in `slot` of the host tier."""
        assert cached.slot is None, "a cached block is in one host slot"
        cached.slot = slot
        self.tell(CacheChange.STORED, HOST, cached.key)

    def drop(self, cached: CachedBlock) -> None:
        """Remove `cached` from the host tier. Forgotten if it is nowhere else; it has no children then."""
        cached.slot = None
        self.tell(CacheChange.EVICTED, HOST, cached.key)
        self._forget_unless_held(cached)

    def clear(self, covers: Callable[[str], bool] | None = None) -> None:
        """Forget everything, or everything in the domains that `covers` names; no chain crosses domains."""
        if covers is None:
            self._by_key.clear()
            self._last_of.clear()
            self._changes.append((CacheChange.CLEARED, DEVICE, []))
            return
        for cached in [cached for cached in self._by_key.values() if covers(cached.domain)]:
            del self._by_key[cached.key]
            for tier, place in ((DEVICE, cached.block), (HOST, cached.slot)):
                if place is not None:
                    self.tell(CacheChange.EVICTED, tier, cached.key)

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """All cached blocks, one event for each tier that holds any, parents before children."""
        device = tuple(key for key, cached in self._by_key.items() if cached.block is not None)
        host = tuple(key for key, cached in self._by_key.items() if cached.slot is not None)
        return tuple(
            CacheEvent(CacheChange.STORED, keys, tier) for tier, keys in ((DEVICE, device), (HOST, host)) if keys
        )

    @property
    def has_events(self) -> bool:
        """Whether there are changes that were not drained."""
        return bool(self._changes)

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """The changes since the last call, in order within each tier; CLEARED, with no keys, covers all blocks."""
        events = tuple(CacheEvent(change, tuple(keys), tier) for change, tier, keys in self._changes)
        self._changes.clear()
        self._last_of.clear()
        return events

    def check(self) -> None:
        """Assert that each block is in a tier, that parents are where children are, and that children are counted."""
        children = dict.fromkeys(self._by_key, 0)
        device_children = dict.fromkeys(self._by_key, 0)
        for key, cached in self._by_key.items():
            assert cached.key == key == self.key(cached.parent, cached.token_ids, domain=cached.domain), "a wrong key"
            assert cached.block is not None or cached.slot is not None, "a cached block is nowhere"
            if cached.parent is not None:
                assert cached.parent in self, "a cached block has lost its parent"
                assert cached.parent.domain == cached.domain, "a chain crosses domains"
                assert cached.depth == cached.parent.depth + 1, "a wrong depth"
                assert cached.block is None or cached.parent.block is not None, "a device block's parent is elsewhere"
                children[cached.parent.key] += 1
                device_children[cached.parent.key] += cached.block is not None
        for key, cached in self._by_key.items():
            assert children[key] == cached.children, "children are miscounted"
            assert device_children[key] == cached.device_children, "children on the device are miscounted"

    def _forget_unless_held(self, cached: CachedBlock) -> None:
        if cached.block is not None or cached.slot is not None:
            return
        assert not cached.children, "children are evicted before their parents"
        del self._by_key[cached.key]
        if cached.parent is not None:
            cached.parent.children -= 1

    def tell(self, change: CacheChange, tier: str, key: int) -> None:
        """Collect an event of `tier`."""
        last = self._last_of.get(tier)
        if last is None or last[0] is not change:
            last = self._last_of[tier] = (change, [])
            self._changes.append((change, tier, last[1]))
        last[1].append(key)
