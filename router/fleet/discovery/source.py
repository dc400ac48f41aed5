"""The Protocol of all sources of addresses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

Addresses = frozenset[str]
"""host:port of each backend."""


class SourceFailed(Exception):
    """A source could not be reached, or its answer is not valid; its last answer stays in effect."""


class Source(Protocol):
    """Yields the addresses of a pool. An empty set counts only after `patience_s`."""

    patience_s: float

    def addresses(self) -> AsyncGenerator[Addresses]:
        """All addresses, again whenever they may have changed, without end. Raises SourceFailed; call it again then."""
        ...
