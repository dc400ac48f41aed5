"""What a step may ask of the device, checked on the host: a kernel would read and write beyond its memory instead."""

from __future__ import annotations

import numpy as np

from shards.gpu.spans import Ints, Step
from shards.kernels.cache import BLOCK_TOKENS
from shards.network.config import NetworkConfig


def require_step(step: Step, config: NetworkConfig, *, blocks: int, rows: int) -> None:
    """Raise ValueError unless `step` fits a cache of `blocks` blocks (and one set aside) and a pool of `rows` rows.

    40 us for 64 rows. What lies behind the first block that is written is the table's word: it is not read here.
    """
    for row in step.rows:
        if row.context_tokens > len(row.blocks) * BLOCK_TOKENS:
            raise ValueError(f"a context of {row.context_tokens} tokens is said to lie in {len(row.blocks)} blocks")
    _require_below("token", step.known, config.vocab_size)
    _require_below("position", step.positions, config.max_positions)
    _require_below("slot", step.slots, (blocks + 1) * BLOCK_TOKENS)
    _require_below("token that is wanted", step.wanted, len(step.known))
    _require_below("row that remembers", step.targets, rows + 1)
    tokens = len(step.known)
    for token, place in step.ahead:
        if not (0 <= token < tokens and 0 <= place < rows):
            raise ValueError(f"token {token} of {tokens} is said to be in row {place} of {rows}")


def _require_below(name: str, values: Ints, bound: int) -> None:
    # as unsigned numbers, what is below 0 is far beyond: one pass instead of two
    if len(values) and values.view(np.uint64).max() >= bound:
        worst = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"a {name} is {worst}, and there are {bound}")
