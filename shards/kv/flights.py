"""Copies between device and host that have not landed yet. Torch-free."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from shards.kv.copier import BlockCopy, Copier


class _Flight(NamedTuple):
    ticket: int
    copies: tuple[BlockCopy, ...]


class Flights:
    """Tracks the device blocks that are being copied.

    A block is busy while any copy reads or writes it: it must not be written, nor given to a new owner. It is landing
    while a copy writes it: it must not be read either. Copies are collected until `start` submits them as one batch.
    Copies run in order, so they never endanger a host slot; other readers and writers of slots ask `is_slot_busy`.
    """

    def __init__(self, copier: Copier | None) -> None:
        self._copier = copier
        self._collected: list[BlockCopy] = []
        self._flights: deque[_Flight] = deque()
        self._busy: Counter[int] = Counter()
        self._busy_slots: Counter[int] = Counter()
        self._landing: set[int] = set()

    def __repr__(self) -> str:
        return f"Flights({len(self._flights)} batches, {len(self._busy)} blocks busy, {len(self._landing)} landing)"

    def is_busy(self, block: int) -> bool:
        """Whether an unfinished copy reads or writes `block`."""
        return block in self._busy

    @property
    def is_copying(self) -> bool:
        """Whether any copy is unfinished."""
        return bool(self._flights)

    def is_slot_busy(self, slot: int) -> bool:
        """Whether an unfinished copy reads or writes host slot `slot`."""
        return slot in self._busy_slots

    @property
    def landing(self) -> frozenset[int] | set[int]:
        """The blocks that unfinished copies write."""
        return self._landing

    def save(self, block: int, slot: int) -> None:
        """Copy `block` to `slot` with the next batch."""
        self._collect(BlockCopy(block, slot, is_save=True))

    def load(self, slot: int, block: int) -> None:
        """Copy `slot` to `block` with the next batch."""
        self._landing.add(block)
        self._collect(BlockCopy(block, slot, is_save=False))

    def start(self) -> None:
        """Submit the collected copies."""
        if self._collected:
            assert self._copier is not None, "copies need a copier"
            copies = tuple(self._collected)
            self._flights.append(_Flight(self._copier.start(copies), copies))
            self._collected.clear()

    def land(self) -> list[int]:
        """The blocks that have stopped being busy since the last call. Raises CopyFailed."""
        quiet: list[int] = []
        while self._copier is not None and self._flights and self._copier.done(self._flights[0].ticket):
            quiet += self._end(self._flights.popleft())
        return quiet

    def wait(self) -> list[int]:
        """Like `land`, after waiting for at least the first batch. Raises CopyFailed."""
        if self._copier is not None and self._flights:
            self._copier.wait(self._flights[0].ticket)
        return self.land()

    def check(self) -> None:
        """Assert that each busy block is in a flight."""
        copies = [copy for flight in self._flights for copy in flight.copies] + self._collected
        assert Counter(copy.block for copy in copies) == self._busy, "busy blocks are miscounted"
        assert Counter(copy.slot for copy in copies) == self._busy_slots, "busy slots are miscounted"
        assert {copy.block for copy in copies if not copy.is_save} == self._landing, "landing blocks are miscounted"

    def _collect(self, copy: BlockCopy) -> None:
        self._collected.append(copy)
        self._busy[copy.block] += 1
        self._busy_slots[copy.slot] += 1

    def _end(self, flight: _Flight) -> list[int]:
        quiet: list[int] = []
        for block, slot, is_save in flight.copies:
            if not is_save:
                self._landing.discard(block)
            self._busy_slots[slot] -= 1
            if not self._busy_slots[slot]:
                del self._busy_slots[slot]
            self._busy[block] -= 1
            if not self._busy[block]:
                del self._busy[block]
                quiet.append(block)
        return quiet
