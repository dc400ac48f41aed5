"""Copies of whole blocks between device and host. Torch-free: the memory is passed in as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from threading import Condition, Thread
from typing import NamedTuple, Protocol, runtime_checkable

MOST_QUEUED = 64
"""Batches of copies that may wait for the thread; starting one more blocks."""


class BlockCopy(NamedTuple):
    """A copy between device block `block` and host slot `slot`."""

    block: int
    slot: int
    is_save: bool
    """Device to host if True, host to device if False."""


class CopyFailed(Exception):
    """A copy failed: the contents of the host tier cannot be trusted."""


class BlockMemory(Protocol):
    """A device's blocks and the `slots` of host memory beside them."""

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        ...

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into host slot `slot`."""
        ...

    def load(self, slot: int, block: int) -> None:
        """Copy host slot `slot` into device block `block`."""
        ...


class Copier(Protocol):
    """Copies blocks while the network computes, each copy after all that were started before it.

    Only this order protects host slots, so a slot may be read or taken again at once. The network also uses device
    blocks, so a block must not be touched before `done`, except to read a block that is only being saved.
    """

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        ...

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Start `copies`, in this order, and return their ticket. Tickets rise."""
        ...

    def done(self, ticket: int) -> bool:
        """Have the copies of `ticket` landed, and so all before them? Raises CopyFailed."""
        ...

    def wait(self, ticket: int) -> None:
        """Return when they have landed. Raises CopyFailed."""
        ...

    def close(self) -> None:
        """End the copier's threads or streams; nothing may be started afterwards."""
        ...


class InlineCopier:
    """A `Copier` that copies within `start`."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._started = 0

    def __repr__(self) -> str:
        return f"InlineCopier({self._memory!r}, {self._started} batches)"

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        return self._memory.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Copy at once."""
        _copy(self._memory, copies)
        self._started += 1
        return self._started

    def done(self, ticket: int) -> bool:
        """True for every started ticket."""
        return ticket <= self._started

    def wait(self, ticket: int) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


class ThreadCopier:
    """A `Copier` with a thread that it owns until `close`. torch releases the interpreter lock while it copies."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._queue: Queue[tuple[BlockCopy, ...] | None] = Queue(MOST_QUEUED)
        self._landed = Condition()
        self._started = self._done = 0
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ThreadCopier({self._memory!r}, {self._done} of {self._started} batches done)"

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        return self._memory.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Pass `copies` to the thread; blocks while 64 batches wait. Raises RuntimeError once closed."""
        if not self._thread.is_alive():
            raise RuntimeError("the copier is closed")
        self._queue.put(tuple(copies))
        self._started += 1
        return self._started

    def done(self, ticket: int) -> bool:
        """Have the copies of `ticket` landed? Raises CopyFailed."""
        with self._landed:
            self._refuse_broken()
            return self._done >= ticket

    def wait(self, ticket: int) -> None:
        """Return when they have landed. Raises CopyFailed."""
        with self._landed:
            self._landed.wait_for(lambda: self._done >= ticket or self._error is not None)
            self._refuse_broken()

    def close(self) -> None:
        """Finish the started copies and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (copies := self._queue.get()) is not None:
            try:
                if self._error is None:
                    _copy(self._memory, copies)
            except Exception as error:  # noqa: BLE001 - every exception of a copy is passed on to its waiters
                self._error = error
            with self._landed:
                self._done += 1
                self._landed.notify_all()

    def _refuse_broken(self) -> None:
        if self._error is not None:
            raise CopyFailed(f"a copy between device and host failed: {self._error}") from self._error


@runtime_checkable
class SelfCopying(Protocol):
    """Memory with its own way to copy while the network computes."""

    def copier(self) -> Copier:
        """A copier of its blocks; the caller closes it."""
        ...


def usual_copier(memory: BlockMemory) -> Copier:
    """The memory's own copier if it has one, else a thread."""
    return memory.copier() if isinstance(memory, SelfCopying) else ThreadCopier(memory)


def _copy(memory: BlockMemory, copies: Sequence[BlockCopy]) -> None:
    for block, slot, is_save in copies:
        if is_save:
            memory.save(block, slot)
        else:
            memory.load(slot, block)
