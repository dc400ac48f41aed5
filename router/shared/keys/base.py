"""The Protocol of every store of issued keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from policies.keys import KeyBook

Edit = Callable[[KeyBook], KeyBook]
"""Makes a new book from an old one. Pure, since it may be called again with another book; if it raises InvalidRequest,
nothing changes."""


class KeyStore(Protocol):
    """Keeps one KeyBook for all routers that name the same place, and replaces it whole or not at all.

    `look` and `change` raise Unavailable if the place cannot be reached, and ConfigError, with file and line, if its
    contents are not a book. After either, the book that was read before stays valid.
    """

    async def look(self) -> KeyBook | None:
        """The present book; None if it has not changed since the last look."""
        ...

    async def change(self, edit: Edit) -> KeyBook:
        """Replace the book by `edit` of it, and return the new one. After Unavailable it may have happened or not."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
