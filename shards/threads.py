"""The number of threads that torch computes with: the one place that decides. Imports torch only in `use_threads`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """Cores that this process may use: those of its affinity, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        # there is no cgroup, or its quota is "max"
        return cores


def default_threads(cores: int | None = None) -> int:
    """Threads for a shard that shares `cores` with a router: all but one; one on two cores, since two would wait.

    A step ends with its slowest thread, so a thread that shares its core with the router delays all others.
    """
    usable = usable_cores() if cores is None else cores
    return usable - 1 if usable > 2 else 1


def use_threads(threads: int) -> None:
    """Make torch and numba compute with `threads` threads, one operator at a time. Before the first parallel operator.

    OMP_WAIT_POLICY=PASSIVE must be in the environment before torch is imported: threads that spin between operators
    take cores from other processes, and a step then takes 5 to 8 times as long on a shared machine.
    """
    import torch

    if "numba" not in sys.modules:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
