"""Finds rows of a batch that read the same blocks, so that these are read only once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from shards.exec.batch import Row

FEWEST_BLOCKS = 4
"""Least blocks that rows must share: a second pass costs at least 20 us, as much as 60 positions."""


class Shared(NamedTuple):
    """Rows of one token each, with the same first `blocks` blocks, all full."""

    rows: tuple[Row, ...]
    blocks: int


def shared_prefixes(rows: Iterable[Row]) -> list[Shared]:
    """Groups of at least two decoding rows that share at least FEWEST_BLOCKS blocks; no row is in two groups.

    A block is shared only together with all before it. Rows that differ within the first FEWEST_BLOCKS blocks are not
    grouped, so a short system prompt does not hide that some of them share a long document.
    """
    alike: defaultdict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.tokens == 1 and len(row.blocks) > FEWEST_BLOCKS:
            alike[row.blocks[:FEWEST_BLOCKS]].append(row)
    groups = (group for group in alike.values() if len(group) > 1)
    return [Shared(tuple(group), _common(group)) for group in groups]


def _common(rows: list[Row]) -> int:
    # the common beginning of the smallest and the largest tuple is common to all tuples between them
    first, last = min(row.blocks for row in rows), max(row.blocks for row in rows)
    # the last block is still being written, so it is never shared, even between identical rows
    longest = min(len(row.blocks) for row in rows) - 1
    return bisect_left(range(1, longest + 1), True, key=lambda count: first[:count] != last[:count])
