"""The Protocol of every store of issued keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from policies.keys import KeyBook

Edit = Callable[[KeyBook], KeyBook]
"""What a book becomes. Pure, since it may be asked again for another one; its InvalidRequest leaves all as it was."""


class KeyStore(Protocol):
    """Keeps one KeyBook for all routers that name the same place, and changes it whole or not at all.

    Both calls raise Unavailable if the place cannot be reached, and ConfigError, with file and line, if what is there
    is no book. After either, what was read before still holds.
    """

    async def look(self) -> KeyBook | None:
        """What it holds now; None if that is what the last look gave."""
        ...

    async def change(self, edit: Edit) -> KeyBook:
        """Hold what `edit` makes of what it holds, and what that is. After Unavailable nobody knows whether it did."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
