from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shards.threads import default_threads, usable_cores


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_a_router_gets_a_core_where_there_are_more_than_two(cores: int, threads: int) -> None:
    assert default_threads(cores) == threads


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("max 100000", None), ("", None)])
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert usable_cores(file) == (cores or usable_cores(tmp_path / "missing"))


@pytest.mark.torch
def test_torch_computes_with_the_configured_threads_and_one_operator_at_a_time() -> None:
    # in a process of its own, since torch keeps its settings
    code = "import torch; from shards.threads import use_threads as use; use(1); use(1); "
    code += "print(torch.get_num_threads(), torch.get_num_interop_threads())"
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | path, capture_output=True, check=True)
    assert ran.stdout.split() == [b"1", b"1"]
