"""Which rows of a batch read the same blocks, so that these need be read only once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from shards.exec.batch import Row

FEWEST_BLOCKS = 4
"""Rows that share less are not worth a second pass: a pass costs 20 us and more, as much as 60 positions do."""


class Shared(NamedTuple):
    """Rows of one token each, whose first `blocks` blocks are the same and full."""

    rows: tuple[Row, ...]
    blocks: int


def shared_prefixes(rows: Iterable[Row]) -> list[Shared]:
    """Groups of at least two rows that draw and share at least FEWEST_BLOCKS blocks; no row is in two of them.

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
    # what the smallest and the largest of some tuples have in common, all between them have too
    first, last = min(row.blocks for row in rows), max(row.blocks for row in rows)
    # the last block is being written, so nobody shares it even if the rows are one and the same
    longest = min(len(row.blocks) for row in rows) - 1
    return bisect_left(range(1, longest + 1), True, key=lambda count: first[:count] != last[:count])
