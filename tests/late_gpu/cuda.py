"""`torch.cuda` of the stand-in: streams, events, graphs, page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.late_gpu.device import CUDA, LateGpu, LateTensor, running
from tests.late_gpu.queues import Place, Queue, Recording

TOTAL = 2**31
"""Bytes of the stand-in's memory."""


def present() -> LateGpu:
    """The device of the session."""
    assert LateGpu.present is not None, "the device is gone"
    return LateGpu.present


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._place: Place | None = None
        self._was_asked = False

    def record(self, stream: Stream | None = None) -> None:
        self._place, self._was_asked = (stream.queue if stream else present().queue).end, False

    def synchronize(self) -> None:
        present().require_no_recording()
        if self._place is not None:
            with running():
                self._place.run()

    def query(self) -> bool:
        # as late as it may: reached only when it is asked again
        if self._was_asked:
            self.synchronize()
        self._was_asked = True
        return self._place is None or self._place.is_reached

    def wait(self, stream: Stream | None = None) -> None:
        if self._place is not None:
            (stream.queue if stream else present().queue).wait_for(self._place)


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: object = None, *, queue: Queue | None = None, **_: object) -> None:
        self.queue = queue or Queue()

    def wait_stream(self, other: Stream) -> None:
        self.queue.wait_for(other.queue.end)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        present().wait(self.queue)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """`torch.cuda.stream`."""
    gpu = present()
    before, gpu.queue = gpu.queue, chosen.queue
    try:
        yield
    finally:
        gpu.queue = before


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    recording: Recording | None = None

    def replay(self) -> None:
        assert self.recording is not None, "the graph was not captured"
        present().replay(self.recording)


@contextmanager
def graph(captured: CUDAGraph, pool: object = None, **_: object) -> Iterator[None]:
    """`torch.cuda.graph`."""
    gpu = present()
    gpu.recording = Recording(pool or object())
    try:
        yield
        captured.recording = gpu.recording
        gpu.recordings.append(gpu.recording)
    finally:
        gpu.recording = None


class Runtime:
    """`torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(at: int, size: int, _: int) -> int:  # noqa: N802 - CUDA's name
        present().registered[at] = size
        return 0

    @staticmethod
    def cudaHostUnregister(at: int) -> None:  # noqa: N802 - CUDA's name
        present().registered.pop(at, None)


def reset_peak(device: object = None) -> None:
    """`torch.cuda.reset_peak_memory_stats`."""
    present().most_allocated = present().allocated


NAMES: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "stream": stream,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": object,
    "current_stream": lambda device=None: Stream(queue=present().queue),
    "default_stream": lambda device=None: Stream(queue=present().default),
    "synchronize": lambda device=None: present().wait(),
    "cudart": Runtime,
    "mem_get_info": lambda device=None: (TOTAL - present().allocated, TOTAL),
    "memory_reserved": lambda device=None: present().allocated,
    "memory_allocated": lambda device=None: present().allocated,
    "max_memory_allocated": lambda device=None: present().most_allocated,
    "reset_peak_memory_stats": reset_peak,
    "empty_cache": lambda: None,
    "current_device": lambda: CUDA.index,
    "is_available": lambda: True,
    "_lazy_init": lambda: None,
}
"""What replaces the names of `torch.cuda` while the device is there."""


class NamesOneDevice(TorchFunctionMode):
    """Asks the stand-in where torch would ask CUDA itself: for the number of "cuda", and for its memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: numbered(value) for key, value in (kwargs or {}).items()}
        if func is torch.tensor and kwargs.get("device") == CUDA:
            return func(*args, **(kwargs | {"device": None})).to(CUDA)
        if func is Tensor.cuda:
            return args[0].to(CUDA)
        if func is Tensor.copy_ and LateTensor in map(type, args):
            return torch.ops.aten.copy_(*args, **kwargs)
        if func is Tensor.contiguous and isinstance(args[0], LateTensor):
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.to:
            args = tuple(map(numbered, args))
        return func(*args, **kwargs)


def numbered(value: Any) -> Any:
    """The one device for "cuda"; anything else unchanged."""
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return CUDA if is_device or (isinstance(value, str) and value == "cuda") else value


@contextmanager
def late_cuda() -> Iterator[LateGpu]:
    """A GPU that is late, for code that asks torch for "cuda"."""
    gpu = LateGpu()
    # torch asks no driver which device is the current one
    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        for name, value in NAMES.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(NamesOneDevice())
        stack.enter_context(mock.patch.object(LateGpu, "present", gpu))
        stack.enter_context(gpu)
        yield gpu
