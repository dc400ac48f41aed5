"""From a plan to tokens: lay out the batch, run the network, draw."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.exec.sampling import Sample, sample
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS

Piece = tuple[Sequence, int]
"""A sequence and how many of its next tokens to compute."""


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


class Runner:
    """Runs plans on `network`. It keeps nothing between steps."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def run(self, pieces: Listed[Piece]) -> list[Sample | None]:
        """Compute `pieces` and draw a token for each whose last known token is among them, in order.

        None instead of a token where the network gave NaN or infinity. The sequences' tables must have room. Of the
        sequences only the samplers change, which note the prompt before the first draw.
        """
        batch = lay_out(pieces)
        logits = self._network.forward(batch)
        drawing = [one for one, tokens in pieces if one.draws_after(tokens)]
        if logits.shape != (len(drawing), self._network.vocabulary):
            raise ValueError(f"the network gave logits of shape {tuple(logits.shape)} for {len(drawing)} rows")
        for one in drawing:
            if not one.output:
                one.sampler.begin(one.request.token_ids(0, one.request.submission.prompt_tokens))
        return sample(logits, [one.sampler for one in drawing]) if drawing else []


def lay_out(pieces: Listed[Piece]) -> Batch:
    """The batch that computes `pieces`, in their order."""
    token_ids: list[npt.NDArray[np.uint32] | list[int]] = []
    rows: list[Row] = []
    logit_rows: list[int] = []
    start = 0
    for one, tokens in pieces:
        token_ids.append(one.token_ids(tokens))
        rows.append(Row(start, tokens, one.computed_tokens + tokens, one.table.ids))
        start += tokens
        if one.draws_after(tokens):
            logit_rows.append(start - 1)
    if start == len(rows):
        return _lay_out_single(rows, [int(one[0]) for one in token_ids], logit_rows)
    spans = [np.arange(row.context_tokens - row.tokens, row.context_tokens) for row in rows]
    places = [_slots(row, span) for row, span in zip(rows, spans, strict=True)]
    return Batch(
        token_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(spans)),
        slots=torch.from_numpy(np.concatenate(places)),
        rows=tuple(rows),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )


def _lay_out_single(rows: list[Row], token_ids: list[int], logit_rows: list[int]) -> Batch:
    """The batch of rows of one token each, as in decoding; lists take a third of the time of numpy here."""
    slots: list[int] = []
    for row in rows:
        block, offset = divmod(row.context_tokens - 1, BLOCK_TOKENS)
        slots.append(row.blocks[block] * BLOCK_TOKENS + offset)
    columns = (token_ids, [row.context_tokens - 1 for row in rows], slots, logit_rows)
    ids, positions, places, wanted = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return Batch(ids, positions, places, tuple(rows), wanted)


def _slots(row: Row, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    first = int(positions[0]) // BLOCK_TOKENS
    blocks = np.array(row.blocks[first:], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS - first] * BLOCK_TOKENS + positions % BLOCK_TOKENS
