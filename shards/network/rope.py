"""Rotary position embedding: turns a token's position into angles.

Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753); the `llama3` and `linear`
rules as in transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shards.network.config import Rope


class Rotation(NamedTuple):
    """The angles of a step's tokens for `rotate_in_place`. `cos` and `signed_sin` are [tokens, 1, head_dim].

    `query_scale` [tokens, 1, 1] multiplies the queries; None is 1.
    """

    cos: Tensor
    signed_sin: Tensor
    query_scale: Tensor | None = None


class RotaryEmbedding:
    """Makes the rotations for one network's positions."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope = rope
        self.inverse_frequencies = inverse_frequencies(rope, head_dim)
        self.attention_factor = attention_factors(rope, head_dim)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotations for `positions` [tokens] in `dtype`. Angles are float32, as in transformers."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor is not None:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        turned = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
        growth = self.rope.query_growth
        if not growth:
            return Rotation(*turned)
        periods = (positions[:, None, None] // self.rope.original_positions).to(torch.float32)
        return Rotation(*turned, (1.0 + growth * periods.log1p()).to(dtype))

    def turn(self, distance: int) -> Rotation:
        """The rotation by which a key at any position gets to the position `distance` behind it, in float32.

        It is exact for every kind of scaling here, since all angles grow in proportion to the position.
        """
        angles = distance * torch.cat((self.inverse_frequencies, self.inverse_frequencies)).double()
        sin, half = angles.sin().float(), len(self.inverse_frequencies)
        return Rotation(angles.cos().float(), torch.cat((-sin[:half], sin[half:])))


def rotate_in_place(heads: Tensor, rotation: Rotation) -> None:
    """Rotate every head of `heads` [tokens, heads, head_dim] to its token's position.

    The two numbers of a pair are half a head apart, so exchanging halves is a roll; the sign is in the sine.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(rotation.cos).addcmul_(swapped, rotation.signed_sin)


def squared_distances(moved: Tensor, computed: Tensor) -> Tensor:
    """How far `moved` keys and values are from `computed` ones, both [2 * kv_heads, tokens, head_dim], for each token:
    the squared distances of keys and of values, each in units of their mean square, so that neither hides the other.
    """
    total = torch.zeros(moved.shape[1], device=moved.device)
    for given, right in zip(moved.chunk(2), computed.chunk(2), strict=True):
        total += (given - right).square().sum((0, 2)) / right.square().sum((0, 2)).mean().clamp_min(1e-30)
    return total


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]; 0 for pairs that are not rotated."""
    dims = rope.dims or head_dim
    frequencies = _scaled(1.0 / (rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)), rope, dims)
    return torch.cat((frequencies, torch.zeros((head_dim - dims) // 2)))


def _scaled(frequencies: Tensor, rope: Rope, dims: int) -> Tensor:
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, dims)
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.factors)
    return frequencies


def attention_factors(rope: Rope, head_dim: int) -> Tensor | None:
    """The factors on cosines and sines of each pair, float32 [head_dim / 2]; None if all are 1."""
    factor, dims = attention_factor(rope), rope.dims or head_dim
    if factor == 1.0:
        return None
    return torch.cat((torch.full((dims // 2,), factor), torch.ones((head_dim - dims) // 2)))


def attention_factor(rope: Rope) -> float:
    """The factor on cosines and sines of rotated pairs: above 1 for YaRN and LongRoPE, which sharpen long contexts."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions)) if rope.factor > 1.0 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature for a context that is `factor` times as long, weighted with `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Stretch long waves by the factor, keep short ones, and interpolate between."""
    turns = rope.original_positions * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: Tensor, rope: Rope, dims: int) -> Tensor:
    """Keep pairs that turn often within the original context, stretch the slow ones, with a ramp between."""

    def pair_turning(turns: float) -> float:
        return dims * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a ramp of width zero would divide by zero; transformers uses the same width
    stretched = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
