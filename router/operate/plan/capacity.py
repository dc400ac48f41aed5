"""The load of one backend up to which targets are met, from answers at many loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from router.operate.plan.nouns import Capacity

MISSED_AT_MOST = 0.05
"""Share of a class's answers that may miss a target: targets are P95."""

ENOUGH_ANSWERS = 20
"""Fewer answers of a class are not judged: one miss among 20 is 5 %."""


class Judged(NamedTuple):
    """An answer: the load of its backend, and whether it missed its target."""

    load: float
    missed: bool


class _Block(NamedTuple):
    """Answers at neighbouring loads."""

    highest: float
    missed: int
    answers: int

    @property
    def share(self) -> float:
        return self.missed / self.answers


def capacity_of(measure: str, judged: Mapping[str, Sequence[Judged]], highest: float) -> Capacity:
    """The highest load at which every class met its target.

    If no load was too high, that is the highest that answers had often enough (for TTFT, those of each class). Without
    enough answers it is `highest`.

    A class that missed its target at every load counts only if no class met it: its misses have another cause.
    """
    enough = {name: answers for name, answers in judged.items() if len(answers) >= ENOUGH_ANSWERS}
    count = sum(map(len, enough.values()))
    limits = {name: limit for name, answers in enough.items() if (limit := kept_until(answers)) is not None}
    if enough and not limits:
        return Capacity(measure, None, is_least=False, judged_by=min(enough), answers=count)
    exceeded = {name: limit for name, limit in limits.items() if limit < max(answer.load for answer in enough[name])}
    if not exceeded:
        # a decode step is as long for every class, but a prompt is not
        groups = (
            [[each for answers in enough.values() for each in answers]] if measure == "requests" else enough.values()
        )
        seen = min((_seen_often(answers) for answers in groups if answers), default=highest)
        return Capacity(measure, seen, is_least=True, judged_by=None, answers=count)
    name = min(exceeded, key=lambda name: (exceeded[name], name))
    return Capacity(measure, exceeded[name], is_least=False, judged_by=name, answers=count)


def _seen_often(answers: Sequence[Judged]) -> float:
    """The load that ENOUGH_ANSWERS of the answers had, or exceeded."""
    return sorted(answers)[-ENOUGH_ANSWERS].load


def kept_until(answers: Iterable[Judged]) -> float | None:
    """The highest load at which at most MISSED_AT_MOST of the answers missed the target; None if at none.

    The share of misses is fitted as a function that does not fall with the load (isotonic regression by pooling
    adjacent violators, Ayer et al. 1955), so that one unlucky answer at a low load does not decide.
    """
    counts: dict[float, list[bool]] = {}
    for load, missed in answers:
        counts.setdefault(load, []).append(missed)
    blocks: list[_Block] = []
    for load, misses in sorted(counts.items()):
        blocks.append(_Block(load, sum(misses), len(misses)))
        while len(blocks) > 1 and blocks[-2].share >= blocks[-1].share:
            last, before = blocks.pop(), blocks.pop()
            blocks.append(_Block(last.highest, before.missed + last.missed, before.answers + last.answers))
    kept = [block.highest for block in blocks if block.share <= MISSED_AT_MOST and block.highest > 0]
    return max(kept, default=None)
