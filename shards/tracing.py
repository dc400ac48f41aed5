"""Spans of a shard's work on each request, as children of the span that its router named in `Submit.trace`.

    generate (server)                       Submit -> the end of the last choice
      prefill                               Submit -> first token; event `computing`: the first slice is done
      decode                                first -> last token

Everything runs on the event loop, beside the engine's thread, and a step costs nothing while no request is traced. A
thread of the SDK exports the spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shards.nouns import Finished, FinishReason, Report, Submission
from shards.wire.otel import shut_down

_CONTEXT = TraceContextTextMapPropagator()
_BROKEN = frozenset({FinishReason.FAILED, FinishReason.REJECTED, FinishReason.DEADLINE})


@dataclass(slots=True)
class _Open:
    span: otel.Span
    context: Context
    prefill: otel.Span
    choices_left: int
    decode: otel.Span | None = None
    is_computing: bool = False
    ends: list[Finished] = field(default_factory=list)


class ShardTraces:
    """Makes spans with `provider`, which it owns. `wall_ns` returns the time of day in nanoseconds."""

    def __init__(self, provider: TracerProvider, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._provider, self._wall_ns = provider, wall_ns
        self._tracer = provider.get_tracer("pointsman.shard")
        self._open: dict[Hashable, _Open] = {}

    def __repr__(self) -> str:
        return f"<ShardTraces {len(self._open)} open>"

    def begin(self, submission: Submission, traceparent: str) -> None:
        """Begin a request with the router's span `traceparent` as its parent (W3C; empty if it has none)."""
        parent = _CONTEXT.extract({"traceparent": traceparent}, Context())
        attributes = {
            "pointsman.rank": submission.rank,
            "gen_ai.usage.input_tokens": submission.prompt_tokens,
            "gen_ai.request.max_tokens": submission.max_new_tokens,
        }
        now_ns = self._wall_ns()
        span = self._tracer.start_span(
            "generate", parent, kind=SpanKind.SERVER, attributes=attributes, start_time=now_ns
        )
        if span.is_recording():
            context = otel.set_span_in_context(span, Context())
            prefill = self._tracer.start_span("prefill", context, start_time=now_ns)
            self._open[submission.key] = _Open(span, context, prefill, submission.ends)

    def hear(self, report: Report) -> None:
        """Record a step."""
        if not self._open:
            return
        now_ns = self._wall_ns()
        for progress in report.progress:
            traced = self._open.get(progress.key)
            if traced is not None and not traced.is_computing:
                traced.is_computing = True
                cached = {"gen_ai.usage.cache_read.input_tokens": progress.cached_tokens}
                traced.prefill.add_event("computing", cached, now_ns)
        for drawn in report.drawn:
            traced = self._open.get(drawn.key)
            if traced is not None and traced.decode is None:
                traced.prefill.end(now_ns)
                traced.decode = self._tracer.start_span("decode", traced.context, start_time=now_ns)
        for end in report.finished:
            traced = self._open.get(end.key)
            if traced is not None:
                self._finish(traced, end, now_ns)

    def close(self) -> None:
        """Export the remaining spans. Blocks for five seconds at most."""
        shut_down(self._provider)

    def check(self) -> None:
        """Raise AssertionError if an ended request is still open here."""
        assert all(traced.choices_left > 0 for traced in self._open.values()), f"{self!r}: an ended request is left"

    def _finish(self, traced: _Open, end: Finished, now_ns: int) -> None:
        traced.choices_left -= 1
        traced.ends.append(end)
        if traced.choices_left:
            return
        del self._open[end.key]
        (traced.decode or traced.prefill).end(now_ns)
        broken = next((end for end in traced.ends if end.reason in _BROKEN), None)
        if broken is not None:
            traced.span.set_status(StatusCode.ERROR, broken.message or None)
            traced.span.set_attribute("error.type", broken.reason.value)
        traced.span.set_attributes(
            {
                "gen_ai.usage.output_tokens": sum(end.output_tokens for end in traced.ends),
                "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
                "gen_ai.response.finish_reasons": tuple(end.reason.value for end in traced.ends),
            }
        )
        traced.span.end(now_ns)
