"""What an engine says that cannot be so: bytes of another shape, counts that are none. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from policies.errors import BackendFailed
from policies.nouns import Usage

MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.DecodeError)
"""What reading JSON of another shape than was agreed on raises."""

MOST_TOKENS = 2**40
"""No call has more."""


def nonsense(backend: str, data: bytes) -> BackendFailed:
    """What it means that `data` cannot be read."""
    return BackendFailed(f"{backend} answered nonsense: {data[:200].decode(errors='replace')}")


def not_asked_for(backend: str, choice: int, asked: int) -> BackendFailed:
    """What it means that an answer to a request for `asked` choices has one of this number."""
    return BackendFailed(f"{backend} gave answer {choice} where {asked} were asked for")


def usage_told(prompt: Any, completion: Any, cached: Any = None, reasoning: Any = None) -> Usage:
    """Counts as an engine tells them, None where it does not.

    Raises TypeError or ValueError for what is no count: tenants are charged by it.
    """
    counts = [int(count or 0) for count in (prompt, completion, cached, reasoning)]
    if not all(0 <= count < MOST_TOKENS for count in counts):
        raise ValueError(f"{counts} are no numbers of tokens")
    return Usage(counts[0], counts[1], counts[2], None if reasoning is None else counts[3])
