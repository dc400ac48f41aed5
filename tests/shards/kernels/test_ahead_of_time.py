"""Every kernel compiles for chips that are not here, and fits into them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shards.kernels.targets import CHIPS

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[3]

MAY_SPILL = {("sm_90", "_paged_prefill"): 400}
"""Bytes a thread, where a GPU has shown that more programs at a time are worth them: see TILES."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_kernel_fits_into_the_chip(compiled: list[dict[str, Any]], chip: Any) -> None:
    rows = [row for row in compiled if row["chip"] == chip.name]
    line = "{chip:7} {kernel:36} {shared:7} B shared {registers:4} registers {matrix}"
    print("\n".join(line.format(**row) for row in rows))
    assert {"_attend_to_splits", "_merge_splits", "_paged_prefill"} <= {row["kernel"] for row in rows}
    for row in rows:
        assert row["shared"] <= chip.shared_bytes, row
        assert row["registers"] <= chip.registers, row
        assert row["spills"] <= MAY_SPILL.get((chip.name, row["kernel"].split()[0]), 0), row


def test_all_programs_of_a_persistent_grid_run_at_once(compiled: list[dict[str, Any]]) -> None:
    persistent = [row for row in compiled if "beside" in row]
    assert {row["chip"] for row in persistent} >= {"sm_80", "sm_90", "sm_100"}
    for row in persistent:
        assert row["beside"] <= row["resident"], row


def test_prefill_is_multiplied_where_the_chip_is_fastest(compiled: list[dict[str, Any]]) -> None:
    used = {row["chip"]: row["matrix"] for row in compiled if row["kernel"] == "_paged_prefill"}
    nvidia = {"sm_80": "mma", "sm_86": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma"}
    assert {chip: used[chip] for chip in nvidia} == nvidia
