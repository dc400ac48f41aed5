"""The device that a model runs on, and transfers to it and back."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""The first with matrix units for bfloat16, and the oldest for which Triton compiles."""

log = logging.getLogger(__name__)


def choose_device(asked: str) -> torch.device:
    """The device called `asked`: cpu, cuda, or auto, which is cuda if there is a GPU, Triton and its requirements.

    Raises ValueError for another name, and for cuda if anything is missing. Of several GPUs it is the first that
    CUDA_VISIBLE_DEVICES leaves, because the current device would differ from thread to thread.
    """
    if asked not in ("auto", "cpu", "cuda"):
        hint = "; choose among several with CUDA_VISIBLE_DEVICES" if asked.startswith("cuda:") else ""
        raise ValueError(f"device is {asked}; it must be auto, cpu or cuda{hint}")
    if asked == "cpu":
        return torch.device("cpu")
    found = Found.here()
    if asked == "cuda" and found.lacking:
        raise ValueError(f"device is cuda, and {found.lacking}")
    if found.sees_gpu and found.lacking:
        log.warning("there is a GPU, but the CPU is used: %s", found.lacking)
    return torch.device("cpu" if found.lacking else "cuda")


@dataclass(frozen=True, slots=True)
class Found:
    """The means to run kernels. `built_for` is the platform of the torch build, None for CPUs alone."""

    built_for: str | None
    sees_gpu: bool
    capability: tuple[int, int]
    has_triton: bool
    has_compiler: bool

    @classmethod
    def here(cls) -> Found:
        """The means of this machine."""
        sees_gpu = torch.cuda.is_available()
        names = (os.environ.get("CC"), "gcc", "clang")
        return cls(
            built_for=torch.version.cuda or torch.version.hip,
            sees_gpu=sees_gpu,
            capability=torch.cuda.get_device_capability() if sees_gpu else (0, 0),
            has_triton=importlib.util.find_spec("triton") is not None,
            has_compiler=any(name and shutil.which(name) for name in names),
        )

    @property
    def lacking(self) -> str:
        """The missing part and its remedy; empty if nothing is missing."""
        if self.built_for is None:
            return "torch sees no GPU here: it was built for CPUs alone"
        if not self.sees_gpu:
            return f"torch sees no GPU here: nvidia-smi says whether there is one, and a driver for {self.built_for}"
        if self.capability < LEAST_CAPABILITY:
            return f"this GPU is of capability {self.capability[0]}.{self.capability[1]}; kernels need 8.0 (Ampere)"
        if not self.has_triton:
            return "triton is not installed"
        if not self.has_compiler:
            return "Triton finds no C compiler: install gcc, or name one in CC"
        return ""


class Mark(Protocol):
    """A position in a device's queue of work."""

    def synchronize(self) -> None:
        """Return once the device has reached it."""
        ...


class Landing(Mark, Protocol):
    """A mark that can also be polled."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


class _Reached:
    """A mark on the CPU, which computes at once, so every mark is reached."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def mark(device: torch.device) -> Landing:
    """A mark behind the work submitted to `device` so far, on the current stream."""
    if device.type != "cuda":
        return _Reached()
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def answers(device: torch.device, *, synchronize: Callable[[torch.device], None] = torch.cuda.synchronize) -> bool:
    """Whether `device` still computes. `synchronize` waits for its work and raises RuntimeError if that failed.

    An illegal access, or a failed assertion in a kernel, ends a CUDA context: then every call fails. Other errors are
    reported once, so the second call decides.
    """
    if device.type != "cuda":
        return True
    for _ in range(2):
        try:
            synchronize(device)
        except RuntimeError as error:
            log.warning("%s does not answer: %s", device, error)
        else:
            return True
    return False


def host_words(words: int, device: torch.device) -> Tensor:
    """Host memory [words] int32 that `device` can copy from and to while the host continues."""
    return torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")
