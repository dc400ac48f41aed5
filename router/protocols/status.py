"""The status of each failure over HTTP, in OpenAI's error shape and over gRPC: one table for all protocols."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import grpc

from policies import errors
from router.protocols.overflow import openai_words


@dataclass(frozen=True, slots=True)
class Status:
    """HTTP status, OpenAI's `error.type` and the gRPC code of one class of failures."""

    http: int
    type: str
    grpc: grpc.StatusCode


_REALM = 'Bearer realm="pointsman"'

STATUS: dict[type[errors.ExpectedError], Status] = {
    errors.InvalidRequest: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    errors.ConfigError: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    errors.BackendRefused: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    errors.Unsupported: Status(501, "api_error", grpc.StatusCode.UNIMPLEMENTED),
    errors.Unauthenticated: Status(401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    errors.PermissionDenied: Status(403, "permission_error", grpc.StatusCode.PERMISSION_DENIED),
    errors.UnknownModel: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    errors.UnknownPrefix: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    errors.UnknownDocument: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    errors.NoBatches: Status(404, "invalid_request_error", grpc.StatusCode.UNIMPLEMENTED),
    errors.UnknownFile: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    errors.UnknownBatch: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    errors.RequestTooLarge: Status(413, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Conflict: Status(409, "invalid_request_error", grpc.StatusCode.FAILED_PRECONDITION),
    errors.QuotaExceeded: Status(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Overloaded: Status(429, "overloaded_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Unavailable: Status(503, "overloaded_error", grpc.StatusCode.UNAVAILABLE),
    errors.BackendFailed: Status(502, "api_error", grpc.StatusCode.UNAVAILABLE),
    errors.NoBackend: Status(503, "api_error", grpc.StatusCode.UNAVAILABLE),
    errors.CutOff: Status(503, "api_error", grpc.StatusCode.UNAVAILABLE),
    errors.DeadlineExceeded: Status(504, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    errors.ExpectedError: Status(500, "server_error", grpc.StatusCode.INTERNAL),
}


def status_of(error: errors.ExpectedError) -> Status:
    """The status of the nearest class of `error` that the table names."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def openai_error(error: errors.ExpectedError) -> dict[str, Any]:
    """`error` in the shape of OpenAI's API. The message includes the hint, because clients show nothing else."""
    body = {
        "message": openai_words(error) if isinstance(error, errors.ContextExceeded) else error.public_message,
        "type": status_of(error).type,
        "param": error.param,
        "code": error.code,
        "hint": error.public_hint,
    }
    return {"error": body}


def retry_after(error: errors.ExpectedError) -> str | None:
    """The value of `Retry-After` in whole seconds (RFC 9110, 10.2.3), rounded up; None if a retry makes no sense."""
    return None if error.retry_after_s is None else str(max(1, math.ceil(error.retry_after_s)))


def challenge(error: errors.ExpectedError) -> str | None:
    """The value of `WWW-Authenticate` (RFC 6750, section 3); None for errors that no other key or token mends."""
    if isinstance(error, errors.NoCredential):
        return _REALM
    kinds = {errors.Unauthenticated: "invalid_token", errors.Unassigned: "insufficient_scope"}
    code = next((code for kind, code in kinds.items() if isinstance(error, kind)), None)
    return None if code is None else f'{_REALM}, error="{code}", error_description="{_quotable(error.message)}"'


def _quotable(text: str) -> str:
    """`text` with the characters alone that section 3 allows."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "'" for c in text)
