"""The experts of several processes add up to all of them, whole or divided, in the bits in which they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shards.gpu.mlp import GpuMixture
from shards.gpu.weights import moved
from shards.network.config_file import read_config
from shards.network.layers import Weights
from shards.network.loading import load_weights
from shards.parallel.part import Part
from shards.quant.matrix import QuantisedMatrix
from tests.shards.parallel.lone import part_weights
from tests.shards.quantised_checkpoints import save_mxfp4, save_quantised
from tests.shards.tiny_checkpoints import save_checkpoint


def saved(folder: Path, kind: str, scheme: str | None) -> Path:
    """A checkpoint of this kind, and the folder that it is in."""
    if scheme is None:
        save_checkpoint(folder, kind)
        return folder
    if scheme == "mxfp4":
        save_mxfp4(folder)
    else:
        save_quantised(folder, kind, scheme)
    return folder / "quantised"


# rows of experts that other processes have are never written, pass the gate as they are, and are dropped
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("whole_experts", [True, False], ids=["whole", "divided"])
@pytest.mark.parametrize(
    ("kind", "scheme", "stays_packed"),
    [
        ("qwen3 moe", None, False),
        ("gpt-oss", "mxfp4", False),
        ("mixtral", "awq", True),
        ("qwen3 moe", "fp8, per tensor", True),
        ("qwen3 moe", "compressed-tensors, int8 W8A16 in groups, with zeros", True),
    ],
)
def test_the_parts_of_a_mixture_add_up_to_the_whole(
    tmp_path: Path, device: torch.device, kind: str, scheme: str | None, stays_packed: bool, whole_experts: bool
) -> None:
    folder = saved(tmp_path, kind, scheme)
    config = read_config(folder)

    def mixture(weights: Weights) -> GpuMixture:
        found = moved(weights, config, device=device, dtype=torch.float32).layers[-1].mlp
        assert isinstance(found, GpuMixture)
        assert isinstance(found.gate_up, QuantisedMatrix) == stays_packed
        return found

    whole = mixture(load_weights(folder, config, dtype="float32", is_for_gpu=True))
    parts = [
        mixture(part_weights(folder, Part(rank, 2, whole_experts), dtype="float32", is_for_gpu=True))
        for rank in range(2)
    ]
    torch.manual_seed(0)
    hidden = torch.randn(5, config.hidden_size, device=device)
    expected = whole(hidden).cpu()
    assert expected.std() > 0.1
    torch.testing.assert_close((parts[0](hidden) + parts[1](hidden)).cpu(), expected, atol=2e-4, rtol=1e-4)
