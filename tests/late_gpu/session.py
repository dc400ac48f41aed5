"""The stand-in together with ttsem, which executes Triton kernels from their compiled IR and checks each access."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import triton
from triton.runtime.jit import JITFunction
from ttsem import sanitize

from tests.late_gpu.cuda import late_cuda
from tests.late_gpu.device import LateGpu, kernels_wait

HOPPER = 90
PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 3, "max_num_regs": 65536, "warpSize": 32}
"""An H100's, but for the multiprocessors: three show that a persistent grid takes its turns."""


@contextmanager
def a_late_gpu() -> Iterator[LateGpu]:
    """A GPU of capability 9.0 that computes late."""
    with sanitize.session(HOPPER, "<late gpu>", cuda_is_cpu=False), late_cuda() as gpu:
        utils = triton.runtime.driver.active.utils
        with (
            mock.patch.object(utils, "get_device_properties", lambda index=0: PROPERTIES),
            mock.patch.object(JITFunction, "run", kernels_wait(gpu, JITFunction.run)),
        ):
            yield gpu
