"""HTTP, from a client's socket to a scripted backend and back."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import openai
import pytest

from policies.errors import BackendFailed, BackendRefused, InvalidRequest, Overloaded
from policies.nouns import Delta, Limits, TokenLogprob, Usage
from tests.router.parts import (
    CHAT,
    COMPLETIONS,
    CONTEXT_TOKENS,
    KEY,
    MODEL,
    Client,
    ScriptedBackend,
    a_chat,
    a_client,
    a_config,
    a_router,
    a_tenant,
    an_answer,
)
from tests.still import still


async def events_of(client: Client, path: str, body: dict[str, Any]) -> list[str]:
    async with client.post(path, {**body, "stream": True}) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        text = (await reply.read()).decode()
    return [event for event in text.split("\n\n") if event]


def contents(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]


async def test_a_chat_is_answered_whole_with_usage_and_where_it_went() -> None:
    async with a_router(ScriptedBackend(scripts=[an_answer("Hel", "lo")])) as router, a_client(router) as client:
        async with client.post(CHAT, a_chat()) as reply:
            body = await reply.json()
        assert reply.status == 200
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert body["usage"]["total_tokens"] == 9
        assert reply.headers["x-pointsman-backend"] == "b0"
        assert reply.headers["x-pointsman-class"] == "chat"
        assert reply.headers["x-pointsman-tenant"] == "acme"
        assert body["id"] == "chatcmpl-" + reply.headers["x-request-id"]


async def test_a_chat_is_streamed_piece_by_piece_and_ends_with_usage_and_done() -> None:
    async with a_router(ScriptedBackend(scripts=[an_answer("Hel", "lo")])) as router, a_client(router) as client:
        events = await events_of(client, CHAT, a_chat(stream_options={"include_usage": True}))
    chunks = contents(events)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert chunks[2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert events[-1] == "data: [DONE]"


async def test_each_chunk_has_the_usage_so_far_where_usage_and_that_are_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for asked in (options, {**options, "include_usage": False}):
        async with a_router(ScriptedBackend(scripts=[an_answer("Hel", "lo")])) as router, a_client(router) as client:
            chunks = contents(await events_of(client, CHAT, a_chat(stream_options=asked)))
        if not asked["include_usage"]:
            assert all("usage" not in chunk for chunk in chunks)
            continue
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2, 2]
        prompt = chunks[0]["usage"]["prompt_tokens"]
        assert prompt > 0
        assert all(
            each["total_tokens"] == prompt + each["completion_tokens"] for each in (c["usage"] for c in chunks[:3])
        )


async def test_the_official_client_streams_chats_and_reads_completions() -> None:
    backend = ScriptedBackend(scripts=[an_answer("a", "b"), an_answer("c")])
    async with (
        a_router(backend) as router,
        openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=5, seed=-1
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        whole = await client.completions.create(model=MODEL, prompt="once", echo=True)
        models = [model.id async for model in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'"):
            await client.chat.completions.create(model="tinny", messages=[{"role": "user", "content": "hi"}])
    assert "".join(pieces) == "ab"
    assert backend.requests[0].max_new_tokens == 5
    assert backend.requests[0].sampling.seed == 2**64 - 1
    assert whole.choices[0].text == "oncec"
    assert backend.requests[1].max_new_tokens == 16
    assert models == [MODEL]


async def test_several_prompts_and_choices_become_numbered_choices() -> None:
    def answers(name: str) -> list[Any]:
        pieces = [Delta(text=f"{name}{choice}", choice=choice, finish_reason="stop") for choice in range(2)]
        return [pieces[1], pieces[0], Delta(usage=Usage(5, 2, 1))]

    backend = ScriptedBackend(scripts=[answers("x"), answers("y")])
    async with a_router(backend) as router, a_client(router) as client:
        status, body = await client.answer(COMPLETIONS, {"model": MODEL, "prompt": ["one", "two"], "n": 2})
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "x0"),
        (1, "x1"),
        (2, "y0"),
        (3, "y1"),
    ]
    assert body["usage"]["prompt_tokens"] == 10
    assert len({request.id for request in backend.requests}) == 2
    assert [prompt.body["prompt"] for prompt in backend.prompts if prompt.body] == ["one", "two"]


@pytest.mark.parametrize(("prompt", "ids"), [([5, 6, 7], [5, 6, 7]), ([[5, 6, 7]], [5, 6, 7])])
async def test_a_prompt_of_token_ids_reaches_the_backend_as_it_is(prompt: Any, ids: list[int]) -> None:
    backend = ScriptedBackend()
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(COMPLETIONS, {"model": MODEL, "prompt": prompt})
    assert status == 200
    assert backend.prompts[0].token_ids == b"".join(token_id.to_bytes(4, "little") for token_id in ids)


async def test_what_a_client_sent_beyond_our_fields_reaches_the_backend() -> None:
    backend = ScriptedBackend(speaks_tokens=False)
    headers = {"traceparent": "00-1-2-01", "x-pointsman-session": "s1", "x-pointsman-priority": "batch"}
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_chat(vendor={"deep": [1.5, None]}), headers=headers)
    assert status == 200
    assert backend.prompts[0].body == a_chat(vendor={"deep": [1.5, None]})
    assert backend.prompts[0].headers == {"traceparent": "00-1-2-01"}
    assert backend.prompts[0].token_ids == b""
    assert (backend.requests[0].session, backend.requests[0].service_class) == ("s1", "batch")


async def test_logprobs_and_tool_calls_have_openais_shape() -> None:
    logprob = TokenLogprob(5, "é", -0.5, (TokenLogprob(5, "é", -0.5), TokenLogprob(6, "x", -1.0)))
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ":1}"}}
    script: list[Any] = [
        Delta(text="é", token_ids=(5,), logprobs=(logprob,)),
        Delta(message={"tool_calls": [call]}),
        Delta(message={"tool_calls": [rest]}, finish_reason="tool_calls", usage=Usage(1, 1)),
    ]
    backend = ScriptedBackend(scripts=[script, script, script])
    async with a_router(backend) as router, a_client(router) as client:
        _, chat = await client.answer(CHAT, a_chat(logprobs=True, top_logprobs=2))
        _, text = await client.answer(COMPLETIONS, {"model": MODEL, "prompt": "a", "logprobs": 2})
        streamed = contents(await events_of(client, CHAT, a_chat()))
    choice = chat["choices"][0]
    assert choice["logprobs"]["content"][0]["bytes"] == [195, 169]
    assert [top["token"] for top in choice["logprobs"]["content"][0]["top_logprobs"]] == ["é", "x"]
    function = {"name": "f", "arguments": '{"a":1}'}
    assert choice["message"]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert text["choices"][0]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5, "x": -1.0}],
        "text_offset": [0],
    }
    assert streamed[1]["choices"][0]["delta"]["tool_calls"] == [call]


async def test_a_backend_that_fails_before_the_first_token_is_replaced_unseen() -> None:
    failing: list[list[Any]] = [[BackendFailed("gone")], [Delta(computed_tokens=3), BackendFailed("gone")]]
    backends = [ScriptedBackend(f"b{i}", scripts=[failing[i]] if i < 2 else [an_answer("fine")]) for i in range(3)]
    async with a_router(*backends) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat())
        assert (status, body["choices"][0]["message"]["content"]) == (200, "fine")


async def test_no_other_backend_is_tried_once_the_client_has_seen_what_none_can_continue() -> None:
    broken: list[Any] = [
        Delta(text="half", message={"reasoning_content": "hm"}),
        BackendFailed("gone", hint="look there"),
    ]
    backends = [ScriptedBackend(f"b{i}", scripts=[list(broken)]) for i in range(2)]
    async with a_router(*backends) as router, a_client(router) as client:
        events = await events_of(client, CHAT, a_chat())
    assert contents(events)[0]["choices"][0]["delta"]["content"] == "half"
    error = contents(events)[-1]["error"]
    assert error["code"] == "backend_failed"
    assert (error["message"], error["hint"]) == (BackendFailed.masked_message, "try again")
    assert "data: [DONE]" not in events
    assert sum(len(backend.requests) for backend in backends) == 1


async def test_an_answer_that_is_not_streamed_starts_over_even_after_tokens() -> None:
    broken: list[Any] = [Delta(text="half", token_ids=(1,)), BackendFailed("gone")]
    backends = [ScriptedBackend(f"b{i}", scripts=[list(broken)]) for i in range(2)]
    backends.append(ScriptedBackend("b2", scripts=[an_answer("whole")] * 3))
    async with a_router(*backends) as router, a_client(router) as client:
        _, body = await client.answer(CHAT, a_chat())
    assert body["choices"][0]["message"]["content"] == "whole"


async def test_at_most_three_backends_are_tried() -> None:
    backends = [ScriptedBackend(f"b{i}", scripts=[[BackendFailed(f"b{i} is gone")]]) for i in range(5)]
    async with a_router(*backends) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat())
    assert (status, body["error"]["code"]) == (502, "backend_failed")
    assert sum(len(backend.requests) for backend in backends) == 3


async def test_a_refusal_of_the_backend_is_not_tried_elsewhere() -> None:
    backends = [ScriptedBackend(f"b{i}", scripts=[[BackendRefused("no")]]) for i in range(2)]
    async with a_router(*backends) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat())
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert sum(len(backend.requests) for backend in backends) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [[], [Delta(computed_tokens=1)], [Delta(text="a", token_ids=(1,))]])
async def test_a_client_that_hangs_up_cancels_the_backend(stream: bool, steps: list[Any]) -> None:
    backend = ScriptedBackend(scripts=[[*steps, asyncio.Event()]])
    async with a_router(backend) as router, a_client(router) as client:
        calling = asyncio.create_task(client.answer(CHAT, a_chat(stream=stream)))
        await backend.began.wait()
        calling.cancel()
        await asyncio.wait_for(backend.cancelled.wait(), 5)
        await asyncio.gather(calling, return_exceptions=True)
        assert await router.gateway.doors.emptied(5)
        text = router.telemetry.exposition()[0].decode()
    assert 'outcome="cancelled"' in text
    assert backend.open == 0


async def test_a_client_that_reads_slowly_holds_the_backend_back() -> None:
    release = asyncio.Event()
    piece = Delta(text="x" * 65536, token_ids=(1,))
    sent = 0

    class Counting(ScriptedBackend):
        async def generate(self, request: Any, prompt: Any) -> Any:
            nonlocal sent
            for _ in range(1000):
                sent += 1
                yield piece
                if sent == 2:
                    release.set()
            yield Delta(finish_reason="stop", usage=Usage(1, 1))

    async with a_router(Counting()) as router, a_client(router) as client:
        async with client.post(CHAT, a_chat(stream=True)) as reply:
            await reply.content.readany()
            await release.wait()
            held_at = await still(lambda: sent)
            reply.close()
        assert held_at < 900


async def test_a_long_prefill_is_reported_in_comments_at_most_once_a_second() -> None:
    time = [0.0]

    class Ticking(ScriptedBackend):
        async def generate(self, request: Any, prompt: Any) -> Any:
            for second in range(1, 8):
                time[0] += 0.5
                yield Delta(computed_tokens=second, expected_s=8.0 - second if second < 6 else None)
            for delta in an_answer("a"):
                yield delta

    async with a_router(Ticking(), clock=lambda: time[0]) as router, a_client(router) as client:
        events = await events_of(client, CHAT, a_chat())
    comments = [event for event in events if event.startswith(":")]
    assert [comment.split("/")[0] for comment in comments] == [": prefill 2", ": prefill 4", ": prefill 6"]
    assert ["first token in about" in comment for comment in comments] == [True, True, False]
    assert contents(events)[0]["choices"][0]["delta"]["content"] == "a"


BAD_BODIES: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"{", 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b'{"model": "\xff"}', 400, None),
    (CHAT, b"[" * 100_000, 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, {"model": MODEL}, 400, "messages"),
    (CHAT, a_chat(model=5), 400, "model"),
    (CHAT, a_chat(model="other"), 404, "model"),
    (CHAT, a_chat(messages=[]), 400, "messages"),
    (CHAT, a_chat(messages="hi"), 400, "messages"),
    (CHAT, a_chat(messages=[{"role": "", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, a_chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (CHAT, a_chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content[0]"),
    (CHAT, a_chat(messages=[{"role": "assistant", "content": "x"}]), 400, "messages"),
    (CHAT, a_chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, a_chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, a_chat(max_tokens="5"), 400, "max_tokens"),
    (CHAT, a_chat(max_tokens=2**70), 400, "max_tokens"),
    (CHAT, a_chat(max_tokens=CONTEXT_TOKENS), 400, "max_tokens"),
    (CHAT, a_chat("long " * CONTEXT_TOKENS), 400, "messages"),
    (CHAT, a_chat(temperature=3), 400, "temperature"),
    (CHAT, a_chat(top_p=-0.1), 400, "top_p"),
    (CHAT, a_chat(n=0), 400, "n"),
    (CHAT, a_chat(stop=["a"] * 17), 400, "stop"),
    (CHAT, a_chat(stop=[5]), 400, "stop[0]"),
    (CHAT, a_chat(seed=2**64), 400, "seed"),
    (CHAT, a_chat(logit_bias={"a": 1}), 400, "logit_bias"),
    (CHAT, a_chat(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, a_chat(tools=[{"type": "x"}]), 400, "tools[0].type"),
    (CHAT, a_chat(min_tokens=5, max_tokens=2), 400, "min_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a", 1]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a"] * 129}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [400]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [2**32]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [0] * CONTEXT_TOKENS}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "echo": True, "logprobs": 1}, 400, "echo"),
]


async def test_bad_input_gets_an_error_in_openais_shape_with_a_hint() -> None:
    async with a_router() as router, a_client(router) as client:
        for path, body, status, param in BAD_BODIES:
            data = body if isinstance(body, bytes) else json.dumps(body)
            got, reply = await client.answer(path, data=data)
            assert got == status, (body, reply)
            error = reply["error"]
            assert error["param"] == param, (body, reply)
            assert error["hint"]
            assert error["message"].endswith(f"({error['hint']})")
            assert {"message", "type", "param", "code"} <= set(error)
        assert 'outcome="rejected"' in router.telemetry.exposition()[0].decode()


async def test_the_code_for_a_prompt_beyond_the_context_is_openais() -> None:
    async with a_router() as router, a_client(router) as client:
        _, reply = await client.answer(CHAT, a_chat("long " * CONTEXT_TOKENS))
    assert reply["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer nope"}, {"authorization": "Basic x"}])
async def test_a_missing_or_wrong_key_is_refused(headers: dict[str, str]) -> None:
    async with a_router() as router, a_client(router) as client:
        for path in (CHAT, COMPLETIONS):
            status, body = await client.answer(path, a_chat(), key=None, headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        async with client.get("/v1/models", key=None) as reply:
            assert reply.status == 401


@pytest.mark.parametrize("header", [b"Authorization: Bearer ", b"X-API-Key: "])
async def test_a_key_of_bytes_that_are_no_text_is_a_wrong_one(header: bytes) -> None:
    async with a_router() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.http_url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + header + b"\xff\xfe\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        await writer.wait_closed()


async def test_a_key_may_come_as_x_api_key_and_is_not_needed_where_anonymous_requests_are_allowed() -> None:
    async with a_router() as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat(), key=None, headers={"x-api-key": KEY}))[0] == 200
    welcoming = a_config(a_tenant("guest", key=None), anonymous=a_tenant("guest", key=None))
    async with a_router(config=welcoming) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat(), key=None))[0] == 200
        assert (await client.answer(CHAT, a_chat(), key="whatever"))[0] == 200


async def test_a_body_beyond_the_limit_is_refused_in_openais_shape() -> None:
    async with a_router(config=a_config(max_body_bytes=10_000)) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat("x" * 200_000))
        assert (status, body["error"]["code"]) == (413, "request_too_large")


async def test_a_body_that_does_not_decompress_is_the_clients_mistake() -> None:
    async with a_router() as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, data=b"not gzip", headers={"content-encoding": "gzip"})
        assert status == 400


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip"])
async def test_an_unsupported_content_encoding_is_named(encoding: str) -> None:
    async with a_router() as router, a_client(router) as client:
        status, body = await client.answer(CHAT, data=b"{}", headers={"content-encoding": encoding})
    assert status == 400
    assert (encoding in body["error"]["message"], "gzip" in body["error"]["hint"]) == (True, True)


async def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    backend = ScriptedBackend(speaks_tokens=False)
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, data=b"\xef\xbb\xbf" + json.dumps(a_chat()).encode())
    assert status == 200
    native = backend.prompts[0].native
    assert native is not None
    assert native.raw == json.dumps(a_chat()).encode()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", f"did you mean '{CHAT}'?"),
        (f"/v1{CHAT}/", f"did you mean '{CHAT}'?"),
        (f"{CHAT}/", f"did you mean '{CHAT}'?"),
        ("/v1/message", "did you mean '/v1/messages'?"),
        ("/v1/prefixes/a/b", "did you mean '/v1/prefixes'?"),
        ("/v1/model", "did you mean '/v1/models'?"),
        ("/v1/images/generations", f"this router answers POST {CHAT}, "),
        ("/", f"this router answers POST {CHAT}, "),
    ],
)
async def test_the_error_for_an_unknown_path_names_the_likely_one(path: str, hint: str) -> None:
    async with a_router() as router, a_client(router) as client:
        status, body = await client.answer(path, a_chat())
    assert status == 404
    assert body["error"]["message"].startswith(f"there is no {path} here ({hint}")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
async def test_files_and_batches_need_a_section_of_the_file(path: str) -> None:
    async with a_router() as router, a_client(router) as client:
        status, body = await client.answer(path, {})
    assert (status, body["error"]["message"].partition(" (")[0]) == (404, "this router takes no files and batches")


async def test_the_error_for_a_wrong_method_names_the_right_ones() -> None:
    async with a_router() as router, a_client(router) as client:
        async with client.get(CHAT) as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert (await reply.json())["error"]["message"] == f"{CHAT} does not accept GET (it accepts POST)"
        async with client.post("/v1/prefixes/p") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "DELETE, GET, HEAD")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405), ("PUT", "/v1/models", 405)]
)
async def test_wrong_routes_and_methods_are_answered_in_openais_shape(method: str, path: str, status: int) -> None:
    async with (
        a_router() as router,
        a_client(router) as client,
        client.session.request(method, client.url + path) as reply,
    ):
        assert reply.status == status
        assert "error" in await reply.json()
        assert status != 405 or reply.headers["Allow"]


async def test_a_full_router_and_a_full_tenant_say_when_to_come_back() -> None:
    release = asyncio.Event()
    tenants = (a_tenant("acme", concurrent=1), a_tenant("labs", "labs-key"))
    backend = ScriptedBackend(scripts=[[release, *an_answer("a")], [release, *an_answer("b")]])
    config = a_config(*tenants, max_concurrent=2, max_queued=0)
    async with a_router(backend, config=config) as router, a_client(router) as client:
        first = asyncio.create_task(client.answer(CHAT, a_chat()))
        await backend.began.wait()
        async with client.post(CHAT, a_chat()) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (429, "rate_limit_exceeded")
            assert reply.headers["Retry-After"] == "1"
        backend.began.clear()
        second = asyncio.create_task(client.answer(CHAT, a_chat(), key="labs-key"))
        await backend.began.wait()
        status, body = await client.answer(CHAT, a_chat(), key="labs-key")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        release.set()
        assert [(await call)[0] for call in (first, second)] == [200, 200]


async def test_a_model_that_the_tenant_may_not_use_does_not_exist_for_it() -> None:
    async with a_router(config=a_config(a_tenant(models=frozenset({"other"})))) as router, a_client(router) as client:
        assert (await client.answer(CHAT, a_chat()))[0] == 404
        async with client.get("/v1/models") as reply:
            assert (await reply.json())["data"] == []


async def test_models_are_listed_and_found_one_by_one() -> None:
    async with a_router() as router, a_client(router) as client:
        async with client.get("/v1/models/tiny") as reply:
            entry = await reply.json()
        assert (entry["id"], entry["object"], entry["max_model_len"]) == (MODEL, "model", CONTEXT_TOKENS)
        async with client.get("/v1/models/a/b") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")


async def test_a_router_is_ready_once_each_pool_was_reached_and_alive_before() -> None:
    away = ScriptedBackend(well=False)
    async with a_router(away) as router, a_client(router) as client:
        async with client.get("/healthz", key=None) as reply:
            assert reply.status == 200
        async with client.get("/readyz", key=None) as reply:
            assert (reply.status, (await reply.json())["pools"]) == (503, {"own": "no healthy backend"})
        status, body = await client.answer(CHAT, a_chat())
        assert (status, body["error"]["code"]) == (503, "no_backend")
        assert re.search(
            r"b0: never reached for \d+ s \(.+\); try again when /readyz says 200", body["error"]["message"]
        )
        away.well = True
        assert await router.wait_until_reached(5)
        async with client.get("/readyz", key=None) as reply:
            assert reply.status == 200


async def test_metrics_have_requests_latencies_tokens_and_the_loop() -> None:
    async with a_router() as router, a_client(router) as client:
        await client.answer(CHAT, a_chat())
        text = router.telemetry.exposition()[0].decode()
    labels = 'service_class="chat",tenant="acme"'
    assert f'pointsman_requests_total{{outcome="finished",{labels}}} 1.0' in text
    assert f"pointsman_ttft_seconds_count{{{labels}}} 1.0" in text
    assert f'pointsman_tokens_total{{kind="cached",{labels}}} 3.0' in text
    assert 'pointsman_decisions_total{backend="b0",policy="default"} 1.0' in text
    assert 'pointsman_backend_in_flight{backend="b0"} 0.0' in text
    assert "pointsman_event_loop_lag_seconds_bucket" in text


async def test_an_unexpected_exception_is_a_500_without_details() -> None:
    backend = ScriptedBackend(scripts=[[RuntimeError("secret")]])
    async with a_router(backend) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat())
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(body)


async def test_errors_of_the_backend_about_the_request_keep_their_words() -> None:
    script = [InvalidRequest("`guided_regex` is broken", hint="mend it", param="guided_regex")]
    async with a_router(ScriptedBackend(scripts=[list(script)])) as router, a_client(router) as client:
        status, body = await client.answer(CHAT, a_chat())
    assert (status, body["error"]["param"]) == (400, "guided_regex")


async def test_a_router_that_shuts_down_lets_requests_finish_and_takes_no_more() -> None:
    release = asyncio.Event()
    backend = ScriptedBackend(scripts=[[release, *an_answer("done")]])
    async with asyncio.TaskGroup() as group, a_router(backend) as router, a_client(router) as client:
        call = group.create_task(client.answer(CHAT, a_chat()))
        await backend.began.wait()
        router.gateway.doors.close()
        status, body = await client.answer(CHAT, a_chat())
        assert (status, body["error"]["code"]) == (503, Overloaded.code)
        async with client.get("/readyz", key=None) as reply:
            assert (reply.status, reply.headers["Connection"]) == (503, "close")
        release.set()
        assert (await call)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decision_comes_with_the_answer_if_it_is_asked_for(stream: bool) -> None:
    async with a_router() as router, a_client(router) as client:
        bodies = []
        for headers in ({}, {"x-pointsman-explain": "1"}):
            async with client.post(CHAT, a_chat(stream=stream), headers=headers) as reply:
                bodies.append(await reply.text())
                why = reply.headers.get("x-pointsman-decision")
                assert (why is not None) is bool(headers)
    record = json.loads(str(why))
    assert (record["chosen"], record["rule"], record["tenant"], record["config_version"]) == ("b0", 1, "acme", "1")
    assert "decision" not in bodies[1]


async def test_a_refusal_comes_with_its_decision_too() -> None:
    async with a_router() as router, a_client(router) as client:
        router.gateway.cluster.drain("b0")
        router.gateway.dispatcher.follow(replace(router.gateway.config, outage_s=0.01))
        async with client.post(CHAT, a_chat(), headers={"x-pointsman-explain": "1"}) as reply:
            assert reply.status == 503
            assert json.loads(reply.headers["x-pointsman-decision"])["dropped"] == {"b0": "healthy"}


async def test_what_is_left_of_the_limits_stands_in_the_headers_of_answers_and_of_refusals() -> None:
    tenant = a_tenant(limits=Limits(requests_per_minute=2, tokens_per_minute=100_000))
    usage = Usage(prompt_tokens=40, completion_tokens=2, cached_tokens=30)
    backend = ScriptedBackend(scripts=[an_answer("a", usage=usage), an_answer("b")])
    async with a_router(backend, config=a_config(tenant)) as router, a_client(router) as client:
        async with client.post(CHAT, a_chat(max_tokens=10)) as reply:
            assert reply.status == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "2"
            assert reply.headers["x-ratelimit-remaining-requests"] == "1"
            assert reply.headers["x-ratelimit-limit-tokens"] == "100000"
        async with client.post(CHAT, a_chat(stream=True)) as reply:
            # of the first answer 10 prompt tokens were computed and 2 drawn; the rest was given back
            left = int(reply.headers["x-ratelimit-remaining-tokens"])
            assert 100_000 - 12 - 2000 < left <= 100_000 - 12
            assert reply.headers["x-ratelimit-remaining-requests"] == "0"
            await reply.read()
        async with client.post(CHAT, a_chat()) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"]) == (429, "rate_limit_exceeded")
            assert "tenant 'acme' has reached its limit of 2 requests a minute" in error["message"]
            assert 1 <= int(reply.headers["Retry-After"]) <= 30
            assert reply.headers["x-ratelimit-remaining-requests"] == "0"
            assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
