"""The calls of a network, as the first process sends them to the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from shards.exec.batch import Batch, Row
from shards.exec.drawing import Drawing
from shards.exec.moves import KvMove
from shards.kv.copier import BlockCopy
from shards.kv.keys import BLOCK_TOKENS


class NetworkOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call that every process makes, in the order in which the first one sends them."""


class Allocate(NetworkOrder, frozen=True, tag=True):
    """Allocate `blocks` blocks of KV. Answered."""

    blocks: int


class AskRoom(NetworkOrder, frozen=True, tag=True):
    """Say how many bytes of a GPU are left for KV. Answered."""

    batch_tokens: int
    rows: int
    shards: int


class Host(NetworkOrder, frozen=True, tag=True):
    """Allocate host memory for `slots` blocks. Answered."""

    slots: int


class Reserve(NetworkOrder, frozen=True, tag=True):
    """Allocate the slots of `rows` sequences. Answered."""

    rows: int


class Prepare(NetworkOrder, frozen=True, tag=True):
    """Compile steps of up to `rows` sequences, and decoding steps of up to `drawn` rows. Answered."""

    rows: int
    drawn: int


class Copy(NetworkOrder, frozen=True, tag=True):
    """Copy blocks between device and host."""

    copies: list[BlockCopy]


class Move(NetworkOrder, frozen=True, tag=True):
    """Move KV to other positions; if it `measures`, compare only."""

    move: KvMove
    measures: bool


class PartOfStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a step. Its blocks are those of sequence `table` of the step before, or none if that is -1, and
    `blocks` behind them.
    """

    tokens: int
    context_tokens: int
    table: int
    blocks: tuple[int, ...]


class Compute(NetworkOrder, frozen=True, tag=True):
    """Compute a batch; with `drawings`, on a device that draws its tokens. Numbers in `bytes` are int32."""

    token_ids: bytes
    parts: list[PartOfStep]
    wanted: bytes
    is_exact: bool
    ahead: tuple[tuple[int, int], ...]
    drawings: tuple[Drawing, ...] | None = None


class Mask(NetworkOrder, frozen=True, tag=True):
    """Let the last batch draw, with the allowed tokens of each masked drawing."""

    masks: list[bytes]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an order: a number, or the `error` that kept the process from obeying."""

    value: int = 0
    error: str = ""


Orders = Allocate | AskRoom | Host | Reserve | Prepare | Copy | Move | Compute | Mask


class BatchWriter:
    """Writes batches as orders. Tables of blocks hardly change from step to step, so only what is new is sent: 64
    decoding sequences take about a kilobyte, whatever their contexts.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], int] = {}

    def write(self, batch: Batch, drawings: Sequence[Drawing] | None = None) -> Compute:
        """The order that computes `batch`."""
        parts = [self._part(row) for row in batch.rows]
        self._tables = {row.blocks: index for index, row in enumerate(batch.rows)}
        return Compute(
            token_ids=_packed(batch.token_ids),
            parts=parts,
            wanted=_packed(batch.logit_rows),
            is_exact=batch.is_exact,
            ahead=batch.ahead,
            drawings=None if drawings is None else tuple(drawings),
        )

    def _part(self, row: Row) -> PartOfStep:
        for old in (len(row.blocks), len(row.blocks) - 1):
            table = self._tables.get(row.blocks[:old])
            if table is not None:
                return PartOfStep(row.tokens, row.context_tokens, table, row.blocks[old:])
        return PartOfStep(row.tokens, row.context_tokens, -1, row.blocks)


class BatchReader:
    """Reads the batches that a `BatchWriter` wrote, in their order."""

    def __init__(self) -> None:
        self._tables: list[tuple[int, ...]] = []

    def read(self, order: Compute) -> Batch:
        """The batch."""
        rows: list[Row] = []
        start = 0
        for part in order.parts:
            held = () if part.table < 0 else self._tables[part.table]
            rows.append(Row(start, part.tokens, part.context_tokens, (*held, *part.blocks)))
            start += part.tokens
        self._tables = [row.blocks for row in rows]
        positions = [np.arange(row.context_tokens - row.tokens, row.context_tokens) for row in rows]
        slots = [
            np.array(row.blocks)[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            for row, at in zip(rows, positions, strict=True)
        ]
        return Batch(
            token_ids=_unpacked(order.token_ids),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            rows=tuple(rows),
            logit_rows=_unpacked(order.wanted),
            is_exact=order.is_exact,
            ahead=order.ahead,
        )


def _packed(numbers: torch.Tensor) -> bytes:
    return numbers.numpy().astype(np.int32).tobytes()


def _unpacked(packed: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(packed, dtype=np.int32).astype(np.int64))
