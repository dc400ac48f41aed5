"""Rotary position embedding: turns a token's position into angles.

Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); the `llama3` and `linear` rules as in transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shards.network.config import Rope


class Rotation(NamedTuple):
    """The angles of a step's tokens for `rotate_in_place`. `cos` and `signed_sin` are [tokens, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor


class RotaryEmbedding:
    """Makes the rotations for one network's positions."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.inverse_frequencies = inverse_frequencies(rope, head_dim)
        self.attention_factor = attention_factor(rope)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotations for `positions` [tokens] in `dtype`. Angles are float32, as in transformers."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def rotate_in_place(heads: Tensor, rotation: Rotation) -> None:
    """Rotate every head of `heads` [tokens, heads, head_dim] to its token's position.

    The two numbers of a pair are half a head apart, so exchanging halves is a roll; the sign is in the sine.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(rotation.cos).addcmul_(swapped, rotation.signed_sin)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def attention_factor(rope: Rope) -> float:
    """The factor on cosines and sines: 1 except for YaRN, which sharpens attention over long contexts."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Stretch long waves by the factor, keep short ones, and interpolate between."""
    turns = rope.original_positions * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Keep pairs that turn often within the original context, stretch the slow ones, with a ramp between."""

    def pair_turning(turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of width zero would divide by zero; transformers uses the same width
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
