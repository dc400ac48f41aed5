"""Pairs of faults, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from tests.chaos.faults import Fault

_FIRST = ("router", "clients", "redis", "servers", "server", "names", "file")
"""Parts in the order in which a pair's faults begin; they end the other way round, so that a router starts again when
all that it needs is there."""


def fits(one: Fault, other: Fault) -> bool:
    """Whether both can happen at once: to different parts of one system, or to two of its servers."""
    parts = {one.part, other.part}
    return one.plan == other.plan and (parts == {"server"} or (len(parts) == 2 and parts != {"server", "servers"}))


def draw(faults: Sequence[Fault], count: int, seed: int) -> Iterator[tuple[Fault, Fault]]:
    """`count` different pairs; each fault is drawn as often as any other, as far as that goes."""
    rng = random.Random(seed)
    possible = [pair for pair in combinations(faults, 2) if fits(*pair)]
    used = dict.fromkeys((fault.name for fault in faults), 0)
    for _ in range(min(count, len(possible))):
        rng.shuffle(possible)
        pair = min(possible, key=lambda pair: sum(used[fault.name] for fault in pair))
        possible.remove(pair)
        for fault in pair:
            used[fault.name] += 1
        first, second = sorted(pair, key=lambda fault: _FIRST.index(fault.part))
        yield first, second
