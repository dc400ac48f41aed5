"""gRPC, from a client's channel to a scripted backend and back."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Delta, Outcome, TokenLogprob, Usage
from policies.sla.config import Config
from router.protocols.explanations import MOST_HEADER_BYTES
from router.protocols.grpc import server
from router.protocols.grpc.server import _Streaming, abort
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from router.start.app import Router
from tests.router.parts import CONTEXT_TOKENS, KEY, MODEL, ScriptedBackend, a_config, a_router, an_answer
from tls.grpc_port import grpc_server

METADATA = (("authorization", f"Bearer {KEY}"),)


@asynccontextmanager
async def a_stub(*backends: ScriptedBackend, config: Config | None = None) -> AsyncIterator[tuple[Any, Router]]:
    async with a_router(*backends, config=config or a_config(grpc="127.0.0.1:0")) as router:
        assert router.grpc_address is not None
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
            yield stub, router


def a_chat(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    messages = pb.Messages(messages=[pb.Message(role="user", content=text)])
    return pb.GenerateRequest(model=MODEL, chat=messages, **fields)


async def test_an_answer_is_streamed_with_its_placement_first_and_usage_last() -> None:
    logprob = TokenLogprob(5, "a", -0.5, (TokenLogprob(6, "b", -1.0),))
    script: list[Any] = [
        Delta(computed_tokens=4),
        Delta(text="a", token_ids=(5,), logprobs=(logprob,)),
        *an_answer("b", usage=Usage(7, 2, 4)),
    ]
    async with a_stub(ScriptedBackend(scripts=[script])) as (stub, _):
        replies = [reply async for reply in stub.Generate(a_chat(), metadata=METADATA)]
    assert replies[0].progress.computed_tokens == 4
    assert replies[0].progress.prompt_tokens > 4
    assert replies[1].placement.backend == "b0"
    assert replies[1].placement.service_class == "chat"
    assert replies[1].token_ids == b"\x05\0\0\0"
    assert replies[1].logprobs[0].top[0].token == "b"
    assert not any(reply.HasField("placement") for reply in replies[2:])
    assert "".join(reply.text for reply in replies) == "ab"
    assert replies[-1].finish_reason == "stop"
    assert replies[-1].usage.cached_tokens == 4


@pytest.mark.parametrize("asked", [a_chat(), pb.GenerateRequest(model=MODEL, prompt="abc")], ids=["chat", "text"])
async def test_a_backend_is_asked_for_a_stream_and_not_for_an_answer_in_its_own_bytes(asked: Any) -> None:
    backend = ScriptedBackend()
    async with a_stub(backend) as (stub, _):
        assert [reply async for reply in stub.Generate(asked, metadata=METADATA)]
    assert backend.requests[0].stream
    assert backend.prompts[0].native is None


async def test_a_message_without_a_model_means_the_only_one() -> None:
    unnamed, counted = a_chat(), pb.CountTokensRequest(prompt="abc")
    unnamed.model = ""
    async with a_stub(ScriptedBackend()) as (stub, _):
        assert [reply async for reply in stub.Generate(unnamed, metadata=METADATA)]
        assert (await stub.Complete(unnamed, metadata=METADATA)).answers
        assert (await stub.CountTokens(counted, metadata=METADATA)).tokens
    async with a_stub(ScriptedBackend(), ScriptedBackend("b1", model="other")) as (stub, _):
        for method, message in ((stub.Complete, unnamed), (stub.CountTokens, counted)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await method(message, metadata=METADATA)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_whole_answer_has_every_choice() -> None:
    script: list[Any] = [
        Delta(text="x", choice=1, token_ids=(9,), finish_reason="length"),
        Delta(text="y", choice=0, finish_reason="stop", usage=Usage(3, 2)),
    ]
    backend = ScriptedBackend(scripts=[script])
    sampling = pb.Sampling(choices=2, max_tokens=9, temperature=0, stop=["."], logit_bias={7: 1.5}, seed=3)
    async with a_stub(backend) as (stub, _):
        reply = await stub.Complete(a_chat(sampling=sampling, session="s", priority="batch"), metadata=METADATA)
    assert [(answer.text, answer.finish_reason) for answer in reply.answers] == [("y", "stop"), ("x", "length")]
    assert reply.answers[1].token_ids == b"\x09\0\0\0"
    assert reply.usage.completion_tokens == 2
    assert reply.placement.tenant == "acme"
    request = backend.requests[0]
    assert (request.max_new_tokens, request.session, request.service_class) == (9, "s", "batch")
    assert request.sampling.logit_bias == {7: 1.5}
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.seed) == (0, (".",), 3)


@pytest.mark.parametrize("fields", [{"prompt": "abc"}, {"token_ids": b"\x05\0\0\0\x06\0\0\0"}])
async def test_text_and_token_ids_are_prompts_too(fields: dict[str, Any]) -> None:
    backend = ScriptedBackend()
    async with a_stub(backend) as (stub, _):
        await stub.Complete(pb.GenerateRequest(model=MODEL, **fields), metadata=METADATA)
    ids = backend.prompts[0].token_ids
    assert ids == fields.get("token_ids", ids)
    assert backend.requests[0].max_new_tokens == CONTEXT_TOKENS - len(ids) // 4


async def test_tokens_are_counted_and_models_listed() -> None:
    backend = ScriptedBackend()
    async with a_stub(backend) as (stub, _):
        chat = a_chat("hello there")
        counted = await stub.CountTokens(pb.CountTokensRequest(model=MODEL, chat=chat.chat), metadata=METADATA)
        await stub.Complete(chat, metadata=METADATA)
        models = (await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)).models
    assert counted.tokens == backend.requests[0].prompt_tokens
    assert [(model.id, model.context_tokens, model.backends) for model in models] == [(MODEL, CONTEXT_TOKENS, 1)]


def a_call_to_answer(tool_calls_json: str) -> pb.GenerateRequest:
    messages = [
        pb.Message(role="user", content="Weather?"),
        pb.Message(role="assistant", tool_calls_json=tool_calls_json),
        pb.Message(role="tool", content="wet", tool_call_id="c1", name="weather"),
    ]
    return pb.GenerateRequest(model=MODEL, chat=pb.Messages(messages=messages))


async def test_tool_calls_go_in_and_out() -> None:
    begun = {"index": 0, "id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"a"'}}
    script: list[Any] = [
        Delta(message={"reasoning_content": "Hm."}),
        Delta(message={"tool_calls": [begun]}),
        Delta(message={"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        Delta(finish_reason="tool_calls", usage=Usage(1, 1)),
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    backend = ScriptedBackend(scripts=[list(script), list(script)])
    async with a_stub(backend) as (stub, _):
        request = a_call_to_answer(json.dumps([call]))
        whole = await stub.Complete(request, metadata=METADATA)
        streamed = [reply async for reply in stub.Generate(request, metadata=METADATA)]
    (answer,) = whole.answers
    (called,) = answer.tool_calls
    assert (called.id, called.name, called.arguments) == ("c2", "weather", '{"a":1}')
    assert (answer.reasoning, answer.finish_reason) == ("Hm.", "tool_calls")
    pieces = [piece for reply in streamed for piece in reply.tool_calls]
    assert [(piece.id, piece.arguments) for piece in pieces] == [("c2", '{"a"'), ("", ":1}")]
    assert "".join(reply.reasoning for reply in streamed) == "Hm."
    body = backend.prompts[0].body
    assert body is not None
    assert body["messages"][1]["tool_calls"] == [call]
    assert body["messages"][2] == {"role": "tool", "content": "wet", "tool_call_id": "c1", "name": "weather"}


async def test_documents_are_written_into_the_prompt_and_their_order_is_told() -> None:
    backend = ScriptedBackend()
    documents = [{"id": "fox", "text": "quick"}, {"id": "dog", "text": "lazy"}, {"id": "fox", "text": "quick"}]
    async with a_stub(backend) as (stub, _):
        asked = a_chat(documents_json=json.dumps(documents), document_order="any after 1")
        reply = await stub.Complete(asked, metadata=METADATA)
    assert [*reply.placement.documents] == ["fox", "dog"]
    body = backend.prompts[0].body
    assert body is not None
    assert body["messages"][0]["content"].startswith("Documents:\n\nDocument fox\nquick\n\nDocument dog\nlazy")


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "metadata", "status", "code"),
    [
        (a_chat(), (), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        (a_chat(), (("x-api-key", "wrong"),), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        (pb.GenerateRequest(model=MODEL), METADATA, INVALID, "invalid_request"),
        (pb.GenerateRequest(model=MODEL, token_ids=b"123"), METADATA, INVALID, "invalid_request"),
        (pb.GenerateRequest(model=MODEL, token_ids=b"\xff\xff\0\0"), METADATA, INVALID, "invalid_request"),
        (pb.GenerateRequest(model=MODEL, token_ids=b""), METADATA, INVALID, "invalid_request"),
        (pb.GenerateRequest(model="é", prompt="a"), METADATA, grpc.StatusCode.NOT_FOUND, "model_not_found"),
        (a_chat(sampling=pb.Sampling(temperature=9)), METADATA, INVALID, "invalid_request"),
        (a_chat(sampling=pb.Sampling(max_tokens=0)), METADATA, INVALID, "invalid_request"),
        (a_chat(tools_json="{"), METADATA, INVALID, "invalid_request"),
        (a_chat(tools_json="[" * 129 + "]" * 129), METADATA, INVALID, "invalid_request"),
        (a_chat(response_format_json="{"), METADATA, INVALID, "invalid_request"),
        (a_chat(documents_json="["), METADATA, INVALID, "invalid_request"),
        (a_chat(documents_json="[{}]"), METADATA, INVALID, "invalid_request"),
        (a_chat(document_order="any"), METADATA, INVALID, "invalid_request"),
        (a_chat(structured_outputs_json='{"choice": []}'), METADATA, INVALID, "invalid_request"),
        (a_call_to_answer("["), METADATA, INVALID, "invalid_request"),
        (a_chat(priority="hurry"), METADATA, INVALID, "invalid_request"),
        (a_chat("long " * CONTEXT_TOKENS), METADATA, INVALID, "context_length_exceeded"),
    ],
)
async def test_bad_input_is_the_clients_mistake_with_a_hint(
    request_: pb.GenerateRequest, metadata: Any, status: grpc.StatusCode, code: str
) -> None:
    async with a_stub() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(request_, metadata=metadata)
        assert caught.value.code() is status
        trailing = dict(caught.value.trailing_metadata() or ())
        assert trailing["pointsman-code"] == code
        assert trailing["pointsman-hint"]


@pytest.mark.parametrize("method", ["Generate", "Complete", "CountTokens", "ListModels"])
async def test_a_message_of_the_wrong_shape_is_the_clients_mistake(method: str) -> None:
    async with a_router(config=a_config(grpc="127.0.0.1:0")) as router:
        assert router.grpc_address is not None
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            path = f"/pointsman.v1.Inference/{method}"
            kind: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
            call: Any = kind(path)(b"\xff\xff\xff", metadata=METADATA)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if method == "Generate" else call)
    assert caught.value.code() is INVALID


async def test_a_client_that_cancels_frees_the_backend() -> None:
    backend = ScriptedBackend(scripts=[[Delta(text="a", token_ids=(1,)), asyncio.Event()]])
    async with a_stub(backend) as (stub, router):
        call = stub.Generate(a_chat(), metadata=METADATA)
        await call.read()
        call.cancel()
        await asyncio.wait_for(backend.cancelled.wait(), 5)
        assert await router.gateway.doors.emptied(5)


async def test_a_deadline_reaches_the_backend_and_ends_the_call() -> None:
    backend = ScriptedBackend(scripts=[[asyncio.Event()]])
    async with a_stub(backend) as (stub, router):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(a_chat(), metadata=METADATA, timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(backend.cancelled.wait(), 5)
        assert await router.gateway.doors.emptied(5)
    deadline_s = backend.requests[0].deadline_s
    assert deadline_s is not None
    assert 0 < deadline_s < 0.25


async def test_a_call_that_ended_by_itself_at_its_deadline_takes_no_status_and_is_no_error_of_the_router() -> None:
    class Ended:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    with pytest.raises(asyncio.CancelledError):
        await abort(Ended(), grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")


@pytest.mark.parametrize("error", [grpc.aio.InternalError('Failed "execute_batch"'), grpc.aio.UsageError("finished")])
async def test_a_client_that_leaves_in_the_midst_of_a_write_is_gone_and_no_error_of_the_router(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = _Streaming.write

    async def breaks(self: _Streaming, index: int, delta: Delta) -> None:
        async def fails(_: object) -> None:
            raise error

        context = self._context
        self._context = types.SimpleNamespace(write=fails)
        try:
            await write(self, index, delta)
        finally:
            self._context = context

    monkeypatch.setattr(_Streaming, "write", breaks)
    async with a_stub(ScriptedBackend(scripts=[an_answer("a", "b")])) as (stub, router):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [reply async for reply in stub.Generate(a_chat(), metadata=METADATA)]
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert router.gateway.admission.settled == {Outcome.CANCELLED: 1}
    assert "unplanned" not in caplog.text


async def test_a_client_that_reads_nothing_holds_no_backend_for_longer_than_over_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.3)
    pieces = [Delta(text="a" * 100_000, token_ids=(1,)) for _ in range(400)]
    backend = ScriptedBackend(scripts=[[*pieces, asyncio.Event()], an_answer("b")])
    async with a_stub(backend) as (stub, router):
        call = stub.Generate(a_chat(), metadata=METADATA)
        await call.read()
        await asyncio.wait_for(backend.cancelled.wait(), 10)
        assert await router.gateway.doors.emptied(5)
        assert router.gateway.admission.settled == {Outcome.CANCELLED: 1}
        assert (await stub.Complete(a_chat(), metadata=METADATA)).answers[0].text == "b"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@settings(deadline=None, max_examples=30)
@given(
    text=st.text(st.sampled_from("a %\n\x00\x7f\xe9\u6a21\U0001f600"), min_size=1),
    times=st.sampled_from([1, 50, 700, 20_000]),
)
async def test_a_message_of_any_length_and_script_is_told_with_its_status(text: str, times: int) -> None:
    async def method(_: bytes, context: Any) -> None:
        await abort(context, INVALID, text * times, (("pointsman-decision", "x" * MOST_HEADER_BYTES),))

    serving = grpc_server()
    handler: Any = grpc.unary_unary_rpc_method_handler(method)  # type: ignore[arg-type]
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Refuse": handler}),))
    port = serving.add_insecure_port("127.0.0.1:0")
    await serving.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            refused: Any = channel.unary_unary("/a.Service/Refuse")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused(b"")
    finally:
        await serving.stop(0)
    assert caught.value.code() is INVALID
    told = caught.value.details() or ""
    whole = text * times
    assert told == whole or (told.endswith("...") and whole.startswith(told[:-3]) and len(told) > 150)


async def test_a_refusal_of_a_backend_in_any_script_is_told_with_its_status() -> None:
    backend = ScriptedBackend(scripts=[[InvalidRequest("模" * 2000, hint="型" * 2000)]])
    async with a_stub(backend) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(a_chat(), metadata=METADATA)
    assert caught.value.code() is INVALID
    assert dict(caught.value.trailing_metadata() or ())["pointsman-code"] == "invalid_request"


async def test_another_backend_is_tried_before_the_first_reply_and_later_if_it_can_continue() -> None:
    early: list[Any] = [BackendFailed("gone")]
    late: list[Any] = [Delta(text="a", message={"tool_calls": []}), BackendFailed("gone")]
    for script, answered in ((early, True), (late, False)):
        backends = [ScriptedBackend(f"b{i}", scripts=[list(script)] if i == 0 else []) for i in range(2)]
        async with a_stub(backends[0]) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [reply async for reply in stub.Generate(a_chat(), metadata=METADATA)]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        backends = [ScriptedBackend(f"b{i}", scripts=[list(script)]) for i in range(3)]
        async with a_stub(*backends) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError):
                [reply async for reply in stub.Generate(a_chat(), metadata=METADATA)]
        assert sum(len(backend.requests) for backend in backends) == (3 if answered else 1)


async def test_a_stream_is_continued_by_another_backend() -> None:
    scripts: list[list[Any]] = [
        [Delta(text="a", token_ids=(1,)), BackendFailed("gone")],
        [Delta(text="b", token_ids=(2,)), Delta(finish_reason="stop", usage=Usage(3, 2))],
    ]
    # the one that is asked first breaks off
    async with a_stub(*(ScriptedBackend(f"b{at}", scripts=scripts) for at in range(2))) as (stub, _):
        replies = [reply async for reply in stub.Generate(a_chat(), metadata=METADATA)]
    assert b"".join(reply.token_ids for reply in replies) == b"\1\0\0\0\2\0\0\0"
    assert [reply.HasField("placement") for reply in replies] == [True, False, False]
    assert replies[-1].usage.completion_tokens == 2


async def test_health_follows_readiness_and_reflection_names_the_service() -> None:
    away = ScriptedBackend(well=False)
    async with a_router(away, config=a_config(grpc="127.0.0.1:0")) as router:
        assert router.grpc_address is not None
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            service = health_pb2.HealthCheckRequest(service="pointsman.v1.Inference")
            assert (await health.Check(service)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch = health.Watch(service)
            away.well = True
            states = [(await watch.read()).status, (await watch.read()).status]
            assert states[-1] == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = reflection.ServerReflectionInfo(iter([asked]))
            names = {service.name for service in (await answers.read()).list_services_response.service}
            answers.cancel()
    assert "pointsman.v1.Inference" in names


async def test_a_decision_comes_as_trailing_metadata_if_it_is_asked_for() -> None:
    curious = (*METADATA, ("x-pointsman-explain", "1"))
    async with a_stub(config=replace(a_config(grpc="127.0.0.1:0"), outage_s=0.02)) as (stub, router):
        for metadata in (METADATA, curious):
            whole, streamed = (method(a_chat(), metadata=metadata) for method in (stub.Complete, stub.Generate))
            await whole
            assert [reply async for reply in streamed]
            for call in (whole, streamed):
                why = dict(await call.trailing_metadata()).get("pointsman-decision")
                assert (why is not None) is (metadata is curious)
        assert json.loads(str(why))["chosen"] == "b0"
        router.gateway.cluster.drain("b0")
        call = stub.Complete(a_chat(), metadata=curious)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        trailing = dict(await call.trailing_metadata())
        assert trailing["pointsman-code"] == "no_backend"
        assert json.loads(trailing["pointsman-decision"])["chosen"] is None
