"""Why no backend takes a prompt, as an error for its client. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.errors import ContextExceeded, ExpectedError, InvalidRequest, NoBackend, Overflow, Overloaded
from policies.health import Trouble
from policies.legs import is_divisible
from policies.nouns import DIALECTS, BackendView, Capability, ClusterView, Decision, Request
from policies.objections import in_words
from policies.predict import may_fit
from policies.waiting import NEEDS_PREFILL, UNREACHED, is_outage, is_worth_waiting
from router.call.disclosure import public_trouble, shown_name

WANTED = {
    Capability.STRUCTURED_OUTPUT: (
        "shape its answers",
        "response_format",
        "leave `response_format`, `structured_outputs` or a forced `tool_choice` out, and say it in the prompt",
    ),
    Capability.TOKEN_IDS: ("take token ids", "prompt", "send the prompt as text"),
    Capability.LOGPROBS: ("tell log-probabilities", "logprobs", "leave `logprobs` out"),
    Capability.EMBEDDINGS: ("make embeddings", "model", "ask for a model that embeds"),
    Capability.RERANK: ("score documents", "model", "ask for a model that reranks"),
    Capability.MEDIA: ("read images, sound or files", "messages", "send text alone, or ask for a model that sees"),
    Capability.SUFFIX: ("write what stands before a suffix", "suffix", "put the whole text into `prompt`"),
    Capability.PROMPT_LOGPROBS: ("tell log-probabilities of a prompt", "echo", "leave `echo` or `logprobs` out"),
    Capability.PINS: ("keep prefixes for a time", "pin", "leave `pin` out: the prefix is computed there all the same"),
    Capability.CONTINUES_TOKENS: ("continue an answer of another backend", "stream", "ask again"),
    Capability.CONTINUES_TEXT: ("continue an answer of another backend", "stream", "ask again"),
    **dict.fromkeys(DIALECTS, ("read this body", "model", "ask for a model of another engine")),
    Capability.CHOICES: ("give several answers at once", "n", "leave `n` out and ask several times"),
}
"""Capability -> what a backend without it cannot do, the field that asked for it, and what to do instead."""

_OF_HEALTH = frozenset({UNREACHED, "healthy"})
"""Reasons of a decision behind which the health of a backend says more."""


def refusal_of(
    request: Request,
    view: ClusterView,
    decision: Decision,
    trouble: Callable[[str], Trouble | None] = lambda _: None,
    *,
    untranslated: InvalidRequest | None = None,
) -> ExpectedError:
    """The error for `request`, which no backend can take according to `decision` on `view`.

    `trouble` says what is wrong with the health of a backend, and `untranslated` why only one that speaks the client's
    dialect may have it.
    """
    incapable = _incapable(request, view.backends, untranslated)
    return (
        incapable
        or _indivisible(request, view, decision)
        or _too_long(request, view, decision)
        or _no_backend(decision, view.backends, trouble)
    )


def _incapable(
    request: Request, backends: Sequence[BackendView], untranslated: InvalidRequest | None
) -> InvalidRequest | None:
    """The error if no backend of the model can ever do what the request needs."""
    serving = [backend for backend in backends if request.model in backend.models]
    if not serving or any(request.needs <= backend.capabilities for backend in serving):
        return None
    missing = sorted(need for need in request.needs if not any(need in backend.capabilities for backend in serving))
    if untranslated is not None and not DIALECTS.isdisjoint(missing or request.needs):
        return untranslated
    what, param, hint = WANTED[(missing or sorted(request.needs))[0]]
    return InvalidRequest(f"no backend of '{request.model}' can {what}", hint=hint, param=param)


def _indivisible(request: Request, view: ClusterView, decision: Decision) -> InvalidRequest | None:
    """The error if the backends of the model compute no prompts, and those of this request cannot be computed apart."""
    serving = {backend.name for backend in view.backends if request.model in backend.models and backend.unfit is None}
    reasons = {reason for name, reason in decision.dropped if name in serving}
    if reasons != {NEEDS_PREFILL} or is_divisible(request):
        return None
    return InvalidRequest(
        f"prompts for '{request.model}' are computed apart from their answers, which this request does not allow",
        hint="ask for one answer (`n`: 1), without media, and without `echo` with `logprobs`",
    )


def _too_long(request: Request, view: ClusterView, decision: Decision) -> ContextExceeded | None:
    """The error if it does not fit the context of any backend that may take it, whatever else keeps it from them.

    A pool of which no backend was ever reached may have the model with a longer context: then there is no error yet.
    """
    if all(reason != "fits_context" for _, reason in decision.dropped):
        return None
    asked = [backend for backend in view.backends if request.pools is None or backend.pool in request.pools]
    reached = {backend.pool for backend in asked if backend.models}
    able = [backend for backend in asked if request.model in backend.models and request.needs <= backend.capabilities]
    if any(backend.pool not in reached for backend in asked) or any(may_fit(request, backend) for backend in able):
        return None
    longest = max(backend.context_tokens or 0 for backend in able)
    return ContextExceeded.of(
        Overflow(
            request.surely_tokens, request.max_new_tokens, longest, at_least=request.least_prompt_tokens is not None
        ),
        where=f" of '{request.model}'",
        hint=f"the backends that may take it have a context of {longest:,} tokens at most",
    )


def _no_backend(
    decision: Decision, backends: Sequence[BackendView], trouble: Callable[[str], Trouble | None]
) -> NoBackend | Overloaded:
    draining = {backend.name for backend in backends if backend.draining}

    def shown(name: str, reason: str) -> str:
        # other reasons hold whatever the health of the backend
        wrong = trouble(name) if reason in _OF_HEALTH else None
        if wrong is not None:
            return f"{shown_name(name)}: {public_trouble(name, wrong)}"
        is_draining = reason == "healthy" and name in draining
        return f"{shown_name(name)}: {'draining' if is_draining else in_words(reason)}"

    reasons = ", ".join(shown(name, reason) for name, reason in decision.dropped[:8])
    more = f" and {len(decision.dropped) - 8} more" if len(decision.dropped) > 8 else ""
    kind = Overloaded if is_worth_waiting(decision) and not is_outage(decision) else NoBackend
    return kind(
        f"none of {len(backends)} backends can take this request",
        hint=f"dropped by policy '{decision.policy}': {reasons}{more}" if reasons else "the cluster is empty",
        retry_after_s=1.0,
    )
