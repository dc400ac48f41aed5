"""Decides which waiting sequences start, and which running ones are preempted for them. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shards.sched.room import Claim, Room

LOOKAHEAD = 8
"""Waiting sequences without enough blocks that admission looks past in one step."""

MOST_OVERTAKEN = 64
"""How often a sequence that does not fit may be overtaken before all sequences behind it wait too."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that wants to start. `rank` is the given one; `claim` is called only when it is its turn."""

    id: int
    rank: int
    claim: Callable[[], Claim]
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Victim:
    """A running sequence that a sequence of better given rank may preempt. `rank` is its own given rank."""

    id: int
    rank: int
    arrival: int


@dataclass(slots=True)
class Admission:
    """Ids of the sequences that start now, of those preempted for them, and of those that were overtaken."""

    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    overtaken: list[int] = field(default_factory=list)


def admit(waiting: Iterable[Waiting], room: Room, *, slots: int, victims: Iterable[Victim] = ()) -> Admission:
    """Start the sequences of `waiting` (in order of service) for which there is room.

    If a slot or blocks are lacking, running sequences of a strictly worse rank are preempted, worst rank first and
    within it the youngest, but only if that suffices. A preempted sequence cannot preempt the one that replaced it, so
    there are no cycles. A sequence that does not fit may be overtaken, but only MOST_OVERTAKEN times, so that small
    sequences do not starve a large one. `waiting` is read only as far as needed.
    """
    desk = _Desk(room, slots, sorted(victims, key=lambda victim: (-victim.rank, -victim.arrival)))
    blocked: list[Waiting] = []
    overtaken: dict[int, None] = {}
    lacking = 0
    for candidate in waiting if desk.may_start_anybody else ():
        outcome = desk.serve(candidate)
        if outcome is _STARTED:
            overtaken.update(dict.fromkeys(other.id for other in blocked))
        else:
            blocked.append(candidate)
            lacking += outcome is _LACKS_BLOCKS
        if candidate.overtaken >= MOST_OVERTAKEN and outcome is not _STARTED:
            break
        if lacking == LOOKAHEAD or not desk.may_start_anybody:
            break
    return Admission(desk.admitted, desk.preempted, list(overtaken))


_STARTED, _LACKS_SLOT, _LACKS_BLOCKS = "started", "lacks a slot", "lacks blocks"


class _Desk:
    """The state of one admission."""

    def __init__(self, room: Room, slots: int, victims: Sequence[Victim]) -> None:
        self._room, self._slots, self._victims = room, slots, list(victims)
        self.admitted: list[int] = []
        self.preempted: list[int] = []

    @property
    def may_start_anybody(self) -> bool:
        return self._slots > 0 or bool(self._victims)

    def serve(self, candidate: Waiting) -> str:
        """Start `candidate` if possible; returns the outcome."""
        weaker = [victim for victim in self._victims if victim.rank > candidate.rank]
        if self._slots <= 0 and not weaker:
            return _LACKS_SLOT
        claim = candidate.claim()
        if self._slots > 0 and self._room.fits(claim):
            self._start(candidate, claim)
            return _STARTED
        room = self._room
        for count, victim in enumerate(weaker, 1):
            room = room.without(victim.id)
            if self._slots + count > 0 and room.fits(claim):
                self._preempt(weaker[:count], room)
                self._start(candidate, claim)
                return _STARTED
        return _LACKS_BLOCKS

    def _start(self, candidate: Waiting, claim: Claim) -> None:
        self._room.add(candidate.id, claim)
        self._slots -= 1
        self.admitted.append(candidate.id)

    def _preempt(self, victims: Sequence[Victim], room: Room) -> None:
        self._room = room
        self._slots += len(victims)
        self._victims = [victim for victim in self._victims if victim not in victims]
        self.preempted += [victim.id for victim in victims]
