from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from shards.network.config import Rope
from shards.network.rope import RotaryEmbedding, attention_factor, inverse_frequencies, rotate_in_place

ROPES: list[tuple[Rope, dict[str, Any]]] = [
    (Rope(theta=500_000.0), {"rope_type": "default", "rope_theta": 500_000.0}),
    (Rope(kind="linear", factor=8.0), {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}),
    (
        Rope(kind="llama3", theta=500_000.0, factor=32.0, original_positions=8192),
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
]
YARN = Rope(kind="yarn", theta=1e6, factor=4.0, original_positions=32_768)
for changes in ({}, {"attention_factor": 0.9}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"truncate": False}):
    for speeds in ({}, {"beta_fast": 16.0, "beta_slow": 2.0}):
        given: dict[str, Any] = {**changes, **speeds}
        theirs = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
        ROPES.append((replace(YARN, **given), theirs | given))


@pytest.mark.parametrize(("rope", "parameters"), ROPES)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_frequencies_are_those_of_transformers(rope: Rope, parameters: dict[str, Any], head_dim: int) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=131_072)
    expected = Qwen3RotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected.inv_freq, rtol=1e-6, atol=0.0)
    assert attention_factor(rope) == pytest.approx(expected.attention_scaling)


def test_a_rotation_turns_the_pairs_half_a_head_apart() -> None:
    heads = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    rotate_in_place(heads, RotaryEmbedding(Rope(theta=100.0), 4).at(torch.tensor([3]), torch.float32))
    fast, slow = 3.0, 3.0 / 10
    expected = [math.cos(fast), -2 * math.sin(slow), math.sin(fast), 2 * math.cos(slow)]
    assert heads.flatten().tolist() == pytest.approx(expected)


def test_pairs_that_are_not_rotated_keep_their_numbers() -> None:
    rotary = RotaryEmbedding(Rope(kind="yarn", factor=4.0, original_positions=64, dims=4), 8)
    heads = torch.arange(1.0, 9.0).view(1, 1, 8).clone()
    rotate_in_place(heads, rotary.at(torch.tensor([5]), torch.float32))
    kept = [2, 3, 6, 7]
    assert heads.flatten()[kept].tolist() == [3.0, 4.0, 7.0, 8.0]
    assert heads.flatten()[0] != 1.0


def test_queries_grow_with_each_original_context_that_lies_behind_them() -> None:
    rotary = RotaryEmbedding(Rope(original_positions=100, query_growth=0.5), 8)
    grown = rotary.at(torch.tensor([0, 99, 100, 250]), torch.float32).query_scale
    assert grown is not None
    expected = [1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)]
    assert grown.flatten().tolist() == pytest.approx(expected)


def test_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(Rope(), 32)
    query, key = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> float:
        heads = torch.stack((query, key))
        rotate_in_place(heads, rotary.at(torch.tensor([query_at, key_at]), torch.float32))
        return float((heads[0] * heads[1]).sum())

    assert score(17, 5) == pytest.approx(score(1017, 1005), abs=1e-3)


@pytest.mark.parametrize(("rope", "parameters"), ROPES)
@pytest.mark.parametrize(("position", "distance"), [(0, 7), (5, 3000), (3000, -2990), (12, 0)])
def test_a_key_that_is_turned_is_the_key_at_its_new_position(
    rope: Rope, parameters: dict[str, Any], position: int, distance: int
) -> None:
    rotary = RotaryEmbedding(rope, 32)
    turned, direct = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)).repeat(2, 1, 1).chunk(2)
    rotate_in_place(turned, rotary.at(torch.full((3,), position), torch.float32))
    rotate_in_place(turned, rotary.turn(distance))
    rotate_in_place(direct, rotary.at(torch.full((3,), position + distance), torch.float32))
    torch.testing.assert_close(turned, direct, rtol=0.0, atol=2e-3 if abs(distance) > 100 else 2e-5)
