from __future__ import annotations

import pytest
import torch

from shards.gpu.cache import GpuCache, bytes_per_block, require_kv_type
from shards.kernels.launch import Gpu
from shards.kernels.targets import CHIPS
from shards.kv.host_memory import HostMemory
from shards.network.config_file import read_config
from tests.shards.tiny_checkpoints import save_checkpoint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_block_goes_to_the_host_and_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder, "llama")
    config = read_config(folder)
    cache = GpuCache(config, 4, dtype=dtype, device=torch.device("cpu"))
    assert sum(plane[0].nbytes for plane in cache.planes) == bytes_per_block(config, dtype)
    for plane in cache.planes:
        plane.view(torch.uint8).random_(0, 256)
    before = [plane[2].view(torch.uint8).clone() for plane in cache.planes]
    host = HostMemory(cache, 2)
    host.save(2, 1)
    for plane in cache.planes:
        plane[2].view(torch.uint8).zero_()
    host.load(1, 3)
    assert all(torch.equal(plane[3].view(torch.uint8), was) for plane, was in zip(cache.planes, before, strict=True))


def test_kv_in_fp8_needs_a_gpu_with_e4m3() -> None:
    new, old = (Gpu(CHIPS[name], processors=108) for name in ("sm_90", "sm_80"))
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
        require_kv_type(dtype, new)
    require_kv_type(torch.int8, old)
    with pytest.raises(ValueError, match="sm_80 has no e4m3; use int8, or auto"):
        require_kv_type(torch.float8_e4m3fn, old)
