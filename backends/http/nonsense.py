"""Impossible answers of engines: bytes of another shape, values that are no counts. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from policies.errors import BackendFailed
from policies.nouns import Usage

MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.DecodeError)
"""Exceptions from reading JSON of an unexpected shape."""

MOST_TOKENS = 2**40
"""No call has more."""


def nonsense(backend: str, data: bytes) -> BackendFailed:
    """The error for `data` that cannot be read."""
    return BackendFailed(f"{backend} answered nonsense: {data[:200].decode(errors='replace')}")


def not_asked_for(backend: str, choice: int, asked: int) -> BackendFailed:
    """The error for an answer with this number to a request for `asked` choices."""
    return BackendFailed(f"{backend} gave answer {choice} where {asked} were asked for")


def reported_usage(prompt: Any, completion: Any, cached: Any = None, reasoning: Any = None) -> Usage:
    """An engine's counts; None if it does not report one.

    Raises TypeError or ValueError for values that are no counts, because tenants are charged by them.
    """
    counts = [int(count or 0) for count in (prompt, completion, cached, reasoning)]
    if min(counts) < 0 or max(counts) >= MOST_TOKENS:
        raise ValueError(f"{counts} are no numbers of tokens")
    return Usage(counts[0], counts[1], counts[2], None if reasoning is None else counts[3])
