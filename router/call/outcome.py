"""How a request ended, judged by what ended it."""

from __future__ import annotations

import asyncio

from policies.errors import (
    BackendRefused,
    ExpectedError,
    InvalidRequest,
    NoBackend,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RequestTooLarge,
    Unauthenticated,
    UnknownModel,
)
from policies.nouns import Outcome
from router.call.caller import CallerGone

_REJECTIONS = (
    BackendRefused,
    InvalidRequest,
    NoBackend,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RequestTooLarge,
    Unauthenticated,
    UnknownModel,
)


def outcome_of(error: BaseException | None) -> Outcome:
    """The Outcome of a request that ended with `error`, or without one."""
    if error is None:
        return Outcome.FINISHED
    if isinstance(error, asyncio.CancelledError | GeneratorExit | CallerGone):
        return Outcome.CANCELLED
    if isinstance(error, _REJECTIONS):
        return Outcome.REJECTED
    return Outcome.FAILED


def why_of(error: BaseException | None) -> str | None:
    """The whole text of what failed, for operators; None where a request did not fail, or as its client made it."""
    return str(error) if isinstance(error, ExpectedError) and outcome_of(error) is Outcome.FAILED else None


def code_of(error: BaseException | None) -> str:
    """A short word for logs and metrics: the error's own code, or how the request ended."""
    return error.code if isinstance(error, ExpectedError) else str(outcome_of(error))
