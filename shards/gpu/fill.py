"""Writes a step's metadata into the fields of a buffer. One may have more room than a step needs: the rest pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY, Drawing
from shards.gpu.spans import Step
from shards.kernels.cache import BLOCK_TOKENS

Arrays = Mapping[str, npt.NDArray[Any]]


def fill_drawings(arrays: Arrays, drawings: Sequence[Drawing], targets: Sequence[int]) -> None:
    """How each row of logits is drawn, and which row of the token pool remembers it."""
    seeds = np.array([one.seed % 2**64 for one in drawings], dtype=np.uint64)
    arrays["seed"][:] = seeds.view(np.int64)
    arrays["drawn_at"][:] = [one.position for one in drawings]
    arrays["target"][:] = targets
    arrays["temperature"][:] = [one.temperature for one in drawings]
    arrays["top_p"][:] = [one.top_p for one in drawings]
    arrays["min_p"][:] = [one.min_p for one in drawings]
    arrays["top_k"][:] = [one.top_k for one in drawings]


def fill_tokens(arrays: Arrays, step: Step, *, pool_rows: int, padding_slot: int) -> None:
    """What each token is and where it goes; tokens of padding are token 0 and go to `padding_slot`."""
    tokens = len(step.known)
    arrays["source"][:] = pool_rows + np.arange(len(arrays["source"]))
    for token, row in step.ahead:
        arrays["source"][token] = row
    for name, values, padding in (
        ("known", step.known, 0),
        ("position", step.positions, 0),
        ("slot", step.slots, padding_slot),
    ):
        arrays[name][:tokens] = values
        arrays[name][tokens:] = padding


def fill_decodes(arrays: Arrays, rows: Sequence[Row]) -> None:
    """Contexts and tables of rows with one new token; rows of padding have no context, and so read nothing."""
    arrays["context"][: len(rows)] = [row.context_tokens for row in rows]
    arrays["context"][len(rows) :] = 0
    fill_tables(arrays["tables"], rows)


def fill_tables(tables: npt.NDArray[Any], rows: Sequence[Row]) -> None:
    """The blocks of each row; what lies behind them is never read."""
    for table, row in zip(tables, rows, strict=False):
        needed = pages_of(row)
        table[:needed] = row.blocks[:needed]


def for_every_row(step: Step, rows: int, *, unread: int) -> tuple[list[Drawing], list[int]]:
    """How a decoding step draws for all of `rows` rows: those whose logits nobody wants draw to `unread`."""
    drawings, targets = [GREEDY] * rows, [unread] * rows
    for token, drawing, target in zip(step.wanted.tolist(), step.drawings, step.targets.tolist(), strict=True):
        drawings[token], targets[token] = drawing, target
    return drawings, targets


def pages_of(row: Row) -> int:
    """How many blocks a row's context lies in."""
    return -(-row.context_tokens // BLOCK_TOKENS)


def most_pages(rows: Sequence[Row]) -> int:
    """How wide a table of `rows` has to be."""
    return max(map(pages_of, rows), default=0)
