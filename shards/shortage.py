"""Memory that the system does not give, in words for the person who asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
