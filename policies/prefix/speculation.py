"""Speculation: a prompt's blocks count as held where it was just sent, until the backend reports or a time passes."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prefix.match import Match
from policies.prefix.members import Members
from policies.prefix.rungs import Rungs

_RUNGS = Rungs(16, 16)
"""So a long prompt costs no more than its length in kibitokens."""

_KEY_BYTES = 160
"""Memory of one key at most: an entry of a dict that has just grown, the key and its share of a mask (CPython 3.11)."""


class Speculation:
    """Sends a burst of equal prompts to one backend, before that backend has reported any blocks.

    An entry lasts between `lasts_s` and twice that: there are a young and an old generation, and the old one is dropped
    whole. Entries last shorter where the young one fills its half of `max_bytes` sooner.
    """

    def __init__(self, *, lasts_s: float = 5.0, p_hit: float = 0.9, max_bytes: int = 32 * 2**20) -> None:
        self._lasts_s, self._p_hit, self._most_keys = lasts_s, p_hit, max_bytes // (2 * _KEY_BYTES)
        self._young, self._old = _Generation(), _Generation()
        self._turned_at: float | None = None

    def __repr__(self) -> str:
        return f"<Speculation young {self._young!r}, old {self._old!r}>"

    def sent(self, backend: str, keys: Sequence[int], now: float) -> tuple[int, ...]:
        """Record that the prompt with blocks `keys` went to `backend`; returns the recorded keys, for `hear`."""
        noted = tuple(_RUNGS.of(keys))
        self.hear(backend, noted, now, sent_at=now)
        return noted

    def hear(self, backend: str, noted: Sequence[int], now: float, *, sent_at: float) -> None:
        """Record that another router sent a prompt with these recorded keys to `backend`."""
        self._turn(now)
        noted = noted[: self._most_keys]
        if noted and now - sent_at < self._lasts_s:
            if len(self._young) + len(noted) > self._most_keys:
                self._old, self._young = self._young, _Generation()
            self._young.store(backend, noted)

    def longest(self, keys: Sequence[int], now: float) -> dict[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` was lately sent there, rounded down to recorded keys."""
        self._turn(now)
        depths: dict[str, int] = {}
        rungs = _RUNGS.of(keys)
        for generation in (self._old, self._young):
            for names, depth in generation.longest(rungs):
                for name in names:
                    depths[name] = max(depths.get(name, 0), _RUNGS.blocks(depth))
        return {name: Match(blocks, blocks, float(blocks), self._p_hit) for name, blocks in depths.items()}

    def forget(self, backend: str) -> None:
        """Drop the prompts sent to `backend`: it failed, or restarted."""
        self._young.members.leave(backend)
        self._old.members.leave(backend)

    def size_bytes(self) -> int:
        """Approximate memory."""
        return _KEY_BYTES * (len(self._young) + len(self._old))

    def check(self) -> None:
        """Assert that both generations are correct and within their bound."""
        for generation in (self._young, self._old):
            generation.members.check()
            assert len(generation) <= self._most_keys, f"{self!r}: over its bound"

    def _turn(self, now: float) -> None:
        if self._turned_at is None:
            self._turned_at = now
        late_s = now - self._turned_at
        if late_s >= self._lasts_s:
            self._old = self._young if late_s < 2 * self._lasts_s else _Generation()
            self._young, self._turned_at = _Generation(), now


class _Generation:
    """The recorded keys of prompts, with the bits of the backends that they were sent to.

    A dict and not a PrefixIndex: it is dropped whole, so nothing in it needs an age.
    """

    __slots__ = ("_masks", "members")

    def __init__(self) -> None:
        self.members = Members()
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        return f"{len(self)} keys of {len(self.members)} backends"

    def store(self, backend: str, rungs: Sequence[int]) -> None:
        """Record that a prompt with these `rungs` went to `backend`."""
        masks, bit = self._masks, self.members.bit(backend, 0)
        # keys are chained: the first one is new only if all are, and the last one is known only if all are
        if rungs[0] not in masks:
            masks.update(dict.fromkeys(rungs, bit))
        elif not masks.get(rungs[-1], 0) & bit:
            known = masks.get
            masks.update([(key, known(key, 0) | bit) for key in rungs])

    def longest(self, rungs: Sequence[int]) -> list[tuple[Sequence[str], int]]:
        """Backends and how many of the first `rungs` were sent to them, by bisection."""
        known, names, found = self._masks.get, self.members.names, list[tuple[Sequence[str], int]]()
        first = known(rungs[0], 0) & self.members.live if rungs else 0
        if not first:
            return found
        last = len(rungs) - 1
        at_last = known(rungs[last], 0) & first
        # stretches (from, to, bits there, bits at the end), in which bits are lost
        stretches = [(last, last + 1, at_last, 0), (0, last, first, at_last)]
        while stretches:
            low, high, here, there = stretches.pop()
            lost = here & ~there
            if lost and high - low == 1:
                found.append((names(lost), high))
            elif lost:
                middle = (low + high) // 2
                between = known(rungs[middle], 0) & here
                stretches += ((middle, high, between, there), (low, middle, here, between))
        return found
