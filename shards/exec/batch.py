"""One step's work, laid out for the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from shards.lora.adapter import LoadedAdapter


class Row(NamedTuple):
    """One sequence in a batch: its new tokens are `batch.token_ids[start : start + tokens]`.

    `context_tokens` counts the positions with KV after this step, including the new ones; `blocks` are the ids of the
    pool blocks that hold them, in order. `adapter` changes the network's matrices for its tokens.
    """

    start: int
    tokens: int
    context_tokens: int
    blocks: tuple[int, ...]
    adapter: LoadedAdapter | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and positions [tokens], places of their KV (`slots` [tokens]: block * 64 + offset), and sequences.

    `logit_rows` [wanted] are the indices of the tokens that need logits. All tensors are int64. If `is_exact`,
    the bits of the result may depend on shapes, but not on which blocks hold the KV, nor on how often it was computed.
    `ahead` are pairs (token, place): only the device knows this token, the `place`-th that it drew in its last batch.

    Layers with a window may have pages of their own: `window_pages` int32 [blocks + 1] is the page of each block, and
    of a block of padding. Only the pages of the positions that a token sees there exist.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: tuple[Row, ...]
    logit_rows: torch.Tensor
    is_exact: bool = False
    ahead: tuple[tuple[int, int], ...] = ()
    window_pages: torch.Tensor | None = None
