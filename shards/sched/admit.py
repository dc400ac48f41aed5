"""Who may start. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOOKAHEAD = 8
"""How many waiting sequences that do not fit are looked past, in one step."""

MOST_OVERTAKEN = 64
"""How often a sequence that does not fit may be overtaken before everybody behind it waits too."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that wants to start. `need_blocks`: its peak, less what running sequences hold of its prefix."""

    id: int
    need_blocks: int
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Ids of those who start now, and of those who were overtaken by them."""

    admitted: tuple[int, ...] = ()
    overtaken: tuple[int, ...] = ()


def admit(waiting: Iterable[Waiting], *, slots: int, blocks: int) -> Admission:
    """Start the sequences of `waiting` (in the order in which they are to be served) for which there is room.

    Room is counted at the peak, prompt and answer together: whoever starts can always finish, so nobody is preempted
    and decoding never runs out of blocks. One that does not fit may be overtaken, but only MOST_OVERTAKEN times, so a
    large one is not starved by small ones. `waiting` is read only as far as needed.
    """
    admitted: list[int] = []
    blocked: list[Waiting] = []
    overtaken: dict[int, None] = {}
    if slots <= 0:
        return Admission()
    for one in waiting:
        if one.need_blocks <= blocks:
            blocks -= one.need_blocks
            admitted.append(one.id)
            overtaken.update(dict.fromkeys(other.id for other in blocked))
            if len(admitted) == slots:
                break
        else:
            blocked.append(one)
            if one.overtaken >= MOST_OVERTAKEN or len(blocked) == LOOKAHEAD:
                break
    return Admission(tuple(admitted), tuple(overtaken))
