"""The benchmark runs from end to end, so that minutes on a GPU are not spent on finding out that it does not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "OUT")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_part_runs_at_toy_sizes(tmp_path: Path) -> None:
    done = run("--dry-run", "--json", str(tmp_path / "gpu.json"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {figure["part"] for figure in report["figures"]} == {"decode", "prefill", "e2e"}
    assert report["checks"]
    assert all(check["passed"] for check in report["checks"])
    assert report["errors"] == []
    assert report["skipped"] == []
    names = [figure["name"] for figure in report["figures"]]
    for measured in (
        *("engine,", "chats beside", "cold", "warm", "restored from host", "1 ahead", "torch's SDPA"),
        *("run_ahead off", "run_ahead on"),
    ):
        assert any(measured in name for name in names), measured
    checks = [check["name"] for check in report["checks"]]
    for checked in ("engine, graphs True, run_ahead on", "deterministic engine", "greedy, graphs False, 1 ahead"):
        assert any(checked in name for name in checks), checked
    if importlib.util.find_spec("transformers"):
        assert any("continuous batching" in name for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert "torch sees no GPU here" in done.stderr


def test_a_part_that_is_unknown_is_named() -> None:
    done = run("--only", "decode,speed")
    assert done.returncode == 2
    assert "speed is none of kernels, checks, decode, prefill, e2e" in done.stderr
