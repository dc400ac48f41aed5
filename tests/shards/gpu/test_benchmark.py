"""The benchmark runs from end to end, so that minutes on a GPU are not spent on finding out that it does not."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts.machine import free_host_bytes
from benchmarks.gpu_parts.report import Poisoned, Report, limited

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "OUT")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow("each part of the benchmark, in the interpreter of kernels")
def test_every_part_runs_at_toy_sizes(tmp_path: Path) -> None:
    done = run("--dry-run", "--json", str(tmp_path / "gpu.json"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    parts = {figure["part"] for figure in report["figures"]}
    assert parts == {"decode", "shared", "sampler", "prefill", "times", "tune", "e2e", "long"}
    assert report["checks"]
    assert all(check["passed"] for check in report["checks"])
    assert report["errors"] == []
    assert report["skipped"] == []
    names = [figure["name"] for figure in report["figures"]]
    for measured in (
        *("engine,", "chats beside", "cold", "warm", "restored from host", "1 ahead", "torch's SDPA"),
        *("run_ahead off", "run_ahead on", "threshold, toy", "draw, toy"),
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
    assert "speed is none of kernels, checks, decode, shared, sampler, prefill, times, tune, e2e" in done.stderr


def a_report(file: Path, **changes: object) -> Report:
    return Report(deadline_s=time.monotonic() + 60, file=file, **changes)  # type: ignore[arg-type]


def fail() -> None:
    raise ValueError("no")


def test_a_size_that_does_not_fit_beside_the_weights_is_skipped_with_the_reason(tmp_path: Path) -> None:
    report = a_report(tmp_path / "gpu.json")
    assert report.fits("decode step, 64 x 1024", 1088, room=7000)
    assert report.fits("decode step, 64 x 1024", 1088, room=None)
    assert not report.fits("decode step, 64 x 8192", 8256, room=7000)
    why = "it needs 8256 KV blocks, and 7000 fit beside the weights"
    assert json.loads((tmp_path / "gpu.json").read_text())["skipped"] == [f"decode step, 64 x 8192: {why}"]


def test_host_memory_for_page_locked_blocks_is_what_is_free_in_the_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal:       64000 kB\nMemAvailable:   48000 kB\n")
    assert free_host_bytes(meminfo, cgroup) == 48_000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000000\n")
    assert free_host_bytes(meminfo, cgroup) == 48_000 * 1024
    (cgroup / "memory.max").write_text("5000000\n")
    assert free_host_bytes(meminfo, cgroup) == 4_000_000


def test_what_was_measured_is_in_the_file_at_once_and_a_later_run_goes_on_after_it(tmp_path: Path) -> None:
    file, calls = tmp_path / "gpu.json", []
    report = a_report(file, head={"device": "none"})
    report.attempt("one", lambda: report.add("decode", "rate", 3.0, floor=6.0, unit="GB/s"), needs_s=1)
    report.attempt("two", fail, needs_s=1)
    saved = json.loads(file.read_text())
    assert saved["device"] == "none"
    assert saved["figures"][0]["ratio"] == 0.5
    assert saved["errors"] == [{"name": "two", "error": "ValueError: no"}]
    later = a_report(file)
    later.resume()
    for name in ("one", "two", "three"):
        later.attempt(name, lambda name=name: calls.append(name), needs_s=1)  # type: ignore[misc]
    assert calls == ["three"]
    assert later.figures == report.figures


def test_after_a_kernel_that_breaks_the_device_nothing_more_is_tried_in_this_process(tmp_path: Path) -> None:
    report = a_report(tmp_path / "gpu.json", is_alive=lambda: False)
    with pytest.raises(Poisoned, match="inner"):
        report.attempt("outer", lambda: report.attempt("inner", fail, needs_s=1), needs_s=1)
    assert json.loads((tmp_path / "gpu.json").read_text())["tried"] == ["outer", "inner"]


def test_a_measurement_that_takes_too_long_is_ended_and_the_one_around_it_keeps_its_limit() -> None:
    def spin() -> None:
        while True:
            pass

    with limited(30):
        with pytest.raises(TimeoutError, match="took more than"), limited(0.02):
            spin()
        with pytest.raises(TimeoutError), limited(0.02):
            spin()
    with pytest.raises(TimeoutError), limited(0.02), limited(30):
        spin()
