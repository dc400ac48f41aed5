"""The machine: its identity, its measured limits, and timing on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """`copy_gb_s` counts bytes read and written; `matmul_tflops` is of a large product in `dtype`. Both measured."""

    device: torch.device
    dtype: torch.dtype
    name: str
    copy_gb_s: float
    matmul_tflops: float

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @classmethod
    def measure(cls, device: torch.device) -> Machine:
        is_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        source = torch.zeros(2**31 if is_gpu else 2**20, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        copy_s = seconds(lambda: target.copy_(source), device)
        size = 8192 if is_gpu else 64
        # random numbers: a product of zeros draws less power and runs faster than any real one
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        product_s = seconds(lambda: a @ b, device)
        name = torch.cuda.get_device_name(device) if is_gpu else "Triton's interpreter"
        return cls(device, dtype, name, 2 * source.nbytes / copy_s / 1e9, 2 * size**3 / product_s / 1e12)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can be allocated without swapping, limited by the container's."""
    (available,) = (
        int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
    )
    free = available * 1024
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        # there is no cgroup, or its limit is "max"
        return free
    return min(free, limit - used)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Median time of `work` on the device, after three runs that do not count."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    for _ in range(3):
        work()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`work` without the host's share: as a graph on a GPU, unchanged elsewhere."""
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> object:
        graph.replay()
        # the buffer that it writes to must live as long as the graph
        return results

    return replay
