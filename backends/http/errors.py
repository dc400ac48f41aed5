"""Errors of servers with OpenAI's dialect: the meaning of replies other than 200. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from backends.http.lenient_json import read_json
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLacks,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unsupported,
)

_TOO_LONG = re.compile(
    r"context.{0,20}length|maximum context|max_model_len|max_seq_len|max_num_tokens|too many tokens"
    r"|longer than the model|available context|context window|maximum (?:allowed|model) length|prompt is too long"
    r"|input is too long for|input token count|exceed context limit|reduce the length of",
    re.IGNORECASE,
)
MOST_WAIT_S = 86_400.0
"""A backend that asks to wait longer is asked again after a day."""

_MAY_BE_REQUESTS = frozenset({424, 499, 500, 502, 504, 520, 524})
"""Statuses that a request may provoke: its engine erred (TGI: 424), or died or hung behind a proxy that is well."""

_LACKS = frozenset({403, 404, 405, 410, 501})
"""Statuses by which a server tells that it does not have a model or an endpoint, or may not give it: one that is set up
otherwise may answer, and it is known to be well."""

_OVERLOADED = 529
"""Anthropic's, which gateways before it pass on."""

BUSY = re.compile(
    r"overloaded|over capacity|at capacity|server busy|too many (?:concurrent )?requests|queue (?:is )?full",
    re.IGNORECASE,
)
"""How servers that are well name a full queue, with a status of 503 and no time to come back."""

_JUDGED = re.compile(r"flagged|moderat|safety|content.{0,4}(?:filter|polic)|harmful|violat", re.IGNORECASE)
"""How servers that judge texts say that they forbid one."""

_ACCOUNT = re.compile(
    r"credit balance|(?:insufficient|out of|not enough) (?:credits?|funds|balance|quota)", re.IGNORECASE
)
"""How providers that answer 400 or 403 say that the account of the pool's key is empty: another key may do."""

_RETRY_AFTER = frozenset({"retry-after", "retry-after-ms"})
_NO_ENDPOINT = re.compile(
    r"status \d+|(?:404 )?(?:page )?not found|(?:405 )?method not allowed|(?:501 )?not implemented|file not found",
    re.IGNORECASE,
)
"""What servers answer at a path that they do not have; of a model or an adapter they say more."""
_STATUS = re.compile(r"\d{3}", re.ASCII)
_SECONDS = re.compile(r"\d+(?:\.\d*)?", re.ASCII)
_MOST_DATE = 64
_MOST_CHARACTERS = 2000
_MOST_PAGE_CHARACTERS = 8000
_TAG = re.compile(r"<(style|script)\b.*?</\1>|<[^<>]*>", re.IGNORECASE | re.DOTALL)
_KEY_HINT = "is the pool's key right?"
_STATUSES = {
    "context_length_exceeded": 400,
    "content_filter": 400,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "rate_limit_error": 429,
    "overloaded_error": 429,
}
"""Words in a stream's errors that replace a status, as `code` or else as `type`."""


def error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
    """The error for an HTTP `status` with its `body`: its message, and whether the request may be tried elsewhere."""
    details = details_of(body)
    message = str(details.get("message") or f"status {status}")[:_MOST_CHARACTERS]
    wait_s = retry_after_s(headers)
    is_busy = status == 503 and (not headers.keys().isdisjoint(_RETRY_AFTER) or BUSY.search(message) is not None)
    if is_busy or status in (429, _OVERLOADED):
        # a server that gives a time to come back is healthy, even if that cannot be read
        return Overloaded(f"{backend} is busy: {message}", retry_after_s=wait_s)
    if status in _MAY_BE_REQUESTS:
        return BackendErred(f"{backend} answered {status}: {message}", retry_after_s=wait_s)
    if (status > 500 or status < 400 or status == 408) and status not in _LACKS:
        return BackendFailed(f"{backend} answered {status}: {message}", retry_after_s=wait_s)
    if status in (401, 402):
        # no client can fix a wrong key or account of the pool, and another server may have other ones
        return BackendFailed(f"{backend} does not let the router in: {message}", hint=_KEY_HINT)
    if status == 403:
        # another server of the provider would judge the text alike
        kind = BackendRefused if _JUDGED.search(f"{message} {details.get('code')}") else BackendLacks
        return kind(f"{backend} does not let the router in: {message}", hint=_KEY_HINT)
    if status == 400 and _ACCOUNT.search(message):
        return BackendLacks(f"{backend} does not let the router in: {message}", hint=_KEY_HINT)
    param = details.get("param")
    param = param if isinstance(param, str) else None
    if details.get("code") == "context_length_exceeded" or (status in (400, 413, 422) and _TOO_LONG.search(message)):
        return ContextExceeded(message, param=param)
    if status in (400, 422):
        return InvalidRequest(message, param=param)
    if status in (404, 405, 501) and _NO_ENDPOINT.fullmatch(message.strip()):
        return Unsupported(f"{backend} does not have this endpoint: {message}", param=param)
    kind = BackendLacks if status in _LACKS else BackendRefused
    return kind(f"{backend} refused: {message}", param=param)


def error_in_stream(backend: str, error: Any) -> ExpectedError:
    """The error for an `error` object that came as an event, after a status of 200."""
    details = error if isinstance(error, Mapping) else {"message": error}
    code = details.get("code")
    code = int(code) if isinstance(code, str) and _STATUS.fullmatch(code) else code
    words = (word for name in ("code", "type") if isinstance(word := details.get(name), str))
    named = next((status for word in words if (status := _STATUSES.get(word)) is not None), 500)
    status = code if isinstance(code, int) and 400 <= code < 600 else named
    return error_of(backend, status, msgspec.json.encode({"error": dict(details)}), {})


def details_of(body: bytes) -> Mapping[str, Any]:
    """The error object in `body`: OpenAI's `error`, vLLM's flat one, FastAPI's `detail`; else the text as `message`."""
    text = body.decode(errors="replace").strip()
    try:
        decoded = read_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": _without_tags(text) if text.startswith("<") else text}
    if not isinstance(decoded, dict):
        return {"message": str(decoded) if decoded else None}
    error = decoded.get("error", decoded)
    if not isinstance(error, dict):
        return {"message": str(error)}
    if error.get("message"):
        return error
    return {
        **error,
        **(_of_detail(decoded["detail"]) if decoded.get("detail") else {"message": text if error else None}),
    }


def _of_detail(detail: Any) -> Mapping[str, Any]:
    """FastAPI's report of each invalid field, or a custom detail."""
    if isinstance(detail, dict):
        return details_of(msgspec.json.encode(detail))
    if not isinstance(detail, list):
        return {"message": str(detail)}
    found = [entry if isinstance(entry, dict) else {"msg": entry} for entry in detail]
    fields = [".".join(map(str, where[1:])) if isinstance(where := entry.get("loc"), list) else "" for entry in found]
    texts = [str(entry.get("msg") or entry) for entry in found]
    message = "; ".join(f"{field}: {what}" if field else what for field, what in zip(fields, texts, strict=True))
    return {"message": message, "param": next(filter(None, fields), None)}


def _without_tags(page: str) -> str:
    """The text of an HTML `page`, as proxies write it."""
    return " ".join(_TAG.sub(" ", page[:_MOST_PAGE_CHARACTERS]).split())


def retry_after_s(headers: Mapping[str, str], unix_time: Callable[[], float] = time.time) -> float | None:
    """Seconds that the backend asks to wait, at most MOST_WAIT_S; None where it does not, or that cannot be read.

    They may have a fraction. A date counts from the answer's own date, where it has one: clocks differ. Source: RFC
    9110, 10.2.3 and 5.6.7.
    """
    if (milliseconds := headers.get("retry-after-ms")) is not None and _SECONDS.fullmatch(milliseconds.strip()):
        return min(float(milliseconds) / 1000, MOST_WAIT_S)
    asked = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(asked):
        return min(float(asked), MOST_WAIT_S)
    at = _unix_time_of(asked)
    if at is None:
        return None
    answered_at = _unix_time_of(headers.get("date", ""))
    return min(max(0.0, at - (unix_time() if answered_at is None else answered_at)), MOST_WAIT_S)


def _unix_time_of(date: str) -> float | None:
    """The time of one of HTTP's three forms of a `date`; None for anything else."""
    if not date or len(date) > _MOST_DATE:
        return None
    try:
        found = parsedate_to_datetime(date)
        # all forms are in UTC, and one does not say so
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
