"""Memory that the system does not give, in words for the person who asked for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


class NotEnoughMemory(ValueError):
    """What was asked for does not fit."""


@contextmanager
def memory_for(what: str, *, hint: str) -> Iterator[None]:
    """Raises NotEnoughMemory, naming `what` it was for, if memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises bare RuntimeError on the host and a subclass on a GPU; both say what they lack
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise NotEnoughMemory(f"there is no memory for {what} ({hint})") from error
        raise


def usable_bytes(limit_file: Path = _LIMIT) -> int:
    """Host memory that this process may use at most: the machine's, no more than a container is allowed."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(limit_file.read_text()))
    except (OSError, ValueError):
        # no cgroup here, or its limit is "max"
        return physical


def refuse_beyond(usable: int, wanted: int) -> None:
    """Raises NotEnoughMemory where `wanted` bytes of KV on the host can never be had.

    The system would promise them all the same, and kill the process once it writes to them.
    """
    if wanted > usable:
        raise NotEnoughMemory(
            f"{gib(wanted)} of KV are asked for and there is no more than {gib(usable)} of memory here "
            "(give the pool or the host tier less)"
        )


def gib(count: int) -> str:
    """`count` bytes, for people."""
    return f"{count / 2**30:.3g} GiB"
