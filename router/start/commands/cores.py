"""The cores that this process may use: `--processes auto`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from policies.errors import ConfigError

AUTO = "auto"

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def processes_of(text: str) -> int:
    """The number of processes that `--processes` asks for: `auto`, or a count. Raises ConfigError."""
    if text == AUTO:
        return usable_cores()
    if text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 1024:
        return int(text[:6])
    raise ConfigError(f"--processes must be a number from 1 to 1024, or auto, not '{text[:40]}'")


def usable_cores(*, own: Path = _OWN, cgroups: Path = _CGROUPS) -> int:
    """Whole cores that the affinity of this process and its control groups allow, at least 1."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:
        # not on macOS
        cores = float(os.cpu_count() or 1)
    return max(1, int(min((cores, *_quotas(own, cgroups)))))


def _quotas(own: Path, cgroups: Path) -> Iterator[float]:
    """The cores that each control group allows, from this process's own up to the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        # version 2 has one tree, and version 1 one for these controllers
        root = cgroups if not controllers else cgroups / controllers
        here = root / path.lstrip("/")
        # in a container the path may be that of the host, and the tree the container's own
        for folder in (*(each for each in (here, *here.parents) if each.is_relative_to(root)), root):
            quota = _quota(folder)
            if quota is not None:
                yield quota


def _quota(folder: Path) -> float | None:
    """cpu.max of version 2: "max 100000" or "150000 100000" (cgroup-v2.rst); version 1 has two files."""
    try:
        if (newer := folder / "cpu.max").exists():
            quota, period = newer.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        return None if quota in {"max", "-1"} else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
