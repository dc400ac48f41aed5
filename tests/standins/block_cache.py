"""A prefix cache as vLLM's: whole blocks, chained, of a fixed number; the least recently used goes first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.golden.event_encoders import Change, Drop, Put


@dataclass(eq=False)
class BlockCache:
    """The cache of one engine. `hits` of the `queries`, in tokens, were there. `tell` hears what it stores and drops.

    Of a prompt at least one token is computed, as in vLLM. The blocks of a prompt that has ended are let go from its
    end, so that the beginnings of prompts stay longest.
    """

    blocks: int
    block_size: int = 16
    tell: Callable[[Sequence[Change]], None] = lambda _: None
    queries: int = 0
    hits: int = 0
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def query(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Number of a prompt's first tokens in the cache; afterwards it has all its whole blocks."""
        keys = self._keys(tokens, salt, adapter)
        found = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        cached = min(found, max(0, len(tokens) - 1) // self.block_size) * self.block_size
        self.queries += len(tokens)
        self.hits += cached
        self._store(keys, found, tokens, salt, adapter)
        return cached

    def store(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> None:
        """All whole blocks of `tokens`, a prompt and its answer, are here."""
        keys = self._keys(tokens, salt, adapter)
        found = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        self._store(keys, found, tokens, salt, adapter)

    def check(self) -> None:
        """It never has more blocks than it has room for."""
        assert len(self.held) <= self.blocks, f"{len(self.held)} blocks in {self.blocks}"

    def _store(self, keys: list[bytes], found: int, tokens: Sequence[int], salt: str, adapter: str) -> None:
        keys = keys[: self.blocks]
        for key in reversed(keys):
            self.held[key] = None
            self.held.move_to_end(key)
        gone = [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.blocks)]
        events: list[Change] = [Drop(tuple(gone))] if gone else []
        if found < len(keys):
            begin, end = found * self.block_size, len(keys) * self.block_size
            parent = keys[found - 1] if found else None
            new = tuple(keys[found:])
            put = Put(new, parent, tuple(tokens[begin:end]), self.block_size, lora=adapter or None, salt=salt or None)
            events.append(put)
        if events:
            self.tell(events)

    def _keys(self, tokens: Sequence[int], salt: str, adapter: str) -> list[bytes]:
        key = hashlib.blake2b(f"{salt}\0{adapter}".encode(), digest_size=16).digest()
        keys = []
        for begin in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + self.block_size])
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            keys.append(key)
        return keys
