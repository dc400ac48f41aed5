"""Projections to the queries, keys and values of separate heads, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shards.network.layers import Linear, normalize, normalize_heads_in_place
from shards.network.rope import Rotation, rotate_in_place


@dataclass(frozen=True, slots=True)
class HeadProjection:
    """Multi-head attention's matrices, of which `kv_heads` heads have keys and values (GQA, arXiv 2305.13245).

    `query_key_value` goes from hidden to (heads + 2 * kv_heads) * head_dim, `linear_out` from heads * head_dim back.
    `query_key_norm` [heads + kv_heads, head_dim]: the norm weights of the queries and of the keys, once per head. If
    `is_wide`, all queries of a token are normalised together, and all its keys.
    """

    query_key_value: Linear
    linear_out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    query_key_norm: Tensor | None = None
    is_wide: bool = False

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], and keys and values [tokens, 2 * kv_heads, head_dim]."""
        heads = self.query_key_value(hidden).view(len(hidden), -1, self.head_dim)
        queries_keys = heads[:, : self.heads + self.kv_heads]
        if self.is_wide:
            self._normalize_wide(heads)
        elif self.query_key_norm is not None:
            normalize_heads_in_place(queries_keys, self.query_key_norm, self.eps)
        rotate_in_place(queries_keys, rotation)
        queries, keys_values = torch.split(heads, [self.heads, 2 * self.kv_heads], 1)
        return queries if rotation.query_scale is None else queries * rotation.query_scale, keys_values

    def output(self, mixed: Tensor) -> Tensor:
        """The product with the output matrix, [tokens, hidden]."""
        return self.linear_out(mixed.flatten(1))

    def _normalize_wide(self, heads: Tensor) -> None:
        assert self.query_key_norm is not None, "a wide norm has weights"
        for start, stop in ((0, self.heads), (self.heads, self.heads + self.kv_heads)):
            flat = heads[:, start:stop].flatten(1)
            heads[:, start:stop] = normalize(flat, self.query_key_norm[start:stop].flatten(), self.eps).view(
                len(heads), -1, self.head_dim
            )
