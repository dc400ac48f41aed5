"""Launching kernels on a GPU, and the helpers that all kernels share."""

# In Triton the parameters of a kernel have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from shards.kernels.targets import CHIPS, Chip

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """Matrix product in float32 of tiles of one floating type; exact products, never tf32."""
    # the interpreter keeps bf16 as uint16 and multiplies the bit patterns
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def as_operand(tile, dtype):
    """`tile` as an operand of `dot` beside an operand of type `dtype`; bf16 and fp16 hold int8 and e4m3 exactly."""
    return tile.to(tl.float32 if INTERPRETED else dtype)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel: `arguments` in the order of its parameters, then its constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[torch.Tensor | int | float | None, ...]
    constants: Mapping[str, int | float | bool | str]
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device that kernels run on. `processors` is its number of multiprocessors, the size of a persistent grid."""

    chip: Chip
    processors: int

    def start(self, launch: Launch) -> None:
        """Queue the kernel on the current stream; an empty grid does nothing."""
        if all(launch.grid):
            kernel = launch.kernel[launch.grid]
            kernel(*launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages)


# The interpreter runs one program after the other: 3 of them show that a persistent grid takes its turns.
INTERPRETER = Gpu(CHIPS["sm_90"], processors=3)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of tensors on this device; for the CPU, the interpreter.

    Raises ValueError for the CPU if Triton is not interpreting.
    """
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    if not INTERPRETED.value:
        raise ValueError(f"kernels run on a GPU and these tensors are on {device}; set TRITON_INTERPRET=1 to interpret")
    return INTERPRETER


@lru_cache
def _cuda(index: int) -> Gpu:
    driver = triton.runtime.driver.active
    target, properties = driver.get_current_target(), driver.utils.get_device_properties(index)
    is_nvidia = target.backend == "cuda"
    chip = Chip(
        f"sm_{target.arch}" if is_nvidia else target.arch,
        target.backend,
        target.arch,
        warp_threads=target.warp_size,
        shared_bytes=properties["max_shared_mem"],
        registers=255 if is_nvidia else 512,
        # Ada was NVIDIA's first with e4m3
        has_e4m3=is_nvidia and target.arch >= 89,
    )
    return Gpu(CHIPS.get(chip.name, chip), properties["multiprocessor_count"])


def require(true: bool, message: str) -> None:
    """Raise ValueError with `message` unless `true`."""
    if not true:
        raise ValueError(message)


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has this shape."""
    require(tuple(tensor.shape) == shape, f"{name} is {list(tensor.shape)}, not {list(shape)}")
