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
        parked = sum(one.table.is_parked for one in self.waiting.values())
        return f"Roster({len(self.running)} running, {len(self.waiting)} waiting, {parked} of them parked)"

    def enter(self, one: Sequence) -> None:
        """Let `one` wait, and register its request."""
        self.requests[one.request.key] = one.request
        self.waiting[one.arrival] = one

    def start(self, arrival: int) -> Sequence:
        """Move the waiting sequence `arrival` to the running ones, and return it."""
        one = self.running[arrival] = self.waiting.pop(arrival)
        return one

    def put_back(self, arrival: int) -> Sequence:
        """Move the running sequence `arrival` back to the waiting ones, and return it."""
        one = self.waiting[arrival] = self.running.pop(arrival)
        return one

    def leave(self, one: Sequence) -> None:
        """Remove the ended sequence `one`; after its last open choice the request is forgotten."""
        self.waiting.pop(one.arrival, None)
        self.running.pop(one.arrival, None)
        one.request.open_choices -= 1
        if not one.request.open_choices:
            del self.requests[one.request.key]

    def sequences_of(self, request: Request) -> list[Sequence]:
        """The choices of `request` that have not ended."""
        return [one for one in (*self.waiting.values(), *self.running.values()) if one.request is request]

    def check(self) -> None:
        """Assert that each sequence is in one place, holds blocks only while it runs, and has a registered request."""
        assert not self.running.keys() & self.waiting.keys(), "a sequence runs and waits"
        for arrival, one in {**self.waiting, **self.running}.items():
            assert one.arrival == arrival, "a sequence is stored under another sequence's number"
            assert self.requests[one.request.key] is one.request, "a sequence has outlived its request"
            one.check()
        for one in self.waiting.values():
            assert not len(one.table), "a waiting sequence holds blocks"
        for one in self.running.values():
            assert not one.table.is_parked, "a parked sequence runs"
        for request in self.requests.values():
            assert len(self.sequences_of(request)) == request.open_choices > 0, (
                "a request has lost count of its choices"
            )
