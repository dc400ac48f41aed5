"""What a call reports to its trace. A call that is not traced has none, and costs nothing here.

A call that is traced has a CallTrace, each of its prompts a PromptTrace, each backend that a prompt is sent to an
AttemptTrace. `router/operate/telemetry/spans.py` makes spans of what they hear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from policies.nouns import ClusterView, Decision, Outcome, Prompt, Request, Usage
from router.ask import Input
from router.call.bid import Placed

W3C = ("traceparent", "tracestate")
"""Headers of the W3C Trace Context recommendation, which go on to backends."""


def w3c_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The trace context among `headers`."""
    found = {}
    for name in W3C:
        if name in headers:
            found[name] = headers[name]
    return found


class TraceIds(NamedTuple):
    """Where a call is found in a tracing system: lower-case hex."""

    trace_id: str
    span_id: str


class Answered(NamedTuple):
    """What is known of a call when it is over."""

    outcome: Outcome
    code: str
    path: str
    model: str
    tenant: str
    service_class: str
    rule: int | None
    usage: Usage
    inputs: Sequence[Input]


class Target(Protocol):
    """A backend, as far as traces tell of it."""

    name: str
    pool: str
    kind: str

    @property
    def address(self) -> str:
        """host:port."""
        ...


class Span(Protocol):
    """Something that takes time. A context manager: it lasts as long as it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class AttemptTrace(Span, Protocol):
    """One prompt at one backend."""

    def stamped(self, prompt: Prompt) -> Prompt:
        """`prompt` with the headers that the backend is to see."""
        ...

    def finished(self, reason: str) -> None:
        """A choice ended for this reason."""
        ...


class PromptTrace(Span, Protocol):
    """One prompt of a call, from its first decision to its end."""

    def queue(self) -> AbstractContextManager[object]:
        """It looks for a backend, until it is placed or gives up."""
        ...

    def decided(self, request: Request, view: ClusterView, decision: Decision, *, began_at: float) -> None:
        """The policy decided on `request`; it began at `began_at` of the router's clock."""
        ...

    def sent(self, placed: Placed, target: Target) -> AttemptTrace | None:
        """It goes to `target` now; None where only the prompt is recorded."""
        ...


class CallTrace(Protocol):
    """One call of a client."""

    @property
    def ids(self) -> TraceIds:
        """Where it is found."""
        ...

    def prompt(self) -> PromptTrace:
        """Its next prompt."""
        ...

    def end(self, what: Answered) -> None:
        """It is over."""
        ...


class Tracing(Protocol):
    """Begins traces."""

    def call(self, id: str, headers: Mapping[str, str]) -> tuple[CallTrace | None, Mapping[str, str]]:  # noqa: A002
        """The trace of the call `id` that begins now, None if it is not sampled, and the trace context that goes on
        from here, where no attempt has a span of its own. `headers` are the trace context that it came with.
        """
        ...


NO_SPAN: AbstractContextManager[None] = nullcontext()
"""Entered in place of the spans of what is not traced."""
