"""OpenTelemetry spans from the protocols of `router/call/tracing.py`.

One call, for each prompt and backend that it is sent to:

    chat tiny (server)                      the client's span is its parent
      queue                                 until the prompt is placed; once more for each retry
      decide                                the decision that placed it
      chat tiny (client)                    one attempt; its context goes to the backend
        prefill                             sent -> first piece of the answer
        decode                              first -> last piece

Source of the names: OpenTelemetry's GenAI semantic conventions (gen_ai.*, v0.1.0 of their repository) and its stable
ones for errors and servers; all other attributes begin with pointsman. No span has answers. Only the call's span has
prompts, and only if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec
from msgspec.structs import replace
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from policies.nouns import ClusterView, Decision, Outcome, Prompt, Request, Sampling, Usage
from router.ask import Chat, Input
from router.call.bid import Placed
from router.call.outcome import code_of, outcome_of, why_of
from router.call.tracing import Answered, CallTrace, Target, TraceIds

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "rerank",
}
"""Endpoint -> gen_ai.operation.name; any other is `chat`."""

MOST_PROMPT_CHARACTERS = 16_384
"""Most characters of the prompt in a span; its end is kept."""

Attributes = dict[str, AttributeValue]
_USUAL = Sampling()

_CONTEXT = TraceContextTextMapPropagator()
_BROKEN = frozenset({Outcome.FAILED, Outcome.EVICTED})


class Spans:
    """Begins traces with `tracer`. `clock` is the router's, `wall_ns` the time of day in nanoseconds.

    `with_prompts` puts the prompt into the span of the call, up to MOST_PROMPT_CHARACTERS.
    """

    def __init__(
        self,
        tracer: otel.Tracer,
        clock: Callable[[], float],
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        with_prompts: bool = False,
    ) -> None:
        self._tracer, self._clock, self._wall_ns, self._with_prompts = tracer, clock, wall_ns, with_prompts

    def call(self, id: str, headers: Mapping[str, str]) -> tuple[CallTrace | None, Mapping[str, str]]:  # noqa: A002
        """See Tracing. The call's span is a child of the span in `headers`."""
        times = _Times(self._clock, self._wall_ns() - int(self._clock() * 1e9))
        span = self._tracer.start_span(
            "request",
            context=_CONTEXT.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"pointsman.request": id},
            start_time=times.now_ns(),
        )
        made = _Call(self._tracer, span, times, with_prompts=self._with_prompts)
        # not sampled, but the backends need that flag
        return made if span.is_recording() else None, made.headers


class _Times:
    """Converts times of the router's clock to nanoseconds since 1970."""

    __slots__ = ("_clock", "_zero_ns")

    def __init__(self, clock: Callable[[], float], zero_ns: int) -> None:
        self._clock, self._zero_ns = clock, zero_ns

    def now_ns(self) -> int:
        return self.ns(self._clock())

    def ns(self, at: float) -> int:
        return self._zero_ns + int(at * 1e9)


class _Maker:
    """Makes the children of one span."""

    __slots__ = ("context", "span", "times", "tracer")

    def __init__(self, tracer: otel.Tracer, span: otel.Span, times: _Times) -> None:
        self.tracer, self.span, self.times = tracer, span, times
        self.context: Context = otel.set_span_in_context(span, Context())

    @property
    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, self.context)
        return carrier

    def child(self, name: str, *, began_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        """A span that has ended already."""
        span = self.tracer.start_span(name, self.context, attributes=attributes, start_time=began_ns)
        span.end(max(began_ns, ended_ns))


class _Call(_Maker):
    """The server span of a call."""

    __slots__ = ("_with_prompts", "finish_reasons")

    def __init__(self, tracer: otel.Tracer, span: otel.Span, times: _Times, *, with_prompts: bool) -> None:
        super().__init__(tracer, span, times)
        self._with_prompts = with_prompts
        self.finish_reasons: list[str] = []

    @property
    def ids(self) -> TraceIds:
        context = self.span.get_span_context()
        return TraceIds(otel.format_trace_id(context.trace_id), otel.format_span_id(context.span_id))

    def prompt(self) -> _Prompt:
        return _Prompt(self)

    def end(self, what: Answered) -> None:
        attributes: Attributes = {
            "pointsman.outcome": what.outcome.value,
            "pointsman.tenant": what.tenant,
            "pointsman.service_class": what.service_class,
        }
        if what.path and what.model:
            self.span.update_name(f"{_operation(what.path)} {what.model}")
        if what.path:
            attributes["gen_ai.operation.name"] = _operation(what.path)
        if what.model:
            attributes["gen_ai.request.model"] = what.model
        if what.rule is not None:
            attributes["pointsman.rule"] = what.rule
        if what.usage != Usage():
            attributes |= _used(what.usage)
        if self.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = tuple(self.finish_reasons)
        if self._with_prompts:
            attributes["gen_ai.input.messages"] = input_messages(what.inputs)
        if what.outcome is not Outcome.FINISHED:
            attributes["error.type"] = what.code
        if what.outcome in _BROKEN:
            self.span.set_status(StatusCode.ERROR)
        self.span.set_attributes(attributes)
        self.span.end(self.times.now_ns())


class _Prompt:
    """Queue and decisions of one prompt, as children of its call's span."""

    __slots__ = ("_attempts", "_call", "_decided", "_looks")

    def __init__(self, call: _Call) -> None:
        self._call, self._looks, self._attempts = call, 0, 0
        self._decided: tuple[int, int, Decision, ClusterView] | None = None

    def queue(self) -> _Queue:
        self._looks = 0
        return _Queue(self._call)

    def decided(self, request: Request, view: ClusterView, decision: Decision, *, began_at: float) -> None:  # noqa: ARG002
        times = self._call.times
        self._looks += 1
        self._decided = (times.ns(began_at), times.now_ns(), decision, view)

    def sent(self, placed: Placed, target: Target) -> _Attempt:
        self._tell_decision()
        self._attempts += 1
        return _Attempt(self._call, placed, target, self._attempts)

    def _tell_decision(self) -> None:
        if self._decided is None:
            return
        began_ns, ended_ns, decision, view = self._decided
        self._decided = None
        attributes: Attributes = {
            "pointsman.policy": decision.policy,
            "pointsman.backends": len(view.backends) + view.left_out,
            "pointsman.left_out": view.left_out,
            "pointsman.dropped": len(decision.dropped),
            "pointsman.looks": self._looks,
        }
        if decision.chosen is not None:
            attributes["pointsman.backend"] = decision.chosen
        if decision.predicted_ttft_s is not None:
            attributes["pointsman.predicted_ttft_seconds"] = decision.predicted_ttft_s
        self._call.child("decide", began_ns=began_ns, ended_ns=ended_ns, attributes=attributes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # if no backend took the prompt, this decision explains why
        self._tell_decision()


class _Queue:
    """The span `queue`."""

    __slots__ = ("_began_ns", "_call")

    def __init__(self, call: _Call) -> None:
        self._call, self._began_ns = call, call.times.now_ns()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        ended_ns = self._call.times.now_ns()
        attributes: Attributes = {"pointsman.queue_seconds": (ended_ns - self._began_ns) / 1e9}
        if error is not None:
            attributes["error.type"] = code_of(error)
        self._call.child("queue", began_ns=self._began_ns, ended_ns=ended_ns, attributes=attributes)


class _Attempt(_Maker):
    """The client span of one prompt at one backend, with `prefill` and `decode` as its children."""

    __slots__ = ("_call", "_finish_reasons", "_flight")

    def __init__(self, call: _Call, placed: Placed, target: Target, number: int) -> None:
        request = placed.bid.request
        operation = _operation(placed.bid.prompt.path)
        host, _, port = target.address.rpartition(":")
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": target.kind,
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "pointsman.backend": target.name,
            "pointsman.pool": target.pool,
            "pointsman.attempt": number,
            **_asked(request),
        }
        if host and port.isascii() and port.isdigit() and len(port) < 6:
            attributes |= {"server.address": host.strip("[]"), "server.port": int(port)}
        self._call, self._flight = call, placed.flight
        self._finish_reasons: list[str] = []
        span = call.tracer.start_span(
            f"{operation} {request.model}",
            call.context,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=call.times.ns(placed.flight.sent_at),
        )
        super().__init__(call.tracer, span, call.times)

    def stamped(self, prompt: Prompt) -> Prompt:
        return replace(prompt, headers={**prompt.headers, **self.headers})

    def finished(self, reason: str) -> None:
        self._finish_reasons.append(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        flight, ns, now_ns = self._flight, self.times.ns, self.times.now_ns()
        first_ns = None if flight.first_at is None else ns(flight.first_at)
        if first_ns is not None or not flight.answered:
            # an answer in one piece has no observable boundary between prefill and decode
            self.child("prefill", began_ns=ns(flight.sent_at), ended_ns=now_ns if first_ns is None else first_ns)
        if first_ns is not None:
            ended_ns = now_ns if flight.last_at is None else ns(flight.last_at)
            self.child("decode", began_ns=first_ns, ended_ns=ended_ns)
            if flight.request.stream and flight.first_at is not None:
                first_s = max(0.0, flight.first_at - flight.sent_at)
                self.span.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
        if flight.answered:
            self.span.set_attributes(_used(flight.usage or Usage(flight.request.prompt_tokens, flight.drawn_tokens)))
        if self._finish_reasons:
            self._call.finish_reasons += () if error else self._finish_reasons
            self.span.set_attribute("gen_ai.response.finish_reasons", tuple(self._finish_reasons))
        if error is not None:
            self.span.set_attribute("error.type", code_of(error))
            # a cancelled attempt is no error of the backend
            if outcome_of(error) is not Outcome.CANCELLED:
                self.span.set_status(StatusCode.ERROR, why_of(error))
        self.span.end(now_ns)


def input_messages(inputs: Sequence[Input]) -> str:
    """`inputs` as JSON in the shape of gen_ai.input.messages: the last messages that fit, in order.

    A prompt of token ids is left out.
    """
    texts: list[tuple[str, str]] = []
    for prompt in inputs:
        if isinstance(prompt, Chat):
            texts += [(str(message.get("role", "")), str(message.get("content") or "")) for message in prompt.messages]
        elif isinstance(prompt, str):
            texts.append(("user", prompt))
    messages: list[dict[str, object]] = []
    room = MOST_PROMPT_CHARACTERS
    for role, text in reversed(texts):
        if room <= 0:
            break
        messages.insert(0, {"role": role, "parts": [{"type": "text", "content": text[-room:]}]})
        room -= len(text)
    return msgspec.json.encode(messages).decode()


def _operation(path: str) -> str:
    return OPERATIONS.get(path, "chat")


def _asked(request: Request) -> Attributes:
    """How `request` is to be answered, where that is not the usual."""
    sampling = request.sampling
    asked: dict[str, AttributeValue] = {
        f"gen_ai.request.{name}": value
        for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
        if (value := getattr(sampling, name)) != getattr(_USUAL, name)
    }
    if request.stream:
        asked["gen_ai.request.stream"] = True
    if sampling.choices != 1:
        asked["gen_ai.request.choice.count"] = sampling.choices
    if sampling.grammar is not None and sampling.grammar.form.startswith("json"):
        asked["gen_ai.output.type"] = "json"
    if request.session:
        asked["gen_ai.conversation.id"] = request.session
    return asked


def _used(usage: Usage) -> Attributes:
    used: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if usage.cache_write_tokens:
        used["gen_ai.usage.cache_creation.input_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens is not None:
        used["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return used
