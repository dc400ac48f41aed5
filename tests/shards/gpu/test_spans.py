from __future__ import annotations

import numpy as np
import pytest

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY, Drawing
from shards.gpu.fill import (
    fill_chunks,
    fill_decodes,
    fill_drawings,
    fill_tokens,
    fill_wanted,
    for_every_row,
    most_pages,
)
from shards.gpu.layout import Layout, Size, decode_fields, mixed_fields
from shards.gpu.spans import Span, Step, step_of_batch, step_of_spans
from tests.shards.tiny_checkpoints import a_batch


def a_decode(row: int, computed: int, blocks: list[int], *, known: int | None = None) -> Span:
    return Span(row, None if known is None else [known], computed, blocks, Drawing(seed=row))


def test_spans_give_the_place_of_every_token() -> None:
    step = step_of_spans([Span(0, [5, 6, 7], 63, [9, 4]), a_decode(3, 64, [2, 1])])
    assert step.known.tolist() == [5, 6, 7, 0]
    assert step.positions.tolist() == [63, 64, 65, 64]
    assert step.slots.tolist() == [9 * 64 + 63, 4 * 64, 4 * 64 + 1, 64]
    assert step.ahead == ((3, 3),)
    assert (step.wanted.tolist(), step.targets.tolist()) == ([3], [3])
    assert not step.is_decode


def test_a_batch_and_its_spans_are_one_step() -> None:
    of_batch = step_of_batch(a_batch(([5, 6], 64, (9, 4)), ([8], 0, (7,)), wanted=[1, 2]), unread=99)
    of_spans = step_of_spans([Span(99, [5, 6], 64, [9, 4], GREEDY), Span(99, [8], 0, [7], GREEDY)])
    for name in ("known", "positions", "slots", "wanted", "targets"):
        np.testing.assert_array_equal(getattr(of_batch, name), getattr(of_spans, name))
    assert (of_batch.rows, of_batch.drawings) == (of_spans.rows, of_spans.drawings)


@pytest.mark.parametrize("span", [Span(0, [], 3, [1]), Span(0, [1], 64, [1])])
def test_a_span_without_tokens_or_blocks_is_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="tokens behind"):
        step_of_spans([span])


def test_decoding_rows_come_first_then_short_chunks_then_long_ones() -> None:
    mixed = step_of_spans(
        [
            Span(0, list(range(10, 60)), 0, [1], GREEDY),
            a_decode(1, 5, [2]),
            Span(2, [70, 71], 0, [3]),
            a_decode(3, 6, [4], known=80),
        ]
    )
    step, counts = mixed.sorted(dense_from_pairs=2000)
    assert counts == (2, 1, 1)
    assert [(row.start, row.tokens) for row in step.rows] == [(0, 1), (1, 1), (2, 2), (4, 50)]
    assert step.known.tolist() == [0, 80, 70, 71, *range(10, 60)]
    assert step.ahead == ((0, 1),)
    # the order of what is drawn is that of the spans
    assert step.wanted.tolist() == [53, 0, 1]
    assert (step.drawings, step.targets.tolist()) == (mixed.drawings, [0, 1, 3])


def test_what_is_in_order_is_left_alone() -> None:
    step = step_of_spans([a_decode(0, 5, [2]), Span(1, [1, 2], 0, [3], GREEDY)])
    assert step.sorted(dense_from_pairs=2000)[0] is step


def filled(step: Step, bucket: int) -> dict[str, np.ndarray]:
    layout = Layout.of(decode_fields(bucket, most_pages(step.rows)))
    arrays = layout.arrays(np.full(layout.words, -77, dtype=np.int32))
    fill_drawings(arrays, *for_every_row(step, bucket, unread=100))
    fill_tokens(arrays, step, pool_rows=101, padding_slot=640)
    fill_decodes(arrays, step.rows)
    return arrays


def test_padding_reads_nothing_and_goes_to_what_is_set_aside() -> None:
    arrays = filled(step_of_spans([a_decode(7, 64, [2, 5]), Span(8, [3], 1, [6])]), 4)
    assert arrays["source"].tolist() == [7, 102, 103, 104]
    assert arrays["known"].tolist() == [0, 3, 0, 0]
    assert arrays["position"].tolist() == [64, 1, 0, 0]
    assert arrays["slot"].tolist() == [5 * 64, 6 * 64 + 1, 640, 640]
    assert arrays["context"].tolist() == [65, 2, 0, 0]
    assert arrays["tables"][0].tolist() == [2, 5]
    assert arrays["tables"][1, 0] == 6
    # the second row draws nothing, nor does padding: their tokens go to a place that is not read
    assert arrays["target"].tolist() == [7, 100, 100, 100]


def test_the_row_behind_the_last_has_the_tokens_and_the_tiles_that_are_left() -> None:
    step = step_of_spans([a_decode(7, 64, [2, 5]), Span(8, [3] * 5, 0, [6], GREEDY)])
    layout = Layout.of(mixed_fields(Size(tokens=9, rows=4, decoding=3, drawn=3, tiles=5), 2))
    arrays = layout.arrays(np.full(layout.words, -77, dtype=np.int32))
    fill_wanted(arrays, step, unread=100)
    # the chunk has two tiles of 4 tokens
    fill_chunks(arrays, step.rows, [(1, 0, 0, 1), (1, 4, 1, 2)], tokens=6, tile_tokens=4)
    assert arrays["wanted"].tolist() == [0, 5, 0]
    assert arrays["target"].tolist() == [7, 8, 100]
    assert arrays["first_queries"].tolist() == [0, 1, 6, 9, 9]
    assert arrays["seen"].tolist() == [65, 5, 0, 0]
    # of the third row's tiles the first has its three tokens, and the others none
    assert arrays["tiles"].tolist() == [[1, 0, 0, 1], [1, 4, 1, 2], [2, 0, 0, 1], [2, 4, 0, 1], [2, 8, 0, 1]]


def test_seeds_of_64_bits_fit() -> None:
    arrays = filled(step_of_spans([Span(0, [3], 1, [6], Drawing(seed=2**64 - 1))]), 1)
    assert arrays["seed"].tolist() == [-1]


def test_blocks_that_are_held_ahead_are_not_sent() -> None:
    assert most_pages([Row(0, 1, 65, (1, 2, 3, 4))]) == 2
