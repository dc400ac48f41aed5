"""One call is one trace: every span with its parent, its times and its attributes, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from policies.errors import BackendFailed
from policies.nouns import Capability, Delta, Usage
from router.operate.telemetry.spans import MOST_PROMPT_CHARACTERS, input_messages
from tests.router.operate.telemetry.traced import CLIENT_SPAN, TRACE, TRACEPARENT, tracing_to_a_collector
from tests.router.parts import CHAT, COMPLETIONS, MODEL, ScriptedBackend, a_chat, a_client, a_router, an_answer
from tests.standins.collector import Collector


async def asked(
    monkeypatch: pytest.MonkeyPatch,
    *backends: ScriptedBackend,
    path: str = CHAT,
    body: Any = None,
    key: str | None = "acme-key",
    headers: dict[str, str] | None = None,
    **environment: str,
) -> tuple[Collector, int]:
    """The collector with the spans of one call, and the call's status."""
    async with tracing_to_a_collector(monkeypatch, **environment) as (tracing, collector, stack):
        async with (
            a_router(*backends, tracing=tracing) as router,
            a_client(router) as client,
            client.post(path, body or a_chat(), headers=headers or {}, key=key) as reply,
        ):
            status = reply.status
            await reply.read()
        await stack.aclose()
        return collector, status


async def test_a_call_has_a_span_with_children_for_queue_decision_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(scripts=[an_answer("a", "b", usage=Usage(20, 2, 8))])
    collector, _ = await asked(monkeypatch, backend, headers={"traceparent": TRACEPARENT})
    call = collector.span(f"chat {MODEL}", "server")
    assert (call.trace_id, call.parent_id) == (TRACE, CLIENT_SPAN)
    assert [child.name for child in collector.children(call)] == ["queue", "decide", f"chat {MODEL}"]
    attempt = collector.span(f"chat {MODEL}", "client")
    assert [child.name for child in collector.children(attempt)] == ["prefill", "decode"]
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len(collector.spans) == 6
    assert all(span.start_ns <= span.end_ns for span in collector.spans)
    queue, decide, prefill, decode = (collector.span(name) for name in ("queue", "decide", "prefill", "decode"))
    assert call.start_ns <= queue.start_ns <= decide.start_ns <= decide.end_ns <= prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert decode.end_ns <= attempt.end_ns <= call.end_ns


async def test_spans_have_the_request_the_usage_and_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(scripts=[an_answer("a", "b", usage=Usage(20, 2, 8))])
    collector, _ = await asked(monkeypatch, backend, body=a_chat(max_tokens=5))
    used = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    call = collector.span(f"chat {MODEL}", "server").attributes
    assert len(call.pop("pointsman.request")) == 24
    assert call == {
        **used,
        "pointsman.tenant": "acme",
        "pointsman.service_class": "chat",
        "pointsman.rule": 1,
        "pointsman.outcome": "finished",
    }
    assert collector.span(f"chat {MODEL}", "client").attributes == {
        **used,
        "gen_ai.provider.name": "fake",
        "gen_ai.request.max_tokens": 5,
        "server.address": "b0.test",
        "server.port": 8000,
        "pointsman.backend": "b0",
        "pointsman.pool": "own",
        "pointsman.attempt": 1,
    }
    decide = collector.span("decide").attributes
    assert (decide["pointsman.backend"], decide["pointsman.policy"], decide["pointsman.looks"]) == ("b0", "default", 1)
    assert collector.span("queue").attributes["pointsman.queue_seconds"] >= 0
    assert collector.resources[0]["service.name"] == "pointsman"


CONVENTIONS = frozenset(
    f"gen_ai.{name}"
    for name in (
        *("operation.name", "provider.name", "request.model", "request.max_tokens", "request.choice.count"),
        *("request.temperature", "request.top_k", "request.top_p", "request.frequency_penalty"),
        *("request.presence_penalty", "request.seed", "request.stream", "output.type", "conversation.id"),
        *("response.finish_reasons", "response.time_to_first_chunk", "usage.input_tokens", "usage.output_tokens"),
        *("usage.cache_read.input_tokens", "usage.cache_creation.input_tokens", "usage.reasoning.output_tokens"),
        "input.messages",
    )
)
"""Attributes of `gen_ai.inference.client` that the router tells. Source: open-telemetry/semantic-conventions-genai,
`model/gen-ai/spans.yaml`, 2026-11."""


async def test_spans_have_the_attributes_of_the_conventions_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(20, 9, 8, reasoning_tokens=4, cache_write_tokens=5)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "presence_penalty": 1, "frequency_penalty": 1}
    shaped = {"response_format": {"type": "json_object"}, "stream": True, "max_tokens": 9}
    backend = ScriptedBackend(scripts=[an_answer("a", "b", usage=usage)], capabilities=frozenset(Capability))
    headers = {"x-pointsman-session": "s-1"}
    collector, _ = await asked(monkeypatch, backend, body=a_chat(**sampling, **shaped), headers=headers)
    attempt = collector.span(f"chat {MODEL}", "client").attributes
    expected = {f"gen_ai.request.{name}": value for name, value in sampling.items()}
    expected |= {"gen_ai.request.stream": True, "gen_ai.output.type": "json", "gen_ai.conversation.id": "s-1"}
    expected |= {"gen_ai.usage.reasoning.output_tokens": 4, "gen_ai.usage.cache_creation.input_tokens": 5}
    assert {name: attempt.get(name) for name in expected} == expected
    assert attempt["gen_ai.response.time_to_first_chunk"] >= 0
    told = {name for span in collector.spans for name in span.attributes if name.startswith("gen_ai.")}
    assert told <= CONVENTIONS


async def test_no_span_says_anything_of_the_prompt_or_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(scripts=[an_answer("SECRET-ANSWER")])
    collector, _ = await asked(monkeypatch, backend, body=a_chat("SECRET-PROMPT", user="SECRET-USER"))
    assert len(collector.spans) == 6
    assert "SECRET" not in repr(collector.spans)


async def test_recorded_prompts_keep_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "a" * MOST_PROMPT_CHARACTERS
    body = a_chat(messages=[{"role": "system", "content": "SECRET"}, {"role": "user", "content": prompt[:-3]}])
    capture = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    collector, _ = await asked(monkeypatch, body=body | {"max_tokens": 5}, **capture)
    recorded = collector.span(f"chat {MODEL}", "server").attributes["gen_ai.input.messages"]
    system, user = json.loads(recorded)
    assert system == {"role": "system", "parts": [{"type": "text", "content": "RET"}]}
    assert user == {"role": "user", "parts": [{"type": "text", "content": prompt[:-3]}]}


def test_prompts_of_token_ids_are_left_out_of_spans() -> None:
    assert json.loads(input_messages([b"\1\0\0\0", "text"])) == [
        {"role": "user", "parts": [{"type": "text", "content": "text"}]}
    ]


async def test_backends_get_the_context_of_their_own_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend()
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    collector, _ = await asked(monkeypatch, backend, headers=headers)
    attempt = collector.span(f"chat {MODEL}", "client")
    assert backend.prompts[0].headers == {"traceparent": f"00-{TRACE}-{attempt.id}-01", "tracestate": "vendor=1"}


async def test_a_retry_is_a_sibling_with_a_queue_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # whichever is asked takes the next script
    scripts = [[BackendFailed("no", hint="is it up?")], [BackendFailed("no", hint="is it up?")], an_answer("x")]
    backends = [ScriptedBackend(name, scripts=scripts) for name in ("b0", "b1", "b2")]
    collector, status = await asked(monkeypatch, *backends)
    attempts = [span for span in collector.named(f"chat {MODEL}") if span.kind == "client"]
    call = collector.span(f"chat {MODEL}", "server")
    assert status == 200
    assert {attempt.attributes["pointsman.backend"] for attempt in attempts} == {"b0", "b1", "b2"}
    assert [attempt.attributes["pointsman.attempt"] for attempt in attempts] == [1, 2, 3]
    assert [attempt.is_error for attempt in attempts] == [True, True, False]
    assert [attempt.status_message for attempt in attempts] == ["no (is it up?)", "no (is it up?)", ""]
    assert all(attempt.parent_id == call.id for attempt in attempts)
    assert all(attempt.attributes["error.type"] == "backend_failed" for attempt in attempts[:-1])
    assert len(collector.named("queue")) == len(collector.named("decide")) == 3
    assert not call.is_error


async def test_a_call_that_was_refused_before_anything_has_one_span_with_the_clients_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector, status = await asked(monkeypatch, key="wrong", headers={"traceparent": TRACEPARENT})
    (span,) = collector.spans
    assert status == 401
    assert (span.name, span.parent_id, span.is_error) == ("request", CLIENT_SPAN, False)
    assert (span.attributes["pointsman.outcome"], span.attributes["error.type"]) == ("rejected", "invalid_api_key")


async def test_the_span_of_a_prompt_without_a_backend_has_its_queue_and_the_last_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector, status = await asked(monkeypatch, body=a_chat(response_format={"type": "json_object"}))
    assert status == 400
    call = collector.span(f"chat {MODEL}", "server")
    assert [child.name for child in collector.children(call)] == ["queue", "decide"]
    assert collector.span("queue").attributes["error.type"] == call.attributes["error.type"]
    assert "pointsman.backend" not in collector.span("decide").attributes


async def test_several_prompts_of_one_call_are_side_by_side_in_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": MODEL, "prompt": ["one", "two"]}
    collector, _ = await asked(monkeypatch, path=COMPLETIONS, body=body)
    name = f"text_completion {MODEL}"
    call = collector.span(name, "server")
    names = sorted(child.name for child in collector.children(call))
    assert names == ["decide", "decide", "queue", "queue", name, name]
    assert call.attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]


async def test_a_client_that_goes_away_leaves_a_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = ScriptedBackend(scripts=[[Delta(text="a"), asyncio.Event()]])
    async with tracing_to_a_collector(monkeypatch) as (tracing, collector, stack):
        async with a_router(stuck, tracing=tracing) as router, a_client(router) as client:
            async with client.post(CHAT, a_chat(stream=True)) as reply:
                await reply.content.readany()
            await stuck.cancelled.wait()
        await stack.aclose()
    attempt = collector.span(f"chat {MODEL}", "client")
    assert [child.name for child in collector.children(attempt)] == ["prefill", "decode"]
    assert collector.span(f"chat {MODEL}", "server").attributes["pointsman.outcome"] == "cancelled"
    assert not any(span.is_error for span in collector.spans)


async def test_the_sampler_of_the_environment_decides_and_backends_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend()
    collector, _ = await asked(monkeypatch, backend, OTEL_TRACES_SAMPLER="always_off")
    assert collector.spans == []
    flags = int(backend.prompts[0].headers["traceparent"].rpartition("-")[2], 16)
    assert not flags & 1


async def test_the_clients_word_on_sampling_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend()
    headers = {"traceparent": TRACEPARENT[:-2] + "00"}
    collector, _ = await asked(monkeypatch, backend, headers=headers)
    assert collector.spans == []
    assert backend.prompts[0].headers["traceparent"].startswith(f"00-{TRACE}-")


async def test_a_service_name_from_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_SERVICE_NAME": "llm", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    collector, _ = await asked(monkeypatch, **environment)
    assert {span.service for span in collector.spans} == {"llm"}
    assert collector.resources[0]["deployment.environment.name"] == "test"
