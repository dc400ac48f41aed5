"""Folder: converts an engine's cache events, in its own blocks and hashes, to our blocks of 64 tokens and our keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from policies.prefix.members import TIERS, level_of

TOKEN_BYTES = 4
BLOCK_BYTES = 64 * TOKEN_BYTES
"""Size of our block, as token ids in little-endian uint32."""

KeyFunction = Callable[[bytes, int], Sequence[int]]
"""The chained keys of all full blocks in token bytes that follow a parent's key."""


@dataclass(frozen=True, slots=True)
class Change:
    """`keys` are stored in `tier`, or evicted from it."""

    stored: bool
    tier: str
    keys: list[int]


@dataclass(slots=True)
class Changes:
    """Changes of our blocks, in order.

    `has_hole`: a block was evicted before a block that continues it, so the held blocks are no longer prefix-closed.
    """

    runs: list[Change] = field(default_factory=list)
    has_hole: bool = False

    def add(self, key: int, level: int, *, stored: bool) -> None:
        """One more block."""
        tier, last = TIERS[level], self.runs[-1] if self.runs else None
        if last is None or last.stored != stored or last.tier != tier:
            last = Change(stored, tier, [])
            self.runs.append(last)
        last.keys.append(key)


@dataclass(slots=True, eq=False)
class _Block:
    """One of our blocks, which consists of some of the engine's, its `parts`. `level` is the last reported tier.

    `children` are the stored blocks that continue it.
    """

    key: int
    parts: tuple[Hashable, ...]
    parent: _Block | None
    level: int | None = None
    children: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    """A block of the engine, in the tiers with bits in `levels`. If it is in none, it is gone, but `blocks` need it.

    `blocks` are our blocks that contain it. At its end lies our block `after` with `after_key`, and behind that the
    tokens `tail`, which are in `open_parts`. `after_key` None: its tokens are unknown.
    """

    levels: int = 0
    blocks: dict[_Block, None] = field(default_factory=dict)
    after_key: int | None = None
    after: _Block | None = None
    tail: bytes = b""
    open_parts: tuple[Hashable, ...] = ()


class Folder:
    """Re-keys the events of one engine with blocks of any size: 16, 32, 48, 256, also one token.

    One of our blocks is stored when all the engine's blocks that it overlaps are there, in the slowest of their tiers,
    and evicted with the first of them. The engine's hashes are opaque. At most `most_parts` of them are
    kept; beyond that the oldest ones count as gone. Events: vLLM's and SGLang's BlockStored, BlockRemoved and
    AllBlocksCleared; TensorRT-LLM's stored and removed.
    """

    def __init__(self, key_function: KeyFunction, *, most_parts: int = 200_000) -> None:
        self._keys_of, self._most_parts = key_function, most_parts
        self._parts: dict[Hashable, _Part] = {}
        self.orphans = 0
        """Number of the engine's blocks that were stored behind an unknown parent, or again with unknown tokens."""
        self.dropped = 0
        """Number of the engine's blocks that were dropped for lack of room."""

    def __repr__(self) -> str:
        return f"<Folder of {len(self._parts)} parts, {self.orphans} orphans>"

    def store(
        self,
        hashes: Sequence[Hashable],
        *,
        parent: Hashable | None = None,
        token_ids: bytes = b"",
        root: int = 0,
        tier: str = "device",
    ) -> Changes:
        """Record that the engine has blocks `hashes`, equal in size and consecutive, the first behind `parent`.

        Without a parent they begin a prompt below our key `root`. Without tokens they must be known already.
        Raises ValueError if the tokens do not divide into so many equal blocks.
        """
        size, changes = len(token_ids) // max(1, len(hashes)), Changes()
        if size * len(hashes) != len(token_ids) or size % TOKEN_BYTES:
            raise ValueError(f"{len(token_ids) / TOKEN_BYTES:g} tokens are not {len(hashes)} equal blocks")
        for at, name in enumerate(hashes):
            part = self._parts.get(name)
            if part is None or part.after_key is None:
                part = self._read(name, parent, token_ids[at * size : at * size + size], root)
            if part is None:
                self.orphans += 1
            else:
                part.levels |= 1 << level_of(tier)
                self._settle(part, changes)
            parent = name
        while len(self._parts) > self._most_parts:
            self.dropped += 1
            self._forget(next(iter(self._parts)), changes)
        return changes

    def evict(self, hashes: Sequence[Hashable], *, tier: str = "device") -> Changes:
        """Record that the engine no longer has blocks `hashes` in this tier."""
        changes = Changes()
        for name in hashes:
            part = self._parts.get(name)
            if part is not None and part.levels & (bit := 1 << level_of(tier)):
                part.levels ^= bit
                self._settle(part, changes)
                if not part.levels:
                    self._unread(name, part)
        return changes

    def clear(self) -> None:
        """Record that the engine has no blocks."""
        self._parts.clear()

    def check(self) -> None:
        """Assert that blocks and parts refer to each other, that levels are right, and that nothing lingers."""
        assert len(self._parts) <= self._most_parts, f"{self!r}: over its bound"
        children: dict[int, int] = {}
        blocks = {id(block): block for part in self._parts.values() for block in part.blocks}
        for block in blocks.values():
            assert block.level == self._level(block), "a block is not in its reported tier"
            assert all(block in self._parts[name].blocks for name in block.parts), "a part does not know its block"
            assert self._parts[block.parts[-1]].levels, "a block lingers although its last part is gone"
            if block.parent is not None and block.level is not None:
                children[id(block.parent)] = children.get(id(block.parent), 0) + 1
        assert all(block.children == children.get(at, 0) for at, block in blocks.items()), "children are miscounted"
        for name, part in self._parts.items():
            assert part.levels or part.blocks, "a part that is gone lingers"
            assert bool(part.levels) == (part.after_key is not None), (
                "a part that is there was not read, or the reverse"
            )
            assert all(name in block.parts for block in part.blocks), "a block is in a part that it is not made of"

    def _read(self, name: Hashable, parent: Hashable | None, tokens: bytes, root: int) -> _Part | None:
        """The part `name` and our blocks that it completes; None if tokens or parent are unknown."""
        before = _Part(after_key=root) if parent is None else self._parts.get(parent)
        if not tokens or before is None or before.after_key is None or name in before.open_parts:
            # no engine's block continues itself
            return None
        part = self._parts.setdefault(name, _Part())
        text = before.tail + tokens
        parts, after, after_key = (*before.open_parts, name), before.after, before.after_key
        for key in self._keys_of(text, after_key):
            after, after_key = self._link(_Block(key, parts, after)), key
            parts = (name,)
        rest = len(text) % BLOCK_BYTES
        part.after, part.after_key = after, after_key
        part.tail, part.open_parts = (text[-rest:], parts) if rest else (b"", ())
        return part

    def _link(self, block: _Block) -> _Block:
        for name in block.parts:
            self._parts.setdefault(name, _Part()).blocks[block] = None
        return block

    def _unlink(self, block: _Block) -> None:
        for name in block.parts:
            part = self._parts[name]
            del part.blocks[block]
            if not part.blocks and not part.levels:
                del self._parts[name]

    def _unread(self, name: Hashable, part: _Part) -> None:
        """Remove `part`; only blocks with a present last part still need it."""
        part.after_key, part.after, part.tail, part.open_parts = None, None, b"", ()
        for block in [block for block in part.blocks if block.parts[-1] == name]:
            self._unlink(block)
        if not part.blocks:
            self._parts.pop(name, None)

    def _forget(self, name: Hashable, changes: Changes) -> None:
        part = self._parts[name]
        part.levels = 0
        self._settle(part, changes)
        for block in list(part.blocks):
            self._unlink(block)
        self._parts.pop(name, None)

    def _level(self, block: _Block) -> int | None:
        """The slowest of the tiers of its parts; None if one is in none."""
        levels = [self._parts[name].levels for name in block.parts]
        return max((bits & -bits).bit_length() - 1 for bits in levels) if all(levels) else None

    def _settle(self, part: _Part, changes: Changes) -> None:
        """Record the changes of the blocks of `part`."""
        for block in part.blocks:
            level = self._level(block)
            if level == block.level:
                continue
            if block.level is not None:
                changes.add(block.key, block.level, stored=False)
                changes.has_hole |= level is None and block.children > 0
            if level is not None:
                changes.add(block.key, level, stored=True)
            if block.parent is not None:
                block.parent.children += (level is not None) - (block.level is not None)
            block.level = level
