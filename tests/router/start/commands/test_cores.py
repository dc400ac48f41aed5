"""`--processes auto`: the cores that this process may use, whatever the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policies.errors import ConfigError
from router.start.commands.cores import processes_of, usable_cores


def cores(tmp_path: Path, own: str, quotas: dict[str, str], allowed: int = 8) -> int:
    """The usable ones with the lines `own` of /proc/self/cgroup, and files by their path below /sys/fs/cgroup."""
    (tmp_path / "own").write_text(own)
    for name, text in quotas.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
        return usable_cores(own=tmp_path / "own", cgroups=tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("own", "quotas", "found"),
    [
        ("0::/\n", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        # in a container: the path is the host's, the tree the container's own
        ("0::/kubepods/pod1/x\n", {"cpu.max": "200000 100000\n"}, 2),
        ("4:cpu,cpuacct:/docker/1\n1:memory:/m\n", {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "-1\n"}, 8),
        (
            "4:cpu,cpuacct:/docker/1\n0::/\n",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ("0::/a\n", {"a/cpu.max": "odd\n"}, 8),
        ("0::/../../b\n", {"cpu.max": "100000 100000\n"}, 1),
    ],
)
def test_control_groups_bound_the_cores(tmp_path: Path, own: str, quotas: dict[str, str], found: int) -> None:
    assert cores(tmp_path, own, quotas) == found


def test_the_affinity_bounds_them_too_and_one_is_always_there(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", {}, allowed=2) == 2
    assert usable_cores(own=tmp_path / "none", cgroups=tmp_path / "none") >= 1


def test_a_count_or_auto_is_asked_for() -> None:
    assert processes_of("3") == 3
    assert processes_of("auto") == usable_cores()
    for wrong in ("0", "-1", "two", "", "2.5", "9999", "²"):
        with pytest.raises(ConfigError, match="--processes must be a number from 1 to 1024, or auto"):
            processes_of(wrong)
