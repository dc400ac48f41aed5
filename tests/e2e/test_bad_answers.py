"""One bad answer hurts only its own request, and what is odd but harmless hurts none."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from http1.client import RACE_S
from router.start.app import Router
from tests.e2e.raw_engine import Ask, RawEngine, begun, routed, saying, served, until, whole
from tests.router.parts import KEY

PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
OK = json.dumps(ANSWER).encode()


def chunk(choice: bytes) -> bytes:
    return b'data: {"object":"chat.completion.chunk","model":"m2","choices":[' + choice + b"]}\n\n"


END = chunk(b'{"index":0,"delta":{},"finish_reason":"stop"}') + b"data: [DONE]\n\n"
ODD = {
    "-Infinity": chunk(
        b'{"index":0,"delta":{"content":"odd"},"logprobs":{"content":[{"token":"odd","logprob":-Infinity}]}}'
    ),
    "NaN": chunk(b'{"index":0,"delta":{"content":"odd"},"x":[NaN,{"y":Infinity}]}'),
    "null": chunk(b'{"index":0,"delta":{"content":"odd"},"logprobs":{"content":[{"token":"odd","logprob":null}]}}'),
    "half a pair": chunk(rb'{"index":0,"delta":{"content":"odd \ud83d"}}') + chunk(rb'{"delta":{"content":"\ude00"}}'),
    "half elsewhere": chunk(rb'{"index":0,"delta":{"content":"odd"},"token":"\ude00"}'),
    "no UTF-8": chunk(b'{"index":0,"delta":{"content":"odd \xf0\x9f"}}'),
    "logprobs": chunk(b'{"index":0,"delta":{"content":"odd"},"logprobs":{"content":[{"token":null,"logprob":"?"}]}}'),
    "token ids": chunk(b'{"index":0,"delta":{"content":"odd"},"token_ids":"none"}'),
    "usage": chunk(b'{"index":0,"delta":{"content":"odd"}}') + b'data: {"choices":[],"usage":{"prompt_tokens":-1}}\n\n',
    "no index": chunk(b'{"index":null,"delta":{"content":"odd"}}'),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("renamed", [False, True])
async def test_what_strict_json_lacks_is_no_fault_where_it_is_not_needed(path: str, odd: str, renamed: bool) -> None:
    engine = RawEngine(saying(begun() + ODD[odd] + END, closes=True))
    engine.models = engine.models.replace(b'"m"', b'"m2"') if renamed else engine.models
    pool = "" if not renamed else ", models: {m: m2}"
    async with served(engine), routed(engine, pool=pool) as (router, ask):
        status, body, _ = await ask(path=path, stream=True)
        assert status == 200
        assert b"odd" in body
        assert b"error" not in body.replace(b'"error":null', b"")
        router.check()


@pytest.mark.parametrize("path", PATHS[1:])
async def test_halves_of_a_character_in_two_pieces_are_joined_where_an_answer_is_translated(path: str) -> None:
    engine = RawEngine(saying(begun() + ODD["half a pair"] + END, closes=True))
    async with served(engine), routed(engine) as (router, ask):
        _, body, _ = await ask(path=path, stream=True)
        texts = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        assert any("\U0001f600" in json.dumps(json.loads(text), ensure_ascii=False) for text in texts)
        assert "\ufffd" not in body.decode()
        router.check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", [b"-Infinity", b"NaN", rb'"\ud83d"', b'"\xff"', b"null"])
async def test_the_same_of_an_answer_in_one_piece(path: str, odd: bytes) -> None:
    engine = RawEngine(saying(whole(OK[:-1] + b',"odd":' + odd + b"}")))
    async with served(engine), routed(engine) as (router, ask):
        status, body, _ = await ask(path=path)
        assert status == 200
        assert b"hi" in body
        router.check()


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions"])
@pytest.mark.parametrize("half", [rb"a \ud83d", rb"\ude00 b", rb"\ud83d\ud83d\ude00"])
async def test_half_a_character_in_a_request_becomes_the_one_that_is_unknown(path: str, half: bytes) -> None:
    engine = RawEngine(saying(whole(OK)))
    async with served(engine), routed(engine) as (router, ask):
        text = {"/v1/responses": b'"input":', "/v1/completions": b'"prompt":'}.get(path)
        given = (text + b'"%b"' % half) if text else b'"messages":[{"role":"user","content":"%b"}]' % half
        most = b"max_output_tokens" if path == "/v1/responses" else b"max_tokens"
        status, body, _ = await ask.send(b'{"model":"m","%b":4,%b}' % (most, given), path)
        assert status == 200, body
        (got,) = engine.bodies
        assert "\ufffd" in json.dumps(got, ensure_ascii=False)
        assert "\ud83d" not in json.dumps(got, ensure_ascii=False)
        router.check()


async def test_a_post_is_executed_once_for_each_try() -> None:
    executed = 0

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        nonlocal executed
        if "warm" in json.dumps(body):
            writer.write(whole(OK))
            return
        executed += 1
        # works, and drops the connection
        await asyncio.sleep(0.01)
        writer.close()

    engines = [RawEngine(says) for _ in range(3)]
    async with served(*engines), routed(*engines) as (router, ask):
        while not all(engine.bodies for engine in engines):
            await asyncio.gather(*(ask(f"warm {at}") for at in range(6)))
        assert (await ask("x"))[0] == 502
        assert executed <= 3
        router.check()


async def test_a_connection_that_lay_idle_costs_no_answer() -> None:
    """The only engine closes each connection after one answer, when the next request is on its way."""

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        if len(engine.bodies) % 2:
            writer.write(whole(OK))
        elif body["messages"][0]["content"] != "again":
            body["messages"][0]["content"] = "again"
            writer.close()
        else:
            writer.write(whole(OK))

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        for at in range(8):
            assert (await ask(f"question {at}"))[0] == 200
        assert not router.gateway.cluster.is_ill(next(iter(router.gateway.cluster.names())))
        router.check()


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 422, 429, 500])
@pytest.mark.parametrize("path", PATHS)
async def test_the_pools_key_is_never_shown(path: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-pool-SECRET/0123"
    caplog.set_level(logging.DEBUG)
    error = {"message": f"no: {key}", "type": "invalid_request_error", "param": key, "code": key}
    body = json.dumps({"error": error}).encode()
    reply = whole(body, status) if status != 200 else begun() + b"data: " + body + b"\n\n"
    engine = RawEngine(saying(reply, closes=status == 200))
    environment = {"POOL_KEY": key}
    async with served(engine), routed(engine, pool=', key: "${env:POOL_KEY}"', environment=environment) as (_, ask):
        shown = await ask(path=path, stream=status == 200)
        assert key in engine.keys[0]
        assert key.encode() not in shown[1]
        assert b"SECRET" not in shown[1]
        assert "SECRET" not in str(shown[2])
    assert "SECRET" not in caplog.text


SECRETS = {
    "OTHER_KEY": "sk-other-pool-0123",
    "HOOK": "https://hooks.example.com/services/T0/hook-0123",
    "SIGN": "signing-secret-0123",
}
SHOWN = list(SECRETS.values())


@pytest.mark.parametrize("status", [200, 400, 404, 500])
@pytest.mark.parametrize("path", PATHS)
async def test_no_secret_of_the_file_is_shown(path: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"error": {"message": f"no: {SHOWN}", "type": "invalid_request_error"}}).encode()
    reply = whole(body, status) if status != 200 else begun() + b"data: " + body + b"\n\n"
    engine, another = RawEngine(saying(reply, closes=status == 200)), RawEngine(saying(whole(OK)))
    more = 'alerts: {webhook: "${env:HOOK}", secret: "${env:SIGN}"}'
    async with served(engine, another):
        other = f', models: {{m: m}}}}, other: {{kind: openai_compatible, model: n, at: ["{another.url}"]'
        other += ', key: "${env:OTHER_KEY}"'
        async with routed(engine, pool=other, more=more, environment=SECRETS) as (_, ask):
            shown = await ask(path=path, stream=status == 200)
    for secret in SHOWN:
        assert secret.encode() not in shown[1]
        assert secret not in caplog.text


def text_chunk(text: str) -> bytes:
    return chunk(b'{"index":0,"delta":{"content":%b}}' % json.dumps(text).encode())


def charged(router: Router) -> tuple[int, int]:
    """Tokens of prompts and answers that tenants were charged with."""
    router.gateway.later.flush()
    found = dict.fromkeys(("prompt", "completion"), 0)
    for metric in router.gateway.observer.registry.collect():
        for sample in metric.samples:
            if sample.name == "pointsman_tokens_total" and sample.labels["kind"] in found:
                found[sample.labels["kind"]] += int(sample.value)
    return found["prompt"], found["completion"]


BUSY = b'data: {"error":{"message":"too many requests","type":"overloaded_error","code":429}}\n\n'
ERRED = b'data: {"error":{"message":"CUDA error","code":500}}\n\n'


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b"", "backend_failed"),
        (ERRED, "backend_failed"),
        (b"data: {broken\n\n", "backend_failed"),
        (BUSY, "overloaded"),
    ],
)
async def test_a_stream_that_breaks_off_names_the_cause(path: str, rest: bytes, code: str) -> None:
    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        writer.write(begun() + text_chunk("hello"))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(rest)
        await writer.drain()
        writer.close()

    engines = [RawEngine(says) for _ in range(2)]
    async with served(*engines), routed(*engines) as (router, ask):
        status, body, _ = await ask(path=path, stream=True)
        assert status == 200
        assert b"hello" in body
        last = body.strip().rpartition(b"\n\n")[2] if not body.strip().endswith(b"[DONE]") else body
        assert b"invalid_request" not in body
        assert b"can continue an answer" not in body
        word = {"backend_failed": b"api_error", "overloaded": b"overloaded_error"}[code]
        assert word in last or code.encode() in last
        router.check()


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_goes_on_behind_what_was_asked_for_is_ended(path: str) -> None:
    ended = asyncio.Event()

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        writer.write(begun())
        try:
            for at in range(100_000):
                writer.write(text_chunk(f"w{at} "))
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            ended.set()

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        status, body, _ = await ask(path=path, stream=True)
        assert status == 200
        assert b"w0 " in body
        assert b"w2000 " not in body, "some came with the same read"
        assert any(word in body for word in (b'"length"', b'"max_tokens"', b'"max_output_tokens"'))
        assert b'"error":{' not in body
        await asyncio.wait_for(ended.wait(), 10)
        router.check()


@pytest.mark.parametrize("count", [2, 100_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_were_not_asked_for_are_a_fault_of_the_backend(count: int, stream: bool) -> None:
    choice = {**ANSWER["choices"][0], "delta": {"content": "hi"}}  # type: ignore[index]
    many = json.dumps({**ANSWER, "choices": [choice] * count}).encode()
    reply = whole(many) if not stream else begun() + b"data: " + many + b"\n\n" + END
    engine = RawEngine(saying(reply, closes=stream))
    async with served(engine), routed(engine) as (router, ask):
        assert (await ask(stream=stream))[0] == 502
        router.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_usage_that_cannot_be_true_costs_what_was_asked_for(path: str, stream: bool) -> None:
    usage = {"prompt_tokens": 900_000_000, "completion_tokens": 500_000}
    body = json.dumps({**ANSWER, "usage": usage}).encode()
    told = b'data: {"object":"chat.completion.chunk","choices":[],"usage":%b}\n\n' % json.dumps(usage).encode()
    end = chunk(b'{"index":0,"delta":{},"finish_reason":"stop"}') + told + b"data: [DONE]\n\n"
    answers = {True: saying(begun() + text_chunk("hi") + end, closes=True), False: saying(whole(body))}

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, asked: Any) -> None:
        await answers[bool(asked.get("stream"))](engine, writer, asked)

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        assert (await ask(path=path, stream=stream))[0] == 200
        prompt_tokens, new_tokens = charged(router)
        assert new_tokens == 8
        assert prompt_tokens < 10_000
        router.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_leaves_before_the_answer_begins_pays_for_its_prompts(stream: bool, prompts: int) -> None:
    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        await asyncio.Event().wait()

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        text = "word " * 2000
        prompt: Any = text if prompts == 1 else [text] * prompts
        path = "/v1/completions"
        leaving = asyncio.create_task(ask(path=path, stream=stream, prompt=prompt))
        await until(lambda: len(engine.bodies) == prompts)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: not router.gateway.doors.inside)
        prompt_tokens, new_tokens = charged(router)
        assert prompt_tokens > 1000 * prompts
        assert new_tokens == 0
        router.check()


async def test_prompts_that_end_because_another_one_failed_cost_nothing() -> None:
    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        if body["prompt"] == "bad":
            await until(lambda: len(engine.bodies) == 2)
            writer.write(whole(b'{"error": {"message": "no"}}', 400))
        else:
            await asyncio.Event().wait()

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        status, _, _ = await ask(path="/v1/completions", prompt=["a long one", "bad"])
        assert status == 400
        assert charged(router) == (0, 0)
        router.check()


@asynccontextmanager
async def three(*engines: RawEngine) -> AsyncIterator[tuple[Router, Ask]]:
    """A router before `engines`, each of which has answered another tenant."""
    async with served(*engines), routed(*engines) as (router, ask):
        numbers = itertools.count()
        while not all(engine.bodies for engine in engines):
            await asyncio.gather(*(ask(f"warm {next(numbers)}", key="other-key") for _ in range(6)))
        for engine in engines:
            engine.bodies.clear()
        yield router, ask


async def closes(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def says_nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"{broken"))


async def says_no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")


async def is_a_broken_proxy(writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"upstream prematurely closed connection", 502))


async def breaks_off(writer: asyncio.StreamWriter) -> None:
    writer.write(OK_HEAD + b"{")
    await writer.drain()
    writer.close()


OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
FAULTS = [closes, says_nonsense, says_no_http, is_a_broken_proxy, breaks_off]


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_a_tenants_request_provokes_makes_no_backend_ill_and_is_not_sent_everywhere_again(
    fault: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        if "poison" in json.dumps(body):
            await fault(writer)
        else:
            writer.write(whole(OK))

    engines = [RawEngine(says) for _ in range(3)]
    async with three(*engines) as (router, ask):

        def poisoned() -> int:
            return sum("poison" in json.dumps(body) for engine in engines for body in engine.bodies)

        for number in range(12):
            failed, good = await asyncio.gather(ask(f"poison {number}"), ask(f"hello {number}", key="other-key"))
            # while a request of a tenant on probation runs, its others are refused
            assert failed[0] in (502, 503)
            assert good[0] == 200
            assert not any(map(router.gateway.cluster.is_ill, router.gateway.cluster.names()))
        assert poisoned() <= 3 * 12
        # it comes again, when the backends have served others
        for number in range(6):
            assert (await ask(f"fine {number}", key="other-key"))[0] == 200
        before = poisoned()
        assert (await ask("poison 0"))[0] in (502, 503)
        assert poisoned() - before <= 1
        # requests of a shape that cost backends their connections again and again go one at a time, after a pause
        other = "fine " * 99 if fault in (closes, breaks_off) else "fine"
        while (status := (await ask(other))[0]) == 503:  # noqa: ASYNC110 - its pause is not announced
            await asyncio.sleep(0.5)
        assert status == 200, "another request of that tenant, if need be after its pause"
        router.check()


async def test_a_request_that_kills_the_engines_which_begin_it_is_sent_to_no_third() -> None:
    """In an idle fleet, where nothing else shows whether the engines were well."""

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        # longer than a connection that lay idle can be one that was just closed
        await asyncio.sleep(1.5 * RACE_S)
        writer.close()

    engines = [RawEngine(says) for _ in range(3)]
    async with served(*engines), routed(*engines) as (router, ask):
        status, answer, _ = await ask("killer")
        assert status == 502
        assert b"change it" in answer
        assert sum(len(engine.bodies) for engine in engines) == 2
        assert (await ask("killer"))[0] == 502
        assert sum(len(engine.bodies) for engine in engines) == 2, "it is remembered"
        router.check()


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_innocent_request_is_answered_though_two_of_three_backends_are_broken_for_all(
    fault: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async def breaks(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        if "warm" in json.dumps(body):
            writer.write(whole(OK))
        else:
            await fault(writer)

    engines = [RawEngine(breaks), RawEngine(breaks), RawEngine(saying(whole(OK)))]
    async with three(*engines) as (router, ask):
        answers = await asyncio.gather(*(ask(f"question {at}", key=("other-key", KEY)[at % 2]) for at in range(24)))
        assert [status for status, _, _ in answers].count(200) >= 20, "at first that cannot be told apart"
        later = await asyncio.gather(*(ask(f"later {at}", key=("other-key", KEY)[at % 2]) for at in range(24)))
        assert all(status == 200 for status, _, _ in later)
        router.check()


@pytest.mark.parametrize("usage", ["{}", '"none"', '{"input_tokens": -1, "output_tokens": "many"}', "null"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_an_answer_without_a_usage_that_can_be_read_is_whole_and_charged_as_counted(
    path: str, usage: str
) -> None:
    text = "hello " * 20
    part = {"type": "text" if path == "/v1/messages" else "output_text", "text": text}
    message = {"type": "message", "role": "assistant", "id": "x", "content": [part]}
    if path == "/v1/messages":
        answer: dict[str, Any] = {**message, "model": "m", "stop_reason": "end_turn"}
    else:
        answer = {"object": "response", "id": "x", "model": "m", "status": "completed", "output": [message]}
    engine = RawEngine(saying(whole(json.dumps({**answer, "usage": json.loads(usage)}).encode())))
    names = ("model", "priority", "cache_salt", "kv_transfer_params", "request_id", "vllm_xargs")
    fields: dict[str, Any] = {name: {} for name in names}
    schema = {"content": {"application/json": {"schema": {"properties": fields}}}}
    engine.document = json.dumps({"paths": {path: {"post": {"requestBody": schema}}}}).encode()
    async with served(engine), routed(engine, kind="vllm") as (router, ask):
        most = {"max_output_tokens": 64} if path == "/v1/responses" else {"max_tokens": 64}
        status, body, _ = await ask("word " * 200, path=path, **most)
        assert status == 200, body
        assert b"hello" in body
        prompt_tokens, new_tokens = charged(router)
        assert prompt_tokens > 100
        assert new_tokens == 30
        assert not router.gateway.cluster.is_ill("own-0")
        router.check()
