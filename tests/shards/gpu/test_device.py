from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.gpu.cache import CONTEXT_BYTES, GpuCache, GpuMemory, bytes_per_block, room_bytes, working_bytes
from shards.gpu.device import Found, answers, choose_device
from shards.gpu.weights import random_on
from shards.model import Model
from shards.network.config import NetworkConfig, Rope
from tests.shards.tiny_checkpoints import save_checkpoint

GIB = 2**30

LLAMA_8B = NetworkConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=131072,
    rms_norm_eps=1e-5,
    rope=Rope(),
    windows=(None,) * 32,
)


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_no_gpu_is_auto_is_the_cpu_and_cuda_is_refused(tmp_path: Path) -> None:
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device is cuda, and torch sees no GPU here"):
        choose_device("cuda")
    save_checkpoint(tmp_path, "llama")
    assert Model.load(tmp_path, device="auto").dtype == "float32"
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        Model.load(tmp_path, device="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"built_for": None, "sees_gpu": False}, "it was built for CPUs alone"),
        ({"sees_gpu": False}, "nvidia-smi says whether there is one, and a driver for 13.0"),
        ({"capability": (7, 5)}, "capability 7.5; kernels need 8.0"),
        ({"has_triton": False}, "triton is not installed"),
        ({"has_compiler": False}, "install gcc, or name one in CC"),
    ],
)
def test_missing_parts_for_a_gpu_are_reported(changes: dict[str, Any], message: str) -> None:
    all_there = Found("13.0", sees_gpu=True, capability=(9, 0), has_triton=True, has_compiler=True)
    lacking = replace(all_there, **changes).lacking
    assert message in lacking
    assert bool(lacking) == bool(changes)


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device is tpu; it must be auto, cpu or cuda"):
        choose_device("tpu")
    with pytest.raises(ValueError, match="choose among several with CUDA_VISIBLE_DEVICES"):
        choose_device("cuda:1")


def test_a_device_answers_unless_it_fails_twice_in_a_row() -> None:
    def answers_after(failures: int) -> bool:
        errors = iter([RuntimeError("CUDA error: an illegal memory access was encountered")] * failures)

        def synchronize(_: torch.device) -> None:
            if (error := next(errors, None)) is not None:
                raise error

        return answers(torch.device("cuda"), synchronize=synchronize)

    assert answers_after(0)
    # an error of one launch is reported by the next call, and then forgotten
    assert answers_after(1)
    assert not answers_after(2)
    assert answers(torch.device("cpu"))


def test_a_block_of_llama_8b_is_8_mib_and_in_int8_half_of_it_with_scales() -> None:
    assert bytes_per_block(LLAMA_8B, torch.bfloat16) == 8 * 2**20
    assert bytes_per_block(LLAMA_8B, torch.int8) == 4 * 2**20 + 2 * 32 * 8 * 64 * 4


def test_the_cache_sets_one_block_aside() -> None:
    config = replace(LLAMA_8B, windows=(None,) * 2)
    cache = GpuCache(config, 3, dtype=torch.int8, device=torch.device("cpu"))
    kv, scales = cache.layer(1)
    assert scales is not None
    assert (kv.shape, scales.shape) == ((4, 2, 8, 64, 128), (4, 2, 8, 64))
    assert cache.padding_slot == 3 * 64
    held = cache.data[:3].nbytes + (cache.scales[:3].nbytes if cache.scales is not None else 0)
    assert held == 3 * bytes_per_block(config, torch.int8)


def test_the_cache_gets_what_a_step_leaves() -> None:
    working = working_bytes(LLAMA_8B, batch_tokens=16384, rows=256, dtype=torch.bfloat16)
    assert 3 * 2**30 < working < 8 * 2**30
    memory = GpuMemory(free=120 * GIB, total=140 * GIB, own=16 * GIB)
    assert room_bytes(memory, working) == int(120 * GIB * 0.97) - working
    with pytest.raises(ValueError, match=r"1.0 GiB of the GPU are usable and a step needs .*: nothing is left for KV"):
        room_bytes(GpuMemory(GIB, 140 * GIB, 0), working)


def test_shards_that_share_a_gpu_divide_its_memory_whatever_the_others_have_taken_yet() -> None:
    working, weights = 3 * GIB, 16 * GIB
    free_of_both = GpuMemory(free=108 * GIB, total=140 * GIB, own=weights)
    room = room_bytes(free_of_both, working, shards=2)
    assert room == int(70 * GIB * 0.97) - CONTEXT_BYTES - weights - working
    # both fit, with all that they hold
    assert 2 * (room + working + weights + CONTEXT_BYTES) <= 140 * GIB
    # another program has taken most of it
    assert room_bytes(GpuMemory(20 * GIB, 140 * GIB, weights), working, shards=2) == int(20 * GIB * 0.97) - working
    with pytest.raises(ValueError, match=r"0.0 GiB of the GPU are usable for each of 9 shards"):
        room_bytes(free_of_both, working, shards=9)


def test_weights_drawn_on_a_device_have_the_size_of_the_model() -> None:
    config = replace(LLAMA_8B, windows=(None,), vocab_size=1000, intermediate_size=96)
    weights = random_on(torch.device("cpu"), config, dtype=torch.bfloat16)
    body = 4096 * (48 * 128) + 4096 * 4096 + 3 * 4096 * 96
    assert weights.bytes_per_step == 2 * (body + 1000 * 4096 + 3 * 4096)
    assert weights.head is not weights.embedding
