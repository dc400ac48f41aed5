"""The work of one step on the host, in the order that the kernels need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shards.exec.batch import Batch, Row
from shards.exec.drawing import GREEDY, Drawing
from shards.kernels.cache import BLOCK_TOKENS

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: `token_ids` follow `computed_tokens` that have KV; `blocks` hold them all.

    `token_ids` None: one token, which the previous step drew for this `row` and which the host may not know yet.
    `row` is the sequence's place in the token pool, its own while it runs. With a `drawing`, a token is drawn after
    the last.
    """

    row: int
    token_ids: Sequence[int] | npt.NDArray[np.generic] | None
    computed_tokens: int
    blocks: Sequence[int]
    drawing: Drawing | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens that it computes."""
        return 1 if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """A step on the host: `known`, `positions` and `slots` are [tokens]; `rows` assign the tokens to sequences.

    `ahead` are pairs (token, row of the token pool), for tokens that only the device knows. `wanted` [wanted] are the
    tokens after which logits are needed; for each, `drawings` are the parameters of its draw, and `targets` the row of
    the pool that stores it. A step that `is_exact` is always computed in one way, whatever its size and history.
    `page_of` is the page of each block, and of padding, if layers with a window have pages of their own.
    """

    known: Ints
    positions: Ints
    slots: Ints
    rows: tuple[Row, ...]
    ahead: tuple[tuple[int, int], ...]
    wanted: Ints
    drawings: tuple[Drawing, ...]
    targets: Ints
    is_exact: bool = False
    page_of: npt.NDArray[np.int32] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.known) == len(self.rows)

    def sorted(self, *, dense_from_pairs: int | None) -> tuple[Step, tuple[int, int, int]]:
        """The same step with decoding rows first, then short chunks, then long ones; and the number of rows per kind.

        A chunk is long if it has at least `dense_from_pairs` pairs of a new and a seen position; None: no chunk is.
        """
        kinds = [_kind(row, dense_from_pairs) for row in self.rows]
        counts = (kinds.count(0), kinds.count(1), kinds.count(2))
        if all(a <= b for a, b in pairwise(kinds)):
            return self, counts
        rows = [self.rows[index] for index in sorted(range(len(kinds)), key=kinds.__getitem__)]
        moved = np.concatenate([np.arange(row.start, row.start + row.tokens) for row in rows])
        place = np.empty_like(moved)
        place[moved] = np.arange(len(moved))
        step = Step(
            known=self.known[moved],
            positions=self.positions[moved],
            slots=self.slots[moved],
            rows=tuple(row._replace(start=int(place[row.start])) for row in rows),
            ahead=tuple((int(place[token]), row) for token, row in self.ahead),
            wanted=place[self.wanted],
            drawings=self.drawings,
            targets=self.targets,
            is_exact=self.is_exact,
            page_of=self.page_of,
        )
        return step, counts


def _kind(row: Row, dense_from_pairs: int | None) -> int:
    if row.tokens == 1:
        return 0
    return 1 if dense_from_pairs is None or row.tokens * row.context_tokens < dense_from_pairs else 2


def step_of_batch(batch: Batch, *, unread: int) -> Step:
    """The step that computes `batch` and draws greedily, into row `unread` of the pool, which is never read."""
    wanted = batch.logit_rows.numpy()
    return Step(
        known=batch.token_ids.numpy(),
        positions=batch.positions.numpy(),
        slots=batch.slots.numpy(),
        rows=batch.rows,
        ahead=batch.ahead,
        wanted=wanted,
        drawings=(GREEDY,) * len(wanted),
        targets=np.full(len(wanted), unread),
        is_exact=batch.is_exact,
        page_of=None if batch.window_pages is None else batch.window_pages.numpy(),
    )


def step_of_spans(spans: Sequence[Span]) -> Step:
    """The step that computes `spans`, in order. Raises ValueError for a span without tokens or with too few blocks."""
    rows: list[Row] = []
    start = 0
    for span in spans:
        tokens = span.tokens
        context = span.computed_tokens + tokens
        if not tokens or len(span.blocks) * BLOCK_TOKENS < context:
            raise ValueError(f"{tokens} tokens behind {span.computed_tokens} in {len(span.blocks)} blocks")
        rows.append(Row(start, tokens, context, tuple(span.blocks)))
        start += tokens
    known, positions, slots = _single(rows, spans) if start == len(rows) else _several(rows, spans)
    drawing = [(row, span.row, span.drawing) for row, span in zip(rows, spans, strict=True) if span.drawing]
    return Step(
        known=known,
        positions=positions,
        slots=slots,
        rows=tuple(rows),
        ahead=tuple((row.start, span.row) for row, span in zip(rows, spans, strict=True) if span.token_ids is None),
        wanted=np.array([row.start + row.tokens - 1 for row, _, _ in drawing], dtype=np.int64),
        drawings=tuple(how for _, _, how in drawing),
        targets=np.array([target for _, target, _ in drawing], dtype=np.int64),
    )


def _single(rows: Sequence[Row], spans: Sequence[Span]) -> tuple[Ints, Ints, Ints]:
    """Token ids, positions and slots of one token each; as lists, since small arrays cost microseconds each to make."""
    known = [0 if span.token_ids is None else int(span.token_ids[0]) for span in spans]
    positions = [row.context_tokens - 1 for row in rows]
    slots = [
        row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for row, position in zip(rows, positions, strict=True)
    ]
    return np.array(known), np.array(positions), np.array(slots)


def _several(rows: Sequence[Row], spans: Sequence[Span]) -> tuple[Ints, Ints, Ints]:
    known = [np.asarray([0] if span.token_ids is None else span.token_ids, dtype=np.int64) for span in spans]
    positions, slots = zip(*map(_places, rows), strict=True)
    return np.concatenate(known), np.concatenate(positions), np.concatenate(slots)


def _places(row: Row) -> tuple[Ints, Ints]:
    """Positions and slots of a row's new tokens."""
    positions = np.arange(row.context_tokens - row.tokens, row.context_tokens)
    first = int(positions[0]) // BLOCK_TOKENS
    blocks = np.array(row.blocks[first : (row.context_tokens - 1) // BLOCK_TOKENS + 1], dtype=np.int64)
    return positions, blocks[positions // BLOCK_TOKENS - first] * BLOCK_TOKENS + positions % BLOCK_TOKENS
