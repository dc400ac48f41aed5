"""Projections to the queries, keys and values of separate heads, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shards.network.group import ALONE, Group
from shards.network.layers import Linear, is_compiled, normalize, normalize_heads_in_place
from shards.network.rope import Rotation, rotate_in_place


@dataclass(frozen=True, slots=True)
class HeadProjection:
    """Multi-head attention's matrices, of which `kv_heads` heads have keys and values (GQA, arXiv 2305.13245).

    `query_key_value` goes from hidden to (heads + 2 * kv_heads) * head_dim, `linear_out` from heads * head_dim back.
    `query_key_norm` [heads + kv_heads, head_dim]: the norm weights of the queries and of the keys, once per head. If
    `is_wide`, all queries of a token are normalised together, and all its keys: those of all processes in `group`.
    """

    query_key_value: Linear
    linear_out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    query_key_norm: Tensor | None = None
    is_wide: bool = False
    group: Group = ALONE

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], and keys and values [tokens, 2 * kv_heads, head_dim]."""
        heads = self.query_key_value(hidden).view(len(hidden), -1, self.head_dim)
        self._normalize_and_rotate(heads, rotation)
        queries, keys_values = torch.split(heads, [self.heads, 2 * self.kv_heads], 1)
        return queries if rotation.query_scale is None else queries * rotation.query_scale, keys_values

    def output(self, mixed: Tensor) -> Tensor:
        """The product with the output matrix, [tokens, hidden]."""
        return self.linear_out(mixed.flatten(1))

    def _normalize_and_rotate(self, heads: Tensor, rotation: Rotation) -> None:
        """In place, the queries and keys among `heads` [tokens, heads + 2 * kv_heads, head_dim]."""
        count, weight = self.heads + self.kv_heads, self.query_key_norm
        if self.is_wide:
            self._normalize_wide(heads)
            weight = None
        if is_compiled(heads, weight):
            from shards.compiled.floats import bits
            from shards.compiled.rows import normalise_and_turn

            no_weight = heads.new_empty(0, self.head_dim) if weight is None else weight
            cos, signed_sin = rotation.cos.squeeze(1), rotation.signed_sin.squeeze(1)
            normalise_and_turn(bits(heads), count, bits(no_weight), self.eps, bits(cos), bits(signed_sin))
            return
        if weight is not None:
            normalize_heads_in_place(heads[:, :count], weight, self.eps)
        rotate_in_place(heads[:, :count], rotation)

    def _normalize_wide(self, heads: Tensor) -> None:
        assert self.query_key_norm is not None, "a wide norm has weights"
        for start, stop in ((0, self.heads), (self.heads, self.heads + self.kv_heads)):
            flat, weight = heads[:, start:stop].flatten(1), self.query_key_norm[start:stop].flatten()
            normal = normalize(flat, weight, self.eps) if self.group.size == 1 else self._joint(flat, weight)
            heads[:, start:stop] = normal.view(len(heads), -1, self.head_dim)

    def _joint(self, flat: Tensor, weight: Tensor) -> Tensor:
        """`flat` [tokens, numbers] normalised together with the numbers of all processes, which have equally many."""
        squares = self.group.sum(flat.float().square().mean(-1, keepdim=True)) / self.group.size
        return (flat.float() * torch.rsqrt(squares + self.eps)).mul_(weight).to(flat.dtype)
