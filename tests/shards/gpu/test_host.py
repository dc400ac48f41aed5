"""Copies beside the computation, with a device that says when it has come to them."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from shards.gpu.cache import GpuCache
from shards.gpu.host import PinnedMemory, StreamCopier
from shards.kv.copier import BlockCopy, CopyFailed, ThreadCopier, usual_copier
from shards.kv.host_memory import HostMemory
from shards.network.config import NetworkConfig, Rope

CPU = torch.device("cpu")
CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (None,))


class Landing:
    """A place in the queue that is reached when the test says so, or waits for it."""

    def __init__(self) -> None:
        self.is_reached, self.error = False, ""

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.is_reached

    def synchronize(self) -> None:
        self.query()
        self.is_reached = True


class Device:
    """Gives landings, and remembers them in order."""

    def __init__(self) -> None:
        self.landings: deque[Landing] = deque()

    def __call__(self, device: torch.device) -> Landing:
        self.landings.append(Landing())
        return self.landings[-1]


@pytest.fixture
def cache() -> GpuCache:
    cache = GpuCache(CONFIG, 4, dtype=torch.float32, device=CPU)
    cache.data.copy_(torch.randn_like(cache.data))
    return cache


def a_copier(cache: GpuCache) -> tuple[StreamCopier, Device]:
    device = Device()
    return StreamCopier(PinnedMemory(cache, 2, device=CPU), CPU, on_copied=device), device


OUT, BACK = [BlockCopy(1, 0, is_save=True)], [BlockCopy(3, 0, is_save=False)]


def test_a_block_goes_out_and_comes_back(cache: GpuCache) -> None:
    copier, _ = a_copier(cache)
    copier.wait(copier.start(OUT))
    copier.wait(copier.start(BACK))
    assert torch.equal(cache.data[3], cache.data[1])
    assert copier.slots == 2


def test_a_batch_has_landed_when_the_device_has_come_to_it_and_so_have_those_before(cache: GpuCache) -> None:
    copier, device = a_copier(cache)
    first, second = copier.start(OUT), copier.start(BACK)
    assert second > first
    assert not copier.done(first)
    device.landings[0].is_reached = True
    assert copier.done(first)
    assert not copier.done(second)
    copier.wait(second)
    assert copier.done(first)
    assert copier.done(second)


def test_closing_waits_for_what_was_started_and_nothing_may_follow(cache: GpuCache) -> None:
    copier, device = a_copier(cache)
    copier.start(OUT)
    copier.close()
    copier.close()
    assert device.landings[0].is_reached
    with pytest.raises(RuntimeError, match="closed"):
        copier.start(BACK)


def test_a_failed_copy_is_reported_to_its_caller(cache: GpuCache) -> None:
    copier, device = a_copier(cache)
    ticket = copier.start(OUT)
    device.landings[0].error = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(CopyFailed, match="illegal memory access"):
        copier.done(ticket)
    with pytest.raises(CopyFailed, match="illegal memory access"):
        copier.wait(ticket)
    with pytest.raises(CopyFailed, match="index 9"):
        copier.start([BlockCopy(0, 9, is_save=True)])


def test_a_device_that_fails_for_good_can_be_closed(cache: GpuCache) -> None:
    copier, device = a_copier(cache)
    copier.start(OUT)
    device.landings[0].error = "CUDA error: an illegal memory access was encountered"
    copier.close()


def test_memory_that_brings_its_own_copier_is_copied_by_it(cache: GpuCache) -> None:
    own = usual_copier(PinnedMemory(cache, 2, device=CPU))
    assert isinstance(own, StreamCopier)
    thread = usual_copier(HostMemory(cache, 2))
    assert isinstance(thread, ThreadCopier)
    thread.close()
