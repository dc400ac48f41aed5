"""Impossible answers of engines: bytes of another shape, values that are no counts. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.http.lenient_json import read_json
from policies.errors import BackendErred
from policies.nouns import Usage

MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.DecodeError)
"""Exceptions from reading JSON of an unexpected shape."""

_NAMES = (
    *("id", "object", "type", "model", "created", "choices", "index", "delta", "message", "text", "finish_reason"),
    *("usage", "error", "detail", "content", "stop_reason", "output", "status", "response", "done", "data"),
)
"""Fields of the engines' answers, which an error may list."""

MOST_TOKENS = 2**40
"""No call has more."""


def nonsense(backend: str, data: bytes) -> BackendErred:
    """The error for `data` that cannot be read. It does not quote them: they may be a part of an answer, and errors are
    logged.
    """
    try:
        decoded = read_json(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BackendErred(f"{backend} answered nonsense: {len(data)} bytes that are no JSON")
    shape = f"an object with {_names(decoded)}" if isinstance(decoded, dict) else f"a {type(decoded).__name__}"
    return BackendErred(f"{backend} answered nonsense: {shape}, in {len(data)} bytes of JSON")


def _names(decoded: dict[str, Any]) -> str:
    """The names that any API has; others may be text of an answer."""
    known = [name for name in _NAMES if name in decoded]
    others = len(decoded) - len(known)
    return ", ".join((*known, *([f"{others} other fields"] if others else []))) or "no fields"


def not_asked_for(backend: str, choice: int, asked: int) -> BackendErred:
    """The error for an answer with this number to a request for `asked` choices."""
    return BackendErred(f"{backend} gave answer {choice} where {asked} were asked for")


def reported_usage(
    prompt: Any, completion: Any, cached: Any = None, reasoning: Any = None, written: Any = None
) -> Usage:
    """An engine's counts; None if it does not report one.

    Raises TypeError or ValueError for values that are no counts, because tenants are charged by them.
    """
    counts = (int(prompt or 0), int(completion or 0), int(cached or 0), int(reasoning or 0), int(written or 0))
    if min(counts) < 0 or max(counts) >= MOST_TOKENS:
        raise ValueError(f"{counts} are no numbers of tokens")
    return Usage(
        counts[0], counts[1], counts[2], None if reasoning is None else counts[3], cache_write_tokens=counts[4]
    )
