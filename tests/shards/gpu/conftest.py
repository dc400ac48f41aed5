"""Kernels run where there is a GPU, or in Triton's interpreter, in a process of its own: see test_interpreted."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLAIN = {
    f"test_{name}.py"
    for name in (
        "adapted_rows",
        "sharing",
        "graphs",
        "guard",
        "layout",
        "spans",
        "transfers",
        "device",
        "dense",
        "host",
        "support",
    )
}
KERNELS = {
    "test_adapters.py",
    "test_decoder.py",
    "test_mixed.py",
    "test_mlp.py",
    "test_serving.py",
    "test_shared_prefixes.py",
    "test_window_pages.py",
}
IN_SUBPROCESSES = {"test_interpreted.py", "test_benchmark.py"}

if INTERPRETED:
    collect_ignore = sorted(IN_SUBPROCESSES | PLAIN)
elif importlib.util.find_spec("triton") is None:
    collect_ignore = sorted(PLAIN | KERNELS)
elif not torch.cuda.is_available():
    collect_ignore = sorted(KERNELS)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
