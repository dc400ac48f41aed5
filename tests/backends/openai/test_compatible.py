from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from backends.http.exchange import Exchange
from backends.openai.answer import OpenAIAnswer
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.openai.passed import Ear, PassedStream
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLacks,
    BackendRefused,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import ACCEPTED, Delta, Native, Prompt, Request, Sampling, TokenLogprob, Usage
from tests.backends.parts import Taken, a_native_prompt, a_prompt, a_request, everything, text_of
from tests.backends.upstream import DONE, Upstream, a_chunk, an_upstream, event, used
from tests.shards.attached import eventually


@asynccontextmanager
async def a_backend(upstream: Upstream, **options: Any) -> AsyncIterator[OpenAICompatible]:
    backend = OpenAICompatible("up", upstream.url, pool="p", options=OpenAIOptions(**options))
    await backend.start()
    try:
        yield backend
        assert backend.open_requests == 0
    finally:
        await backend.close()


async def failure_of(backend: OpenAICompatible) -> ExpectedError:
    with pytest.raises(ExpectedError) as failure:
        await everything(backend)
    return failure.value


async def test_the_clients_own_body_goes_out_with_only_model_and_stream_changed() -> None:
    message = {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "mine",
        "messages": [message],
        "user": "u",
        "metadata": {"a": [1, None]},
        "vendor_field": {"deep": [1.5, "é"]},
        "stream": True,
        "stream_options": {"continuous_usage_stats": False},
    }
    async with an_upstream() as upstream, a_backend(upstream, models={"mine": "theirs"}, key="secret") as backend:
        prompt = Prompt(body=body, headers={"traceparent": "00-1-2-01"})
        await everything(backend, a_request(model="mine"), prompt)
        path, sent, headers = upstream.received[0]
    options = {"continuous_usage_stats": False, "include_usage": True}
    assert path == "/v1/chat/completions"
    assert sent == {**body, "model": "theirs", "stream_options": options}
    assert headers["authorization"] == "Bearer secret"
    assert headers["traceparent"] == "00-1-2-01"
    assert body["model"] == "mine", "the client's body is left as it was"


async def test_a_request_that_was_degraded_asks_for_the_model_that_it_means_now() -> None:
    raw = b'{"model":"large","messages":[],"stream":true}'
    prompt = a_native_prompt(raw)
    async with an_upstream() as upstream, a_backend(upstream) as backend:
        await everything(backend, a_request(model="small"), prompt)
        assert upstream.received[0][1]["model"] == "small"


async def test_a_chat_is_streamed_with_everything_beside_its_text() -> None:
    call = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    top = {"token": "Ho", "logprob": -2.0}
    logprobs = {"content": [{"token": "Hé", "logprob": -0.5, "top_logprobs": [top]}]}
    chunks = [
        a_chunk(role="assistant", content=""),
        event({"choices": [{"index": 0, "delta": {"content": "Hé"}, "logprobs": logprobs}]}),
        a_chunk(reasoning_content="hm"),
        a_chunk(tool_calls=call),
        a_chunk(None, "tool_calls"),
        used(7, 3, cached=4),
        DONE,
    ]
    async with an_upstream(pieces=chunks) as upstream, a_backend(upstream) as backend:
        assert await everything(backend) == [
            Delta(text="Hé", logprobs=(TokenLogprob(0, "Hé", -0.5, (TokenLogprob(0, "Ho", -2.0),)),)),
            Delta(message={"reasoning_content": "hm"}),
            Delta(message={"tool_calls": call}),
            Delta(finish_reason="tool_calls"),
            Delta(usage=Usage(7, 3, 4)),
        ]


async def test_text_completions_are_understood_too() -> None:
    logprobs = {"tokens": ["token_id:7", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"c": -2.0}]}
    choice = {"index": 1, "text": "ab", "logprobs": logprobs, "finish_reason": "length"}
    async with an_upstream(pieces=[event({"choices": [choice]}), DONE]) as upstream, a_backend(upstream) as backend:
        asked = a_request(sampling=Sampling(choices=2))
        deltas = await everything(backend, asked, prompt=a_prompt(path="/v1/completions"))
    assert deltas[0] == Delta(
        text="ab",
        choice=1,
        finish_reason="length",
        logprobs=(TokenLogprob(7, "token_id:7", 0.0), TokenLogprob(0, "b", -1.0, (TokenLogprob(0, "c", -2.0),))),
    )


async def test_ids_and_older_words_for_a_finish_are_understood() -> None:
    choice = {"index": 0, "text": "ab", "token_ids": [7, 8], "finish_reason": "eos_token"}
    async with an_upstream(pieces=[event({"choices": [choice]}), DONE]) as upstream, a_backend(upstream) as backend:
        deltas = await everything(backend, prompt=a_prompt(path="/v1/completions"))
    assert deltas[0] == Delta(text="ab", token_ids=(7, 8), finish_reason="stop")


async def test_usage_is_estimated_if_the_server_reports_none() -> None:
    async with (
        an_upstream(pieces=[a_chunk("a"), a_chunk("b", "stop"), DONE]) as upstream,
        a_backend(upstream) as backend,
    ):
        assert (await everything(backend, a_request(prompt_tokens=9)))[-1] == Delta(usage=Usage(9, 2, is_guess=True))


CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_what_was_asked_whole_is_asked_whole_of_the_server_however_often() -> None:
    message = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": [CALL]}
    usage = {"prompt_tokens": 3, "completion_tokens": 7}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    async with an_upstream(whole=json.dumps(answer).encode()) as upstream, a_backend(upstream) as backend:
        for _ in range(3):
            assert await everything(backend, prompt=Prompt(body={"model": "m", "messages": []})) == [
                Delta(text="Hi", finish_reason="stop", message={"tool_calls": [CALL]}, is_whole=True, tokens=7),
                Delta(usage=Usage(3, 7)),
            ]
        assert [sent for _, sent, _ in upstream.received] == [{"model": "m", "messages": []}] * 3
        assert backend.describe() is None or backend.describe().may_answer_whole  # type: ignore[union-attr]


async def test_token_ids_become_a_completion_where_there_is_no_body() -> None:
    async with an_upstream() as upstream, a_backend(upstream) as backend:
        sampling = Sampling(
            temperature=0.5,
            top_k=4,
            seed=1,
            stop=("x",),
            stop_token_ids=(2,),
            min_new_tokens=1,
            logit_bias={3: 1.0},
            top_logprobs=2,
        )
        asked = a_request(max_new_tokens=9, sampling=sampling, stream=True)
        await everything(backend, asked, Prompt(b"\x01\0\0\0\x02\0\0\0"))
        path, sent, _ = upstream.received[0]
    assert path == "/v1/completions"
    assert sent == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["x"],
        "logit_bias": {"3": 1.0},
        "seed": 1,
        "logprobs": 2,
        "top_k": 4,
        "stop_token_ids": [2],
        "min_tokens": 1,
    }


async def test_token_ids_are_refused_where_the_backend_takes_text_only() -> None:
    async with an_upstream() as upstream, a_backend(upstream, takes_token_ids=False) as backend:
        with pytest.raises(InvalidRequest, match="takes text"):
            await everything(backend, prompt=Prompt(b"\x01\0\0\0"))


async def test_a_body_that_is_no_json_is_the_clients_mistake() -> None:
    async with an_upstream() as upstream, a_backend(upstream) as backend:
        with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
            await everything(backend, prompt=Prompt(body={"model": "m", "user": object()}))


@pytest.mark.parametrize(
    ("status", "error", "kind", "message"),
    [
        (400, {"error": {"message": "bad top_p", "param": "top_p"}}, InvalidRequest, "bad top_p"),
        (422, {"detail": [{"msg": "no"}]}, InvalidRequest, "no"),
        (400, {"object": "error", "message": "This model's maximum context length is 10"}, ContextExceeded, "is 10"),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, ContextExceeded, "too long"),
        (404, {"error": {"message": "no such model"}}, BackendLacks, "no such model"),
        (403, {"error": "who are you"}, BackendLacks, "who are you"),
        (413, "too big", BackendRefused, "too big"),
        (429, {"error": {"message": "slow down"}}, Overloaded, "slow down"),
        (503, {"error": {"message": "full"}}, Overloaded, "full"),
        (408, None, BackendFailed, "408"),
        (529, {"message": "Overloaded"}, Overloaded, "Overloaded"),
        (424, {"message": "Request failed during generation"}, BackendErred, "during generation"),
        (500, {"error": {"message": "oops"}}, BackendErred, "oops"),
        (307, {}, BackendFailed, "307"),
    ],
)
async def test_each_status_has_its_error(status: int, error: object, kind: type[ExpectedError], message: str) -> None:
    async with (
        an_upstream(status=status, body=json.dumps(error).encode(), headers={"Retry-After": "7"}) as upstream,
        a_backend(upstream) as backend,
    ):
        failure = await failure_of(backend)
    assert type(failure) is kind
    assert message in failure.message
    assert failure.retryable == issubclass(kind, BackendFailed | BackendLacks)
    assert failure.retry_after_s == (7.0 if kind in (BackendErred, BackendFailed, Overloaded) else None)


async def test_a_server_that_is_away_without_a_time_to_come_back_has_failed() -> None:
    async with an_upstream(status=503, body=b"") as upstream, a_backend(upstream) as backend:
        assert type(await failure_of(backend)) is BackendFailed


async def test_an_error_body_that_is_not_json_is_passed_on_unchanged() -> None:
    async with an_upstream(status=502, body=b"<html>Bad \xff Gateway") as upstream, a_backend(upstream) as backend:
        assert "Bad \ufffd Gateway" in (await failure_of(backend)).message


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([a_chunk("a")], BackendErred, "without [DONE]"),
        ([b"data: {broken\n\n"], BackendErred, "nonsense"),
        ([b"data: [1]\n\n"], BackendErred, "nonsense"),
        ([event({"choices": [{"delta": [5]}]})], BackendErred, "nonsense"),
        ([event({"error": {"message": "out of memory"}})], BackendErred, "out of memory"),
        ([event({"error": "plain"})], BackendErred, "plain"),
        ([event({"error": {"message": "bad", "code": 400}})], InvalidRequest, "bad"),
        ([event({"error": {"message": "bad", "code": "422"}})], InvalidRequest, "bad"),
        ([event({"object": "error", "message": "flat", "code": 400})], InvalidRequest, "flat"),
        ([a_chunk("a"), a_chunk(None, "abort")], BackendErred, "broke the answer off (abort)"),
        ([b"data: " + b"x" * (5 << 20)], BackendErred, "longer than"),
    ],
)
async def test_a_stream_that_goes_wrong_has_its_error(
    pieces: list[bytes], kind: type[ExpectedError], message: str
) -> None:
    async with an_upstream(pieces=pieces) as upstream, a_backend(upstream) as backend:
        failure = await failure_of(backend)
    assert type(failure) is kind
    assert message in failure.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": [{"index": 1, "delta": {"content": "a"}}]},
        {"choices": [{"index": -1, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {"content": 5}}]},
    ],
)
def test_places_that_cannot_be_are_nonsense(wrong: dict[str, Any]) -> None:
    answer = OpenAIAnswer("up", a_request(), is_streamed=True)
    with pytest.raises(BackendFailed):
        list(answer.feed(b"data: " + json.dumps(wrong).encode() + b"\n\n"))


NO_USAGE: list[Any] = [
    *({"prompt_tokens": -5, "completion_tokens": 1}, {"prompt_tokens": 5, "completion_tokens": 1e308}),
    *({"prompt_tokens": "many"}, {"prompt_tokens": 5, "prompt_tokens_details": "none"}, [1], "none", 5, True),
    *({"prompt_tokens": 0, "completion_tokens": 0}, {"total_tokens": 6}),
]


@pytest.mark.parametrize("usage", NO_USAGE)
def test_a_usage_that_cannot_be_read_is_as_none(usage: Any) -> None:
    end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    said = a_chunk("a") + a_chunk(None, "stop") + end
    passed = PassedStream(Ear("up", 7), shows_usage=True)
    for answer in (OpenAIAnswer("up", a_request(prompt_tokens=7), is_streamed=True), passed):
        assert list(answer.feed(said))[-1].usage == Usage(7, 1, is_guess=True)


@pytest.mark.parametrize("logprobs", [[5], "none", {"content": [5]}, {"content": [{"token": None, "logprob": 0}]}])
@pytest.mark.parametrize("ids", ["none", [-1], [2**40], {"a": 1}])
def test_logprobs_and_ids_that_cannot_be_read_are_as_none(logprobs: Any, ids: Any) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": logprobs, "token_ids": ids}
    answer = OpenAIAnswer("up", a_request(), is_streamed=True)
    assert list(answer.feed(event({"choices": [choice]}))) == [Delta("a")]


async def test_a_whole_answer_that_is_too_large_is_refused() -> None:
    answer = OpenAIAnswer("up", a_request(), is_streamed=False, limit_bytes=10)
    with pytest.raises(BackendFailed, match="more than 10 bytes"):
        list(answer.feed(b"x" * 11))


async def test_silence_is_a_failure_and_a_deadline_is_the_clients() -> None:
    async with an_upstream(pieces=[a_chunk("a"), None]) as upstream:
        async with a_backend(upstream, idle_s=0.05) as backend:
            assert type(await failure_of(backend)) is BackendErred
        async with a_backend(upstream) as backend:
            with pytest.raises(DeadlineExceeded):
                await everything(backend, a_request(deadline_s=0.05))


async def test_closing_the_iterator_closes_the_connection() -> None:
    async with an_upstream(pieces=[a_chunk("a"), None]) as upstream, a_backend(upstream) as backend:
        async with aclosing(backend.generate(a_request(), a_prompt())) as deltas:
            assert await anext(deltas) is ACCEPTED, "the head of the answer came"
            assert (await anext(deltas)).text == "a"
            assert upstream.open_requests == 1
        await eventually(lambda: upstream.open_requests == 0)


async def test_closing_the_backend_ends_a_request_that_has_no_answer_yet() -> None:
    async with an_upstream(is_mute=True) as upstream, a_backend(upstream) as backend:
        asking = asyncio.create_task(everything(backend))
        await eventually(lambda: upstream.open_requests == 1)
        await backend.close()
        with pytest.raises(BackendFailed):
            await asyncio.wait_for(asking, 5)
        await eventually(lambda: upstream.open_requests == 0)


async def test_a_finished_answers_connection_is_used_again() -> None:
    async with an_upstream() as upstream, a_backend(upstream) as backend:
        for _ in range(3):
            assert text_of(await everything(backend)) == "Hello"
        assert backend.client._http is not None
        assert repr(backend.client._http).endswith("1 connections, 1 idle>")


async def test_a_server_that_keeps_the_stream_open_after_done_does_not_hold_the_answer_up() -> None:
    async with an_upstream(pieces=[a_chunk("a", "stop"), DONE, None]) as upstream, a_backend(upstream) as backend:
        async with asyncio.timeout(2):
            assert text_of(await everything(backend)) == "a"


async def test_names_and_context_are_learnt_from_the_probe() -> None:
    async with an_upstream() as upstream, a_backend(upstream, models={"alias": "m", "other": "x"}) as backend:
        assert backend.describe() is not None, "configured names are known at once"
        await backend.probe()
        described = backend.describe()
    assert described is not None
    assert described.models == {"alias"}
    assert described.context_tokens == 4096
    assert not described.speaks_tokens


async def test_nothing_is_known_before_the_first_probe() -> None:
    async with an_upstream() as upstream, a_backend(upstream, max_requests=3) as backend:
        assert backend.describe() is None
        assert backend.load().max_requests == 3
        assert backend.assets() == {}


@pytest.mark.parametrize(("models", "status"), [({"data": 5}, 200), ({}, 200), ({}, 500)])
async def test_a_probe_that_is_answered_with_nonsense_fails(models: object, status: int) -> None:
    async with an_upstream(models=models, models_status=status) as upstream, a_backend(upstream) as backend:
        with pytest.raises(BackendFailed):
            await backend.probe()


def test_the_url_may_end_in_v1() -> None:
    backend = OpenAICompatible("up", "http://host:1/v1/", pool="p")
    assert backend.url == "http://host:1"
    assert "secret" not in repr(OpenAIOptions(key="secret"))


@pytest.mark.parametrize("size", [100, 1_000_000])
async def test_a_large_request_is_made_in_a_thread(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def exchange(backend: OpenAICompatible, request: Request, prompt: Prompt) -> Exchange:
        threads.append(threading.get_ident())
        return made(backend, request, prompt)

    made = OpenAICompatible.exchange
    monkeypatch.setattr(OpenAICompatible, "exchange", exchange)
    body = {"model": "mine", "messages": [{"role": "user", "content": "a" * size}], "stream": True}
    prompt = Prompt(body=body, native=Native("/v1/chat/completions", body, json.dumps(body).encode()))
    async with an_upstream() as upstream, a_backend(upstream, models={"mine": "theirs"}) as backend:
        request, taken = a_request(model="mine", stream=True), Taken()
        streamed = await everything(backend, request, prompt)
        await backend.relay(request, prompt, taken)
        assert text_of(taken.deltas) == text_of(streamed)
        for _, received, _ in upstream.received:
            assert received["messages"] == body["messages"]
            assert received["model"] == "theirs"
    assert (threads == [threading.get_ident()] * 2) == (size == 100)


async def test_large_requests_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    def exchange(backend: OpenAICompatible, request: Request, prompt: Prompt) -> Exchange:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return made(backend, request, prompt)

    made = OpenAICompatible.exchange
    monkeypatch.setattr(OpenAICompatible, "exchange", exchange)
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * 1_000_000}], "stream": True}
    prompt = Prompt(body=body, native=Native("/v1/chat/completions", body, json.dumps(body).encode()))
    async with an_upstream() as upstream, a_backend(upstream) as backend:
        await asyncio.gather(*(everything(backend, a_request(stream=True), prompt) for _ in range(4)))
        assert len(upstream.received) == 4
    assert most == 1
