"""The sequences that wait and those that run. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable

from shards.exec.request import Request
from shards.exec.sequence import Sequence


class Roster:
    """All requests by key, and their sequences by arrival: each sequence waits (new, preempted or parked) or runs."""

    def __init__(self) -> None:
        self.requests: dict[Hashable, Request] = {}
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}

    def __repr__(self) -> str:
        parked = sum(sequence.table.is_parked for sequence in self.waiting.values())
        return f"Roster({len(self.running)} running, {len(self.waiting)} waiting, {parked} of them parked)"

    def enter(self, sequence: Sequence) -> None:
        """Let `sequence` wait, and register its request."""
        self.requests[sequence.request.key] = sequence.request
        self.waiting[sequence.arrival] = sequence

    def start(self, arrival: int) -> Sequence:
        """Move the waiting sequence `arrival` to the running ones, and return it."""
        sequence = self.running[arrival] = self.waiting.pop(arrival)
        return sequence

    def put_back(self, arrival: int) -> Sequence:
        """Move the running sequence `arrival` back to the waiting ones, and return it."""
        sequence = self.waiting[arrival] = self.running.pop(arrival)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Remove `sequence`, which has ended; after its last open choice the request is forgotten."""
        self.waiting.pop(sequence.arrival, None)
        self.running.pop(sequence.arrival, None)
        sequence.request.open_choices -= 1
        if not sequence.request.open_choices:
            del self.requests[sequence.request.key]

    def sequences_of(self, request: Request) -> list[Sequence]:
        """The choices of `request` that have not ended."""
        return [
            sequence for sequence in (*self.waiting.values(), *self.running.values()) if sequence.request is request
        ]

    def check(self) -> None:
        """Assert that each sequence is in one place, holds blocks only while it runs, and has a registered request."""
        assert not self.running.keys() & self.waiting.keys(), "a sequence runs and waits"
        for arrival, sequence in {**self.waiting, **self.running}.items():
            assert sequence.arrival == arrival, "a sequence is stored under another sequence's number"
            assert self.requests[sequence.request.key] is sequence.request, "a sequence has outlived its request"
            sequence.check()
        for sequence in self.waiting.values():
            assert not len(sequence.table), "a waiting sequence holds blocks"
        for sequence in self.running.values():
            assert not sequence.table.is_parked, "a parked sequence runs"
        for request in self.requests.values():
            assert len(self.sequences_of(request)) == request.open_choices > 0, (
                "a request has lost count of its choices"
            )
