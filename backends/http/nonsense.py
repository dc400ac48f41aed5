"""Impossible answers of engines: bytes of another shape, values that are no counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """An engine's counts; None if it does not report one, which counts as 0.

    No answer is lost for its usage: `is_guess` where that of the prompt or of the answer is no count, or neither is
    reported. The router then counts itself.
    """
    read = tuple(map(_count, (prompt, completion, cached, reasoning, written)))
    are_unread = (read[0] is None and prompt is not None) or (read[1] is None and completion is not None)
    is_guess = are_unread or (read[0] is None and read[1] is None)
    return Usage(read[0] or 0, read[1] or 0, read[2] or 0, read[3], is_guess, cache_write_tokens=read[4] or 0)


REQUIRED = ""
"""In place of a count that an engine always reports: then it is not known without that."""


def _count(value: Any) -> int | None:
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return count if 0 <= count < MOST_TOKENS else None


def counts_in(usage: Any) -> Mapping[str, Any]:
    """An engine's object of counts; empty where it has another shape."""
    return usage if isinstance(usage, Mapping) else {}


_LETTERS = 4
"""Of a token, about."""


def tokens_of_text(texts: Iterable[Any]) -> int:
    """About how many tokens `texts` have, of an answer that came in one piece without their number; 1 at least."""
    return max(1, sum(len(text) for text in texts if isinstance(text, str)) // _LETTERS)
