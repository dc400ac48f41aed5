from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shards.exec.batch import Row
from shards.gpu.sharing import SharedSpan, Sharing, fill_sharing, sharing_of

PAGES = 2
"""The pages of a split in these tests: 128 tokens."""

SYSTEM, DOCUMENT, OTHER = (1, 2), (3, 4, 5, 6), (7, 8, 9, 10)


def a_row(blocks: tuple[int, ...], context: int | None = None) -> Row:
    """A decoding row whose new token is the first of its last block, or the last of `context`."""
    return Row(0, 1, 64 * (len(blocks) - 1) + 1 if context is None else context, blocks)


def sharing(*rows: Row) -> Sharing:
    """With tables that have any numbers behind the end of a row."""
    tables = np.full((len(rows), 1 + max(len(row.blocks) for row in rows)), 77, dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    return sharing_of(rows, tables, split_pages=PAGES)


def readers_by_split(found: Sharing) -> dict[int, set[frozenset[int]]]:
    """For each split the groups of rows that read it together."""
    groups: dict[int, set[frozenset[int]]] = defaultdict(set)
    for first, end, place, count in found.spans:
        for split in range(first, end):
            groups[split].add(frozenset(found.readers[place : place + count]))
    return dict(groups)


def test_rows_share_the_whole_splits_with_which_they_begin() -> None:
    found = sharing(a_row((*SYSTEM, *DOCUMENT, 20)), a_row((30, 31, 32)), a_row((*SYSTEM, *DOCUMENT, 21, 22)))
    assert found == Sharing([0, 2], [SharedSpan(0, 3, 0, 2)], [3, 3])


def test_rows_with_nothing_in_common_share_nothing() -> None:
    assert sharing(a_row((1, 2, 3)), a_row((4, 5, 6)), a_row((7,))) == Sharing([], [], [])
    # less than a split
    assert sharing(a_row((1, 2, 3)), a_row((1, 4, 5))) == Sharing([], [], [])


def test_a_document_is_shared_below_a_prompt_that_all_share() -> None:
    rows = [a_row((*SYSTEM, *between, own)) for own, between in enumerate((DOCUMENT, OTHER, DOCUMENT, OTHER), start=20)]
    found = sharing(*rows)
    everyone, pairs = frozenset(range(4)), {frozenset((0, 2)), frozenset((1, 3))}
    assert readers_by_split(found) == {0: {everyone}, 1: pairs, 2: pairs}
    assert found.own == [3, 3, 3, 3]


def test_the_split_with_the_new_token_is_each_rows_own() -> None:
    # drafts: the same blocks, contexts that grow by one, across the end of a split
    found = sharing(*(a_row((*SYSTEM, *DOCUMENT, 20), context) for context in (256, 257, 258)))
    assert readers_by_split(found) == {0: {frozenset(range(3))}, 1: {frozenset((1, 2))}}
    assert dict(zip(found.readers, found.own, strict=True)) == {0: 1, 1: 2, 2: 2}
    assert sharing(a_row(SYSTEM, 128), a_row(SYSTEM, 128)).spans == []


def test_what_is_behind_the_end_of_a_row_does_not_count() -> None:
    # 77 is also what the tables have behind the short row
    rows = [a_row((*SYSTEM, *(77,) * 6, 20)), a_row((*SYSTEM, 5)), a_row((*SYSTEM, *(77,) * 6, 21))]
    found = readers_by_split(sharing(*rows))
    assert found == {0: {frozenset(range(3))}, **{split: {frozenset((0, 2))} for split in (1, 2, 3)}}


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Rows with blocks from few numbers, so that beginnings are often alike; drafts of one answer among them."""
    tables = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9))
    return [a_row(tuple(blocks), draw(st.integers(1, 64 * len(blocks)))) for blocks in tables]


@given(some_rows())
def test_every_split_is_read_once_for_all_rows_that_have_it(rows: list[Row]) -> None:
    expected: dict[int, dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for row, (_, _, context, blocks, _) in enumerate(rows):
        for split in range((context - 1) // 64 // PAGES):
            expected[split][blocks[: PAGES * (split + 1)]].add(row)
    found = sharing(*rows)
    groups = readers_by_split(found)
    together = {split: {frozenset(same) for same in by.values() if len(same) > 1} for split, by in expected.items()}
    # a split that ends alike behind another beginning is not found only by its blocks
    assert groups == {split: same for split, same in together.items() if same}
    for row, own in zip(found.readers, found.own, strict=True):
        assert own == sum(any(row in readers for readers in same) for same in groups.values())
    # the first split of a row's own is behind the last that it shares
    for row in range(len(rows)):
        shared = [split for split, same in groups.items() if any(row in readers for readers in same)]
        assert shared == [] or sorted(shared) == list(range(max(shared) + 1))


def test_fields_are_filled_with_spans_and_padding() -> None:
    arrays: dict[str, Any] = {
        name: np.full(shape, 99, dtype=np.int32) for name, shape in (("spans", (4, 4)), ("readers", 4), ("own", 4))
    }
    fill_sharing(arrays, Sharing([3, 1], [SharedSpan(0, 2, 0, 2)], [2, 2]))
    assert arrays["spans"].tolist() == [[0, 2, 0, 2], *[[0] * 4] * 3]
    assert arrays["readers"].tolist() == [3, 1, 0, 0]
    assert arrays["own"].tolist() == [0, 2, 0, 2]
    fill_sharing(arrays, Sharing([], [], []))
    assert not any(array.any() for array in arrays.values())
