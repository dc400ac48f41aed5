"""Multi-head latent attention: one compressed key and value per token serves all heads (arXiv 2405.04434).

The matrix that would expand a key is applied to the query instead, and that of the value to the mix of values. So
attention reads the compressed numbers as one KV head, and nothing is expanded for positions that were computed before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shards.network.config import Latent
from shards.network.layers import Linear, normalize
from shards.network.rope import Rotation, rotate_in_place


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """The matrices of latent attention.

    `query_down` and `query_norm` compress the queries if the family does. `query` goes to heads * (nope_dim +
    rope_dim), `key_value_down` from hidden to rank + rope_dim. `key_up` [heads, nope_dim, rank] and `value_up` [heads,
    rank, value_dim] are the expansion of keys and values; `linear_out` goes from heads * value_dim to hidden.
    """

    shape: Latent
    heads: int
    eps: float
    query: Linear
    key_value_down: Linear
    key_value_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    linear_out: Linear
    query_down: Linear | None = None
    query_norm: Tensor | None = None

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, rank + rope_dim], and compressed keys with values [tokens, 1, rank + rope_dim]."""
        shape, tokens = self.shape, len(hidden)
        compressed = hidden if self.query_down is None else self.query_down(hidden)
        queries = self.query(normalize(compressed, self.query_norm, self.eps))
        own, turning = torch.split(queries.view(tokens, self.heads, -1), [shape.nope_dim, shape.rope_dim], -1)
        keys_values = self.key_value_down(hidden).unsqueeze(1)
        keys_values[..., : shape.rank] = normalize(keys_values[..., : shape.rank], self.key_value_norm, self.eps)
        rotate_in_place(keys_values[..., shape.rank :], rotation)
        turning = turning.contiguous()
        rotate_in_place(turning, rotation)
        raised = torch.bmm(own.transpose(0, 1), self.key_up).transpose(0, 1)
        return torch.cat((raised, turning), -1), keys_values

    def output(self, mixed: Tensor) -> Tensor:
        """Expand the mix of values [tokens, heads, rank + rope_dim], and multiply it with the output matrix."""
        compressed = mixed[..., : self.shape.rank].transpose(0, 1).to(self.value_up.dtype)
        values = torch.bmm(compressed, self.value_up)
        return self.linear_out(values.transpose(0, 1).flatten(1))
