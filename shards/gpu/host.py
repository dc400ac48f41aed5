"""Host memory that a GPU copies from and to while it computes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from shards.gpu.device import Landing, mark
from shards.kv.copier import BlockCopy, BlockMemory, CopyFailed
from shards.kv.host_memory import Blocks, HostMemory


class PinnedMemory(HostMemory):
    """Host memory with pinned pages, so that copies start at once and run beside the computation.

    Raises ValueError if the system does not grant the memory.
    """

    def __init__(self, cache: Blocks, slots: int, *, device: torch.device) -> None:
        super().__init__(cache, slots)
        self._on = device
        if device.type == "cuda":
            for plane in self._host:
                weakref.finalize(self, _let_go, _pinned(plane))

    def copier(self) -> StreamCopier:
        """The copier of these blocks, which runs beside the computation."""
        return StreamCopier(self, self._on)

    def save(self, block: int, slot: int) -> None:
        """Start copying device block `block` into `slot`."""
        for device, host in zip(self._device, self._host, strict=True):
            host[slot].copy_(device[block], non_blocking=True)

    def load(self, slot: int, block: int) -> None:
        """Start copying `slot` into device block `block`."""
        for device, host in zip(self._device, self._host, strict=True):
            device[block].copy_(host[slot], non_blocking=True)


def _pinned(plane: Tensor) -> Tensor:
    """`plane`, page-locked in place: torch's own page-locked memory comes in powers of two."""
    error = torch.cuda.cudart().cudaHostRegister(plane.data_ptr(), plane.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        size = f"{plane.nbytes / 2**30:.1f} GiB"
        raise ValueError(f"{size} of host memory cannot be page-locked (CUDA error {int(error)}); ask for less")
    return plane


def _let_go(plane: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(plane.data_ptr())  # type: ignore[no-untyped-call]


class StreamCopier:
    """A `Copier` on a stream of its own: copies begin once all work submitted to the device before is computed.

    The computation never waits for the copies and runs beside them. `memory` only starts its copies, on the current
    stream.
    """

    def __init__(
        self, memory: BlockMemory, device: torch.device, *, on_copied: Callable[[torch.device], Landing] = mark
    ) -> None:
        self._memory, self._device, self._on_copied = memory, device, on_copied
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._due: deque[tuple[int, Landing]] = deque()
        self._started = self._landed = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"StreamCopier({self._memory!r}, {self._landed} of {self._started} batches done)"

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        return self._memory.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Queue `copies` on the device. Raises CopyFailed, and RuntimeError once closed."""
        if self._is_closed:
            raise RuntimeError("the copier is closed")
        try:
            with self._beside():
                for block, slot, is_save in copies:
                    if is_save:
                        self._memory.save(block, slot)
                    else:
                        self._memory.load(slot, block)
                landing = self._on_copied(self._device)
        except (RuntimeError, IndexError) as error:
            raise _failed(error) from error
        self._started += 1
        self._due.append((self._started, landing))
        return self._started

    def done(self, ticket: int) -> bool:
        """Have the copies of `ticket` landed? Raises CopyFailed."""
        try:
            while self._due and self._landed < ticket and self._due[0][1].query():
                self._landed, _ = self._due.popleft()
        except RuntimeError as error:
            raise _failed(error) from error
        return self._landed >= ticket

    def wait(self, ticket: int) -> None:
        """Return when they have landed. Raises CopyFailed."""
        try:
            while self._due and self._landed < ticket:
                self._due[0][1].synchronize()
                self._landed, _ = self._due.popleft()
        except RuntimeError as error:
            raise _failed(error) from error

    def close(self) -> None:
        """Wait for the started copies. Nothing reads what they wrote, so a failed one is not reported again."""
        self._is_closed = True
        with suppress(CopyFailed):
            self.wait(self._started)

    def _beside(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        # submitted steps that may still run write and read these blocks
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _failed(error: Exception) -> CopyFailed:
    return CopyFailed(f"a copy between device and host failed: {error}")
