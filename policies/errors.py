"""Failures that were planned for. They know no protocol; `router.protocols.status` gives each its status code."""

from __future__ import annotations


class ExpectedError(Exception):
    """A failure with a code for machines, and a sentence and a hint for people.

    `message` says what happened, `hint` what to do about it, `param` which field of the request is meant. Its text is
    for operators; clients read `told`, which is the same unless it is given or the class has one for all.
    """

    code = "internal"
    told_as: str | None = None
    """What clients read in place of the text, where that may name addresses and files, or repeat an exception."""
    retryable = False
    """May the same request be tried on another backend?"""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        told: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message, self.hint, self.param, self.retry_after_s = message, hint, param, retry_after_s
        self.told = told or self.told_as or str(self)

    @property
    def told_hint(self) -> str:
        """The hint for clients; empty where they read another text, which has its own."""
        return self.hint if self.told == str(self) else ""


class InvalidRequest(ExpectedError):
    """The client sent something that cannot be understood or is out of range."""

    code = "invalid_request"


class ContextExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model."""

    code = "context_length_exceeded"


class UnknownPrefix(ExpectedError):
    """The tenant has no prefix of this name."""

    code = "prefix_not_found"


class RequestTooLarge(ExpectedError):
    """The body is larger than the router reads."""

    code = "request_too_large"


class Unauthenticated(ExpectedError):
    """No key, or one that no tenant has."""

    code = "invalid_api_key"


class PermissionDenied(ExpectedError):
    """The tenant is known and may not do this."""

    code = "permission_denied"


class UnknownModel(ExpectedError):
    """No pool serves a model of this name to this tenant."""

    code = "model_not_found"


class QuotaExceeded(ExpectedError):
    """The tenant's own limit is reached."""

    code = "rate_limit_exceeded"


class NoBackend(ExpectedError):
    """Every backend was dropped by a filter, or none is there at all."""

    code = "no_backend"


class Overloaded(ExpectedError):
    """Backends are there, but serving this request now would break promises to others."""

    code = "overloaded"


class Unavailable(Overloaded):
    """The same, where the SLA file wants it said as of a service that is not available (503)."""


class BackendFailed(ExpectedError):
    """A backend could not be reached, broke off, or answered nonsense."""

    code = "backend_failed"
    retryable = True
    told_as = "the backend that had the request failed (try again)"


class Unreached(BackendFailed):
    """The same, before it had the request: nothing was spent on that, and it cannot be what broke the backend."""

    told_as = "no backend that may take the request could be reached (try again)"


class BackendRefused(ExpectedError):
    """A backend understood the request and said no; another of its kind would say the same."""

    code = "backend_refused"


class DeadlineExceeded(ExpectedError):
    """The client's deadline passed first."""

    code = "deadline_exceeded"


class CutOff(ExpectedError):
    """The router ended, and its grace was over before the answer was."""

    code = "cut_off"


class ConfigError(ExpectedError):
    """A file that cannot take effect. `problems` has one entry per mistake, with line and path."""

    code = "invalid_config"

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__("\n".join((message, *problems)), hint=hint)
        self.problems = problems
