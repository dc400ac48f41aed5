"""The stand-in together with ttsem, which executes Triton kernels from their compiled IR and checks each access."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction
from ttsem import mlir, sanitize

from tests.late_gpu.cuda import late_cuda
from tests.late_gpu.device import LateGpu, kernels_wait

HOPPER = 90
PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 3, "max_num_regs": 65536, "warpSize": 32}
"""An H100's, but for the multiprocessors: three show that a persistent grid takes its turns."""

MOST_PARSED = 512
"""Kernels, by their constants, with IR that is kept as ttsem executes it, which does not change it."""


def not_compiled(*arguments: Any) -> bytes:
    """In place of code for the GPU, which nothing here reads: compiling it takes most of the time."""
    metadata = next(argument for argument in arguments if isinstance(argument, dict))
    metadata["name"] = "not compiled"
    return b""


@contextmanager
def a_late_gpu() -> Iterator[LateGpu]:
    """A GPU of capability 9.0 that computes late."""
    with ExitStack() as stack:
        # apart from the cache of kernels that were compiled to the end
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}))
        for stage in ("make_ttgir", "make_llir", "make_ptx", "make_cubin"):
            stack.enter_context(mock.patch.object(CUDABackend, stage, not_compiled))
        stack.enter_context(mock.patch.object(CUDABackend, "pack_metadata", return_value=()))
        # each launch would parse the IR of its kernel again, which takes longer than to execute it
        stack.enter_context(mock.patch.object(mlir, "parse", lru_cache(MOST_PARSED)(mlir.parse)))
        stack.enter_context(sanitize.session(HOPPER, "<late gpu>", cuda_is_cpu=False))
        gpu = stack.enter_context(late_cuda())
        utils = triton.runtime.driver.active.utils
        with (
            mock.patch.object(utils, "get_device_properties", return_value=PROPERTIES),
            mock.patch.object(JITFunction, "run", kernels_wait(gpu, JITFunction.run)),
        ):
            yield gpu
