"""Layers with a window on a GPU's network, in pages of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shards.exec.batch import Batch
from shards.gpu.decoder import GpuDecoder
from shards.gpu.network import GpuNetwork
from shards.gpu.step import StepOptions
from shards.gpu.weights import moved
from shards.network.config import NetworkConfig, Rope
from shards.network.loading import random_weights
from tests.shards.driver import Driver
from tests.shards.gpu.conftest import INTERPRETED
from tests.shards.tiny_checkpoints import a_batch, some_tokens

CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (10, None))
BOTH, ALL = (10, None), (10,)
# the interpreter multiplies the bits of bf16
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def a_network(
    device: torch.device,
    windows: tuple[int | None, ...],
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> GpuNetwork:
    config = replace(CONFIG, windows=windows)
    weights = moved(random_weights(config, seed=1), config, device=device, dtype=dtype)
    return GpuNetwork(GpuDecoder(config, weights), kv_dtype=kv_dtype, options=StepOptions(rows=4))


def spoil(network: GpuNetwork) -> None:
    """Let memory that was not written spoil its reader."""
    for cache in filter(None, (network.steps.cache, network.steps.cache._windowed)):
        cache.data.view(torch.uint8).fill_(0x7F if cache.data.itemsize == 1 else 0xFF)


def paged(batch: Batch, pages: dict[int, int]) -> Batch:
    of_blocks = torch.full((7,), 3, dtype=torch.int32)
    for block, page in pages.items():
        of_blocks[block] = page
    return replace(batch, window_pages=of_blocks)


@pytest.mark.parametrize(("windows", "kv_dtype"), [(BOTH, None), (ALL, torch.int8)], ids=["one of two", "all, int8"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_logits_are_those_of_one_pool(
    device: torch.device, windows: tuple[int | None, ...], kv_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    divided, whole = (a_network(device, windows, dtype=dtype, kv_dtype=kv_dtype) for _ in range(2))
    divided.allocate_divided(6, 3)
    whole.allocate(6)
    spoil(divided)
    tokens, blocks = some_tokens(140), (4, 0, 5)
    steps = [
        (a_batch((tokens[:80], 0, blocks[:2])), {4: 2, 0: 1}),
        # block 4 is out of sight: another sequence has its page, and writes to it in the same step
        (a_batch((some_tokens(3, seed=2), 0, (2,)), (tokens[80:84], 80, blocks[:2])), {2: 2, 0: 1}),
        (a_batch((tokens[84:138], 84, blocks)), {0: 1, 5: 0}),
        (a_batch((tokens[138:139], 138, blocks), (some_tokens(1), 3, (2,))), {2: 2, 5: 0}),
    ]
    for batch, pages in steps:
        ours = divided.forward(paged(batch, pages)).clone()
        torch.testing.assert_close(ours, whole.forward(batch), rtol=0, atol=0)


def test_the_engine_draws_what_it_draws_from_one_pool(device: torch.device) -> None:
    divided, whole = (
        Driver(a_network(device, BOTH), kv_blocks=6, max_running=2, chunk_tokens=64, window_kv=kv)
        for kv in ("auto", "all")
    )
    assert divided.engine._pool.windows is not None
    assert whole.engine._pool.windows is None
    spoil(divided.network)
    for driver in (divided, whole):
        driver.ask("long", some_tokens(135), new=2)
        driver.run()
        driver.ask("again", some_tokens(135), new=2)
        driver.run()
    assert divided.drawn == whole.drawn
    assert divided.ended["again", 0].cached_tokens == 128


def test_a_block_that_is_written_without_a_page_is_refused(device: torch.device) -> None:
    network = a_network(device, BOTH)
    network.allocate_divided(6, 3)
    batch = a_batch((some_tokens(3), 0, (4,)))
    with pytest.raises(ValueError, match="block 4 is written and has no page"):
        network.forward(paged(batch, {5: 1}))
    with pytest.raises(ValueError, match="there are 6 places of pages"):
        network.forward(replace(batch, window_pages=torch.ones(6, dtype=torch.int32)))
    with pytest.raises(ValueError, match="a page is 4, and there are 4"):
        network.forward(paged(batch, {4: 4}))


def test_memory_is_divided_as_the_layout_says(device: torch.device) -> None:
    network = a_network(device, (10, None, 10, None, 10))
    assert network.window is not None
    network.allocate_divided(6, 3)
    cache = network.steps.cache
    assert cache.data.shape[:2] == (7, 2)
    assert cache._windowed is not None
    assert cache._windowed.data.shape[:2] == (4, 3)
    assert cache._windowed.data[0].nbytes == network.window.page_bytes
    assert cache.data[0].nbytes == network.block_bytes - network.window.page_bytes
    assert [cache.layer(index)[0].shape[0] for index in range(5)] == [4, 7, 4, 7, 4]
    assert cache.layer(4)[0].data_ptr() == cache._windowed.data[:, 2].data_ptr()
