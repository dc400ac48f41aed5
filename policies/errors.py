"""Expected failures. They are independent of protocols; `router.protocols.status` maps each to its status code."""

from __future__ import annotations

from typing import NamedTuple


class ExpectedError(Exception):
    """A failure with a code for programs, and a sentence and a hint for people.

    `message` describes the failure, `hint` the remedy, `param` the field of the request. The text of the exception is
    for operators. Clients get `public_message`: the same text, unless it is given or the class has a `masked_message`.
    """

    code = "internal"
    masked_message: str | None = None
    """Text for clients, if the exception's text may contain addresses, files, or another exception."""
    usual_hint = "try again; if that fails too, give the operator the request's id"
    """Remedy for clients, if the error has none of its own or a text that hides it."""
    retryable = False
    """Whether the same request may be tried on another backend."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        public_message: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message, self.hint, self.param, self.retry_after_s = message, hint, param, retry_after_s
        self.public_message = public_message or self.masked_message or str(self)

    @property
    def public_hint(self) -> str:
        """The remedy for clients, never empty."""
        own = self.hint if self.public_message == str(self) else ""
        return own or self.usual_hint


class InvalidRequest(ExpectedError):
    """The client sent a request that cannot be parsed or is out of range."""

    code = "invalid_request"
    usual_hint = "change the request; docs/errors.md lists the codes"
    is_of_kind = False
    """Is it only that this kind of backend cannot be told of it? Another kind may be able to."""


class Overflow(NamedTuple):
    """Tokens of a request that does not fit: of its prompt (or `at_least` so many), of its answer where a length was
    asked for, and of the model's context.
    """

    prompt_tokens: int
    answer_tokens: int | None
    context_tokens: int
    at_least: bool = False


class ContextExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model. `overflow` has the numbers, where they are known."""

    code = "context_length_exceeded"
    usual_hint = "shorten the prompt, or lower max_tokens"
    overflow: Overflow | None = None

    @classmethod
    def of(cls, overflow: Overflow, *, where: str = "", hint: str = "", param: str | None = None) -> ContextExceeded:
        """The error for `overflow`, in the words of vLLM, which clients recognise; `where` names the model."""
        prompt, answer, context, at_least = overflow
        vaguely = "at least " if at_least else ""
        if answer is None:
            what = f"your request has {vaguely}{prompt} input tokens"
        else:
            what = (
                f"you requested {answer} output tokens and your prompt contains {vaguely}{prompt} input tokens, for a"
                f" total of {vaguely}{prompt + answer} tokens"
            )
        message = f"This model's maximum context length is {context} tokens. However, {what}{where}"
        error = cls(message, hint=hint, param=param)
        error.overflow = overflow
        return error


class UnknownPrefix(ExpectedError):
    """The tenant has no prefix of this name."""

    code = "prefix_not_found"
    usual_hint = "GET /v1/prefixes lists the prefixes that are there"


class UnknownDocument(ExpectedError):
    """The tenant has no document set of this name, or the set has no such document."""

    code = "document_not_found"
    usual_hint = "GET /v1/document_sets lists the sets that are there"


class NoBatches(ExpectedError):
    """The router keeps no files and runs no batches."""

    code = "batches_off"
    usual_hint = "the operator turns them on with `batches: {store: DIR}` in the SLA file"


class UnknownFile(ExpectedError):
    """The tenant has no file of this id."""

    code = "file_not_found"
    usual_hint = "GET /v1/files lists the files that are there"


class UnknownBatch(ExpectedError):
    """The tenant has no batch of this id."""

    code = "batch_not_found"
    usual_hint = "GET /v1/batches lists the batches that are there"


class RequestTooLarge(ExpectedError):
    """The body is larger than the router reads."""

    code = "request_too_large"
    usual_hint = "send a smaller request"


class Unauthenticated(ExpectedError):
    """No key or token, or one that is not valid."""

    code = "invalid_api_key"
    usual_hint = "send the header 'Authorization: Bearer KEY' with a key of this router"


class NoCredential(Unauthenticated):
    """Neither key nor token was sent."""


class PermissionDenied(ExpectedError):
    """The tenant is known and may not do this."""

    code = "permission_denied"
    usual_hint = "ask the operator for the permission"


class Unassigned(PermissionDenied):
    """The token is valid, and no rule gives it a tenant or a role that is needed here."""


class UnknownModel(ExpectedError):
    """No pool serves a model of this name to this tenant."""

    code = "model_not_found"
    usual_hint = "GET /v1/models lists the models"


class Conflict(ExpectedError):
    """What the caller wants to change is not as the caller knows it, or cannot be changed."""

    code = "conflict"
    usual_hint = "look at it again, and decide anew"


class QuotaExceeded(ExpectedError):
    """The tenant's own limit is reached."""

    code = "rate_limit_exceeded"
    usual_hint = "wait as long as Retry-After says, or ask the operator for a higher limit"


class NoBackend(ExpectedError):
    """Every backend was dropped by a filter, or none is there at all."""

    code = "no_backend"
    usual_hint = "try again later; the operator's dashboard shows the backends"


class Overloaded(ExpectedError):
    """Backends exist, but serving this request now would break other requests' targets."""

    code = "overloaded"
    usual_hint = "try again after the time in Retry-After"


class Unavailable(Overloaded):
    """Overloaded, reported as 503 because the SLA file asks for it."""


class BackendFailed(ExpectedError):
    """A backend could not be reached, broke off, or answered nonsense."""

    code = "backend_failed"
    usual_hint = "try again"
    retryable = True
    masked_message = "the backend that had the request failed (try again)"


class Unreached(BackendFailed):
    """BackendFailed before the backend got the request: it costs no attempt, and the request cannot be the cause."""

    masked_message = "no backend that may take the request could be reached (try again)"


class IdleLost(BackendFailed):
    """BackendFailed by a connection that had lain idle: the backend may have closed it before the request came, or have
    the request. It is not ill for that, and may be tried again.
    """


class BackendErred(BackendFailed):
    """BackendFailed with an internal error, or an answer that cannot be read, of a backend that answers: the request
    may be the cause.
    """


class BackendHung(BackendErred):
    """BackendErred by silence: nothing of an answer came for too long from a backend that answers others or probes."""


class BackendLost(BackendFailed):
    """BackendFailed by a connection that ended while the backend had the request: it may have crashed over it."""


class BeyondAsked(ExpectedError):
    """A backend goes on to answer behind the tokens that were asked for."""

    code = "backend_failed"
    usual_hint = "try again"
    masked_message = "the backend answers more than was asked for (try again)"


class PrefillFailed(ExpectedError):
    """The prompt was not computed elsewhere, or its KV could not be fetched: it has to be computed with its answer."""

    code = "backend_failed"
    usual_hint = "try again"
    retryable = True
    masked_message = "the backend that had the prompt failed (try again)"
    backend: str | None = None
    """It did not compute the prompt; None: the KV did not arrive."""


class RequestFails(BackendFailed):
    """Backends failed at this request and serve others, so the request is the cause."""

    usual_hint = "change the request, or try again in a minute"
    masked_message = "two backends failed at this request and serve others (change it, or try again in a minute)"


class BackendRefused(ExpectedError):
    """A backend understood the request and refused it; another of its kind would refuse it too."""

    code = "backend_refused"
    usual_hint = "change the request; another backend of this kind would refuse it too"


class BackendLacks(BackendRefused):
    """BackendRefused for what this one backend has or may: its model, its endpoint, its rights. Another may answer."""

    usual_hint = "change the request, or ask the operator whether the backends of this model are set up alike"
    retryable = True


class Unsupported(BackendLacks):
    """No backend of the model has the endpoint that was asked for, or can do what it does."""

    code = "unsupported"
    usual_hint = "use another endpoint or another model; the backends of this one cannot do it"


class DeadlineExceeded(ExpectedError):
    """The client's deadline passed first."""

    code = "deadline_exceeded"
    usual_hint = "allow more time, or ask for a shorter answer"


class CutOff(ExpectedError):
    """The router shut down, and its drain time ended before the answer did."""

    code = "cut_off"
    usual_hint = "send the request again; another router answers it"


class ConfigError(ExpectedError):
    """A file that cannot take effect. `problems` has one entry per mistake, with line and path."""

    code = "invalid_config"
    usual_hint = "correct the file; `pointsman check FILE` lists every mistake"

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__("\n".join((message, *problems)), hint=hint)
        self.problems = problems
