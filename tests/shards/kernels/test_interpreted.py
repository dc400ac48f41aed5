"""Runs the tests beside this file on CPU tensors, in Triton's interpreter."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards.interpreted import OPTIONS

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


@pytest.mark.slow("an interpreter of kernels, which takes a hundred thousand times as long as a GPU")
def test_every_kernel_computes_what_its_reference_does() -> None:
    # set before triton is imported, hence the process; a read out of bounds ends that process and not this one
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if platform.machine() == "x86_64":
        # the interpreter multiplies matrices with NumPy; OpenBLAS's kernels for Haswell and Zen round a row by its
        # position in the matrix, and those for older processors, which every x86-64 can run, do not
        environment["OPENBLAS_CORETYPE"] = "Prescott"
    command = [sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider", "--durations=5", *OPTIONS]
    done = subprocess.run(command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
