"""Checks a step's indices on the host: with a wrong index a kernel would read or write outside its memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shards.gpu.spans import Ints, Step
from shards.kernels.cache import BLOCK_TOKENS
from shards.network.config import NetworkConfig


def require_step(step: Step, config: NetworkConfig, *, blocks: int, rows: int, pages: int | None = None) -> None:
    """Raise ValueError unless `step` fits a cache of `blocks` blocks (plus one for padding) and a pool of `rows` rows.
    With `pages` the written blocks must have one.

    40 us for 64 rows. Table entries other than those of written slots are trusted and not checked here.
    """
    for row in step.rows:
        if row.context_tokens > len(row.blocks) * BLOCK_TOKENS:
            raise ValueError(f"a context of {row.context_tokens} tokens does not fit into {len(row.blocks)} blocks")
    _require_below("token", step.known, config.vocab_size)
    _require_below("position", step.positions, config.max_positions)
    _require_below("slot", step.slots, (blocks + 1) * BLOCK_TOKENS)
    if pages is not None and step.page_of is not None:
        _require_pages(step.page_of, step.slots, blocks=blocks, pages=pages)
    _require_below("token that is wanted", step.wanted, len(step.known))
    _require_below("row that remembers", step.targets, rows + 1)
    tokens = len(step.known)
    for token, place in step.ahead:
        if not (0 <= token < tokens and 0 <= place < rows):
            raise ValueError(f"token {token} of {tokens} refers to row {place} of {rows}")


def _require_pages(page_of: npt.NDArray[np.int32], slots: Ints, *, blocks: int, pages: int) -> None:
    if len(page_of) != blocks + 1:
        raise ValueError(f"there are {len(page_of)} places of pages, and {blocks} blocks and one for padding")
    # as unsigned numbers, without a copy of a map that may have a hundred thousand entries
    if page_of.view(np.uint32).max() > pages:
        raise ValueError(
            f"a page is {page_of.min() if page_of.min() < 0 else page_of.max()}, and there are {pages + 1}"
        )
    written = slots // BLOCK_TOKENS
    lacking = written[(page_of[written] == pages) & (written != blocks)]
    if len(lacking):
        raise ValueError(f"block {lacking[0]} is written and has no page")


def _require_below(name: str, values: Ints, bound: int) -> None:
    # as unsigned numbers, negative values are far above the bound: one pass instead of two
    if len(values) and values.view(np.uint64).max() >= bound:
        worst = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"a {name} is {worst}, and there are {bound}")
