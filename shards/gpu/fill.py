"""Writes a step's metadata into the fields of a buffer. Room beyond the step's need is filled with padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY, Drawing
from shards.gpu.spans import Step
from shards.kernels.adjust import COUNTS, MAY_END
from shards.kernels.cache import BLOCK_TOKENS
from shards.kernels.paged_prefill import TilePart

Arrays = Mapping[str, npt.NDArray[Any]]

_NOT_ADJUSTED = (-1, -1, 0)


def fill_drawings(arrays: Arrays, drawings: Sequence[Drawing], targets: Sequence[int]) -> None:
    """For each row of logits, the parameters of its draw and the row of the token pool that stores the token."""
    arrays["target"][:] = targets
    if not drawings:
        return
    columns = dict(zip(Drawing._fields, zip(*drawings, strict=True), strict=True))
    seeds = np.array([seed % 2**64 for seed in columns["seed"]], dtype=np.uint64)
    arrays["seed"][:] = seeds.view(np.int64)
    arrays["drawn_at"][:] = columns["position"]
    for name in ("temperature", "top_p", "min_p", "top_k"):
        arrays[name][:] = columns[name]
    arrays["top_logprobs"][:] = [-1 if top is None else top for top in columns["top_logprobs"]]
    arrays["adjusted"][:] = _NOT_ADJUSTED
    for row, adjustment in enumerate(columns["adjustment"]):
        if adjustment is not None:
            flags = MAY_END.value * adjustment.may_end + COUNTS.value * adjustment.counts
            arrays["adjusted"][row] = (adjustment.slot, -1, flags)
            arrays["penalties"][row] = (adjustment.repetition, adjustment.presence, adjustment.frequency)
    masked = [row for row, is_masked in enumerate(columns["is_masked"]) if is_masked]
    arrays["adjusted"][masked, 1] = range(len(masked))


def fill_tokens(arrays: Arrays, step: Step, *, pool_rows: int, padding_slot: int) -> None:
    """The value and the slot of each token; tokens of padding are token 0 and go to `padding_slot`."""
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


def fill_pages(arrays: Arrays, step: Step, *, padding: int) -> None:
    """The page of each block; `padding` is the page of all in a step without a map."""
    arrays["page_of"][:] = padding if step.page_of is None else step.page_of


def fill_decodes(arrays: Arrays, rows: Sequence[Row]) -> None:
    """Contexts and tables of rows with one new token."""
    fill_contexts(arrays["context"], rows)
    fill_tables(arrays["tables"], rows)


def fill_contexts(contexts: npt.NDArray[Any], rows: Sequence[Row]) -> None:
    """The context of each row; rows of padding have none, so they read nothing."""
    contexts[: len(rows)] = [row.context_tokens for row in rows]
    contexts[len(rows) :] = 0


def fill_chunks(
    arrays: Arrays, rows: Sequence[Row], tiles: Sequence[TilePart], *, tokens: int, tile_tokens: int
) -> None:
    """Where each of all rows has its new tokens, of `tokens` in total, and the tiles of chunks. The row behind the last
    is padding, if there is one: it has the tokens that are left, no context, and the tiles that are left.
    """
    count, used = len(rows), len(tiles)
    arrays["first_queries"][: count + 1] = [*(row.start for row in rows), tokens]
    arrays["first_queries"][count + 1 :] = len(arrays["source"])
    fill_contexts(arrays["seen"], rows)
    arrays["tiles"][:used] = np.array(tiles, dtype=np.int32).reshape(-1, 4)
    arrays["tiles"][used:, 0] = count
    arrays["tiles"][used:, 1] = np.arange(len(arrays["tiles"]) - used) * tile_tokens
    arrays["tiles"][used:, 2:] = 0, 1


def fill_wanted(arrays: Arrays, step: Step, *, unread: int) -> None:
    """The tokens that need logits, and their draws. Rows of padding draw after the first token, into row `unread`."""
    count, room = len(step.wanted), len(arrays["wanted"])
    arrays["wanted"][:count] = step.wanted
    arrays["wanted"][count:] = 0
    padding = room - count
    fill_drawings(arrays, [*step.drawings, *[GREEDY] * padding], [*step.targets.tolist(), *[unread] * padding])


def fill_tables(tables: npt.NDArray[Any], rows: Sequence[Row]) -> None:
    """The blocks of each row; entries behind them are never read."""
    if not rows:
        return
    needed = list(map(pages_of, rows))
    # one conversion for all rows takes a third of the time of one for each
    ids = [block for row, pages in zip(rows, needed, strict=True) for block in row.blocks[:pages]]
    tables[: len(rows)][np.arange(tables.shape[1]) < np.array(needed)[:, None]] = ids


def for_every_row(step: Step, rows: int, *, unread: int) -> tuple[list[Drawing], list[int]]:
    """The draws of a decoding step for all `rows` rows: rows without wanted logits draw into row `unread`."""
    drawings, targets = [GREEDY] * rows, [unread] * rows
    for token, drawing, target in zip(step.wanted.tolist(), step.drawings, step.targets.tolist(), strict=True):
        drawings[token], targets[token] = drawing, target
    return drawings, targets


def pages_of(row: Row) -> int:
    """The number of blocks of a row's context."""
    return -(-row.context_tokens // BLOCK_TOKENS)


def most_pages(rows: Sequence[Row]) -> int:
    """The width that a table of `rows` needs."""
    return max(map(pages_of, rows), default=0)
