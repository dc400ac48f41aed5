"""Memory shortages, reported in words for the operator that configured the size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


class NotEnoughMemory(ValueError):
    """The requested memory does not fit."""


@contextmanager
def memory_for(what: str, *, hint: str) -> Iterator[None]:
    """Raise NotEnoughMemory, naming `what` the memory was for, if it runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises bare RuntimeError on the host and a subclass on a GPU; both messages contain "memory"
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise NotEnoughMemory(f"there is no memory for {what} ({hint})") from error
        raise


def usable_bytes(limit_file: Path = _LIMIT) -> int:
    """The most host memory that this process may use: the machine's, limited by the container's."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(limit_file.read_text()))
    except (OSError, ValueError):
        # there is no cgroup, or its limit is "max"
        return physical


def refuse_beyond(
    usable: int, wanted: int, *, what: str = "", hint: str = "give the pool or the host tier less"
) -> None:
    """Raise NotEnoughMemory if the `wanted` bytes of KV on the host can never be available.

    The system would grant them all the same, and kill the process once it writes to them.
    """
    if wanted > usable:
        raise NotEnoughMemory(
            f"{gib(wanted)} of KV are configured{what}, but this machine has only {gib(usable)} of usable memory "
            f"({hint})"
        )


def gib(count: int) -> str:
    """`count` bytes in GiB, for people."""
    return f"{count / 2**30:.3g} GiB"
