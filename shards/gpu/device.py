"""Where a model runs, and how bytes get there and back."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor


def choose_device(asked: str) -> torch.device:
    """The device called `asked`: cpu, cuda, or auto, which is cuda where there is a GPU and Triton.

    Raises ValueError for another name, and for cuda where either is missing. Of several GPUs it is the first that
    CUDA_VISIBLE_DEVICES leaves: which one is current would be another matter in each thread.
    """
    if asked not in ("auto", "cpu", "cuda"):
        hint = "; choose among several with CUDA_VISIBLE_DEVICES" if asked.startswith("cuda:") else ""
        raise ValueError(f"device is {asked}; it must be auto, cpu or cuda{hint}")
    lacking = _lacking()
    if asked == "cuda" and lacking:
        raise ValueError(f"device is cuda, and {lacking}")
    return torch.device("cpu" if asked == "cpu" or lacking else "cuda")


def _lacking() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


class Mark(Protocol):
    """A place in the queue of a device's work."""

    def synchronize(self) -> None:
        """Return once the device has come to it."""
        ...


class Landing(Mark, Protocol):
    """A mark that can be asked for, too."""

    def query(self) -> bool:
        """Has the device come to it?"""
        ...


class _Reached:
    """The CPU computes at once: whatever was asked for is done."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def mark(device: torch.device) -> Landing:
    """The end of what `device` has been asked for on the current stream."""
    if device.type != "cuda":
        return _Reached()
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def host_words(words: int, device: torch.device) -> Tensor:
    """Host memory [words] int32 that `device` can copy from and to while the host goes on."""
    return torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")
