"""From a plan to tokens: lay out the batch, run the network, draw."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.exec.piece import Piece
from shards.exec.sampling import Sample, Sampler, sample
from shards.exec.sequence import Sequence
from shards.kv.copier import BlockMemory
from shards.kv.keys import BLOCK_TOKENS


class Network(Protocol):
    """A model's weights and the memory of its KV, bound together."""

    @property
    def vocabulary(self) -> int:
        """Size of the logits; token ids are below it."""
        ...

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        ...

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        ...

    def allocate(self, blocks: int) -> None:
        """Make memory for the KV of `blocks` blocks; once, before the first step."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV and give float32 logits [len(batch.logit_rows), vocabulary]."""
        ...


@runtime_checkable
class HostedNetwork(Protocol):
    """A network whose KV can be moved to host memory and back."""

    def host_memory(self, slots: int) -> BlockMemory:
        """Host memory for `slots` blocks, bound to what was allocated; once, after `allocate`."""
        ...


class Runner:
    """Runs plans on `network`. It keeps nothing between steps.

    One that is `deterministic` computes each sequence on its own, in pieces whose sizes depend on nothing but their
    place: then the same operations on the same shapes give the same bits, whatever else is in the step.
    """

    def __init__(self, network: Network, *, deterministic: bool = False) -> None:
        self._network, self._deterministic = network, deterministic

    def run(self, pieces: Listed[Piece], sampler_of: Callable[[Sequence], Sampler]) -> list[Sample | None]:
        """Compute `pieces` and draw a token for each that draws, in order.

        None instead of a token where the network gave NaN or infinity. The sequences' tables must have room. Only the
        samplers change, which note the prompt before the first draw.
        """
        drawing = [piece.sequence for piece in pieces if piece.draws]
        logits = self._compute_each(pieces) if self._deterministic else self._network.forward(lay_out(pieces))
        if logits.shape != (len(drawing), self._network.vocabulary):
            raise ValueError(f"the network gave logits of shape {tuple(logits.shape)} for {len(drawing)} rows")
        samplers = [sampler_of(one) for one in drawing]
        for one, sampler in zip(drawing, samplers, strict=True):
            if not one.output:
                sampler.begin(one.request.token_ids(0, one.request.submission.prompt_tokens))
        if self._deterministic:
            return [sample(row[None], [sampler])[0] for row, sampler in zip(logits, samplers, strict=True)]
        return sample(logits, samplers) if drawing else []

    def _compute_each(self, pieces: Listed[Piece]) -> Tensor:
        logits = [self._network.forward(lay_out([part], is_exact=True)) for piece in pieces for part in piece.cut()]
        return torch.cat([row for row in logits if len(row)]) if any(map(len, logits)) else logits[-1]


def lay_out(pieces: Listed[Piece], *, is_exact: bool = False) -> Batch:
    """The batch that computes `pieces`, in their order."""
    token_ids = [piece.sequence.token_ids(piece.start, piece.stop) for piece in pieces]
    rows: list[Row] = []
    logit_rows: list[int] = []
    start = 0
    for piece in pieces:
        rows.append(Row(start, piece.tokens, piece.stop, piece.sequence.table.ids))
        start += piece.tokens
        if piece.draws:
            logit_rows.append(start - 1)
    if start == len(rows):
        return _lay_out_single(rows, [int(one[0]) for one in token_ids], logit_rows, is_exact=is_exact)
    spans = [np.arange(piece.start, piece.stop) for piece in pieces]
    places = [_slots(row, span) for row, span in zip(rows, spans, strict=True)]
    return Batch(
        token_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(spans)),
        slots=torch.from_numpy(np.concatenate(places)),
        rows=tuple(rows),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        is_exact=is_exact,
    )


def _lay_out_single(rows: list[Row], token_ids: list[int], logit_rows: list[int], *, is_exact: bool) -> Batch:
    """The batch of rows of one token each, as in decoding; lists take a third of the time of numpy here."""
    slots: list[int] = []
    for row in rows:
        block, offset = divmod(row.context_tokens - 1, BLOCK_TOKENS)
        slots.append(row.blocks[block] * BLOCK_TOKENS + offset)
    columns = (token_ids, [row.context_tokens - 1 for row in rows], slots, logit_rows)
    ids, positions, places, wanted = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return Batch(ids, positions, places, tuple(rows), wanted, is_exact)


def _slots(row: Row, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    first = int(positions[0]) // BLOCK_TOKENS
    blocks = np.array(row.blocks[first:], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS - first] * BLOCK_TOKENS + positions % BLOCK_TOKENS
