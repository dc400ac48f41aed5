"""Copies of whole blocks between device and host. Torch-free: the memory comes in as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from threading import Condition, Thread
from typing import NamedTuple, Protocol, runtime_checkable

MOST_QUEUED = 64
"""Batches of copies that may wait for the thread; whoever starts one more waits."""


class BlockCopy(NamedTuple):
    """One block on its way between device block `block` and host slot `slot`."""

    block: int
    slot: int
    is_save: bool
    """Device to host if True, host to device if False."""


class CopyFailed(Exception):
    """A copy broke: what is in the host tier cannot be trusted."""


class BlockMemory(Protocol):
    """A device's blocks and the `slots` of host memory beside them."""

    @property
    def slots(self) -> int:
        """How many blocks the host memory holds."""
        ...

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into host slot `slot`."""
        ...

    def load(self, slot: int, block: int) -> None:
        """Copy host slot `slot` into device block `block`."""
        ...


class Copier(Protocol):
    """Copies blocks beside the computation, each one after all that were started before it.

    That order is all that keeps host slots right: a slot may be read or taken anew at once. Device blocks are also
    used by the network, so nobody may touch one before `done` says so, but for reading one that is only being saved.
    """

    @property
    def slots(self) -> int:
        """How many blocks the host memory holds."""
        ...

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Begin `copies`, in this order, and give the ticket to ask for them. Tickets rise."""
        ...

    def done(self, ticket: int) -> bool:
        """Have the copies of `ticket` landed, and so those of all before it? Raises CopyFailed."""
        ...

    def wait(self, ticket: int) -> None:
        """Return when they have. Raises CopyFailed."""
        ...

    def close(self) -> None:
        """End what runs beside; nothing may be started afterwards."""
        ...


class InlineCopier:
    """A `Copier` that has copied when `start` returns."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._started = 0

    def __repr__(self) -> str:
        return f"InlineCopier({self._memory!r}, {self._started} batches)"

    @property
    def slots(self) -> int:
        """How many blocks the host memory holds."""
        return self._memory.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Copy."""
        _copy(self._memory, copies)
        self._started += 1
        return self._started

    def done(self, ticket: int) -> bool:
        """Always."""
        return ticket <= self._started

    def wait(self, ticket: int) -> None:
        """At once."""

    def close(self) -> None:
        """Nothing runs beside."""


class ThreadCopier:
    """A `Copier` with one thread, which it owns until `close`. torch lets go of the interpreter while it copies."""

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
        """How many blocks the host memory holds."""
        return self._memory.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Hand `copies` to the thread; waits only while it has 64 batches to do. Raises RuntimeError once closed."""
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
        """Return when they have. Raises CopyFailed."""
        with self._landed:
            self._landed.wait_for(lambda: self._done >= ticket or self._error is not None)
            self._refuse_broken()

    def close(self) -> None:
        """Finish what was started and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (copies := self._queue.get()) is not None:
            try:
                if self._error is None:
                    _copy(self._memory, copies)
            except Exception as error:  # noqa: BLE001 - whatever a copy raises is told to who waits for it
                self._error = error
            with self._landed:
                self._done += 1
                self._landed.notify_all()

    def _refuse_broken(self) -> None:
        if self._error is not None:
            raise CopyFailed(f"a copy between device and host failed: {self._error}") from self._error


@runtime_checkable
class SelfCopying(Protocol):
    """Memory that knows better than a thread how to copy beside the computation."""

    def copier(self) -> Copier:
        """What copies its blocks; whoever asks closes it."""
        ...


def usual_copier(memory: BlockMemory) -> Copier:
    """The copier of `memory` itself where it has one, else a thread."""
    return memory.copier() if isinstance(memory, SelfCopying) else ThreadCopier(memory)


def _copy(memory: BlockMemory, copies: Sequence[BlockCopy]) -> None:
    for block, slot, is_save in copies:
        if is_save:
            memory.save(block, slot)
        else:
            memory.load(slot, block)
