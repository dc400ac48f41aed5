"""The Protocol that every source of addresses fulfils."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

Addresses = frozenset[str]
"""host:port of each backend."""


class SourceFailed(Exception):
    """A source could not be asked, or answered nonsense; what it said last stays true as far as anybody knows."""


class Source(Protocol):
    """Says which addresses a pool has. An empty set is doubted for `patience_s` before it is believed."""

    patience_s: float

    def addresses(self) -> AsyncGenerator[Addresses]:
        """All addresses, again whenever they may have changed, for ever. Raises SourceFailed; it may be asked anew."""
        ...
