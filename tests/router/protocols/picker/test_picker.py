"""An endpoint picker, from a gateway's stream to a real server and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backends.fake import FakeBackend
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.vllm import VLLM, VLLMOptions
from policies.errors import BackendFailed
from policies.nouns import Outcome, ServiceClass, Tenant
from policies.on_miss import Shed
from policies.rules import Rule, When
from policies.sla.config import Config
from policies.sla.server import ServerSettings
from router.operate.dashboard.board import Totals
from router.protocols.picker import server
from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.messages import FAIRNESS_IDS, MODEL_REWRITES, OBJECTIVES, TPOT_TARGETS, TTFT_TARGETS
from router.start.app import Router
from tests.router.parts import KEY, MODEL, a_tenant, board_of
from tests.router.protocols.picker.parts import (
    AUTH,
    CHAT,
    a_backend,
    a_chat,
    a_gateway,
    a_picker_config,
    chat,
    endpoint,
    picking,
)
from tests.standins.anthropic import AnthropicServer
from tests.standins.envoy import BUFFERED, DUPLEX, STREAMED, Envoy, Reply
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_a_request_goes_to_the_picked_endpoint_and_its_answer_comes_back_unchanged() -> None:
    engine = OpenAIServer(model=MODEL)
    async with a_gateway(engine) as (envoy, router):
        reply = await chat(envoy)
        assert reply.status == 200
        assert json.loads(reply.body)["choices"][0]["message"]["content"] == engine.text
        assert reply.sent_to == [endpoint(engine)]
        assert reply.sent_body == a_chat()
        assert reply.metadata["envoy.lb"] == {"x-gateway-destination-endpoint": endpoint(engine)}
        assert (reply.headers["x-pointsman-backend"], reply.headers["x-pointsman-tenant"]) == ("b0", "acme")
        assert settled(router) == {Outcome.FINISHED: 1}


@pytest.mark.parametrize("modes", [{}, {"request_mode": BUFFERED, "response_mode": STREAMED}, {"reports_modes": False}])
@pytest.mark.parametrize("fields", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_usage_is_read_from_the_answer_that_passes_by(modes: dict[str, Any], fields: dict[str, Any]) -> None:
    engine = OpenAIServer(model=MODEL, cached_tokens=3)
    async with a_gateway(engine) as (envoy, router):
        reply = await chat(changed(envoy, **modes), a_chat("12345", **fields))
        assert reply.status == 200
        spent = totals(router)
        assert (spent.prompt_tokens, spent.completion_tokens, spent.cached_tokens) == (5, len(engine.text), 3)


async def test_a_stream_without_usage_is_counted_by_its_pieces() -> None:
    engine = OpenAIServer(model=MODEL)
    async with a_gateway(engine) as (envoy, router):
        reply = await chat(envoy, a_chat(stream=True))
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage"' not in reply.body
        assert totals(router).completion_tokens == len(engine.text)


async def test_what_is_learnt_of_an_answer_is_what_a_proxied_one_would_teach() -> None:
    async with a_gateway() as (envoy, router):
        await chat(envoy, a_chat("x" * 400, stream=True))
        view = router.gateway.cluster.view(router.gateway.clock())
        minute = board_of(router).of_class("chat", router.gateway.clock())
        assert view.backends[0].running == 0
        assert len(minute.ttft) == 1


async def test_a_body_may_come_in_any_pieces_and_leaves_in_pieces_that_the_gateway_takes() -> None:
    engine = OpenAIServer(model=MODEL, context_tokens=1 << 20)
    async with a_gateway(engine) as (envoy, _):
        body = a_chat("x" * 200_000)
        reply = await chat(changed(envoy, cut=999), body)
        assert (reply.status, reply.sent_body) == (200, body)


async def test_a_request_with_trailers_is_answered_with_its_trailers() -> None:
    async with a_gateway() as (envoy, _):
        assert (await chat(changed(envoy, trailers=True))).status == 200


async def test_the_model_is_called_what_its_backend_calls_it_and_a_buffered_body_gets_its_length() -> None:
    engine = OpenAIServer(model="theirs")
    async with running(engine):
        backend = a_backend(engine, models={MODEL: "theirs"})
        async with picking([backend]) as (envoy, _):
            for mode in (envoy.request_mode, BUFFERED):
                reply = await chat(changed(envoy, request_mode=mode), a_chat(unknown={"kept": [1]}))
                assert reply.status == 200
                sent = json.loads(reply.sent_body)
                assert (sent["model"], sent["unknown"]) == ("theirs", {"kept": [1]})
                length = reply.sent_headers.get("content-length")
                assert length == (str(len(reply.sent_body)) if mode == BUFFERED else None)


async def test_an_engine_gets_the_routers_own_fields_behind_a_gateway_too() -> None:
    engine = VLLMServer(model=MODEL)
    async with running(engine):
        backend = VLLM("b0", engine.url, pool="own", options=VLLMOptions())
        async with picking([backend]) as (envoy, _):
            body = a_chat(cache_salt="mine", kv_transfer_params={"remote_host": "evil"}, request_id="r")
            sent = json.loads((await chat(envoy, body)).sent_body)
            assert sent["cache_salt"] == "acme"
            assert not {"kv_transfer_params", "request_id"} & sent.keys()
            twice = b'{"cache_salt":"mine",' + a_chat(cache_salt="acme")[1:]
            content = json.loads((await chat(envoy, twice)).sent_body, object_pairs_hook=list)
            assert [value for name, value in content if name == "cache_salt"] == ["acme"]


async def test_a_tenants_key_does_not_reach_the_engine_but_the_engines_own_does() -> None:
    engine = OpenAIServer(model=MODEL, key="engines-key")
    async with running(engine):
        backend = a_backend(engine, key="engines-key")
        async with picking([backend]) as (envoy, _):
            headers = {"content-type": "application/json", "x-api-key": KEY, "accept-encoding": "gzip"}
            reply = await chat(envoy, headers=headers)
            assert reply.status == 200
            assert reply.sent_headers["authorization"] == "Bearer engines-key"
            assert not {"x-api-key", "accept-encoding"} & reply.sent_headers.keys()


async def test_a_client_cannot_name_its_own_endpoint() -> None:
    engine = OpenAIServer(model=MODEL)
    async with a_gateway(engine) as (envoy, _):
        reply = await chat(envoy, headers={**AUTH, "x-gateway-destination-endpoint": "10.0.0.1:80"})
        assert reply.sent_to == [endpoint(engine)]


async def test_only_endpoints_that_the_gateway_allows_are_picked() -> None:
    engines = [OpenAIServer(model=MODEL, text=str(number)) for number in range(3)]
    async with a_gateway(*engines) as (envoy, _):
        for engine in engines:
            for subset in ([endpoint(engine), "10.9.9.9:1"], f"10.9.9.9:1, {endpoint(engine)}"):
                reply = await chat(changed(envoy, metadata=allowing(subset)))
                assert (reply.sent_to, reply.status) == ([endpoint(engine)], 200)
        assert (await chat(changed(envoy, metadata=allowing(["127.0.0.1"])))).status == 200


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"]])
async def test_without_an_allowed_endpoint_the_answer_is_503(subset: list[str]) -> None:
    async with a_gateway() as (envoy, router):
        reply = await chat(changed(envoy, metadata=allowing(subset)))
        assert (reply.status, reply.sent_to) == (503, [])
        assert "b0: outside the gateway's subset" in error_in(reply.body)["message"]
        assert settled(router) == {Outcome.REJECTED: 1}


async def test_backends_that_a_gateway_cannot_reach_are_dropped_with_the_reason() -> None:
    engine = OpenAIServer(model=MODEL)
    async with running(engine):
        named = OpenAICompatible("named", engine.url.replace("127.0.0.1", "localhost"), pool="own")
        shard = FakeBackend("shard", "own", models=frozenset({MODEL}))
        async with picking([named, shard]) as (envoy, _):
            reply = await chat(envoy)
            assert reply.status == 503
            assert "named: without an endpoint that the gateway knows" in error_in(reply.body)["message"]
        async with picking([a_backend(engine), shard]) as (envoy, _):
            assert (await chat(envoy)).status == 200
            reply = await chat(envoy, body=json.dumps({"model": MODEL, "input": "x"}).encode(), path="/v1/responses")
            assert (reply.status, "b0: of another dialect" in error_in(reply.body)["message"]) == (503, True)


async def test_a_gateway_that_goes_down_the_list_takes_the_flight_along() -> None:
    dead, alive = OpenAIServer(model=MODEL), OpenAIServer(model=MODEL)
    async with running(alive), running(dead):
        backends = [a_backend(dead, 0), a_backend(alive, 1)]
        async with picking(backends) as (envoy, router):
            # where a prefix lives the next one goes
            body = a_chat("x" * 2000)
            first = await chat(changed(envoy, metadata=allowing([endpoint(dead)])), body)
            assert first.headers["x-pointsman-backend"] == "b0"
            router.gateway.cluster.weigh("b1", 1e-6)
            envoy.unreachable = {endpoint(dead)}
            reply = await chat(changed(envoy, metadata={}), body)
            assert reply.sent_to == [endpoint(dead), endpoint(alive)]
            assert (reply.status, reply.headers["x-pointsman-backend"]) == (200, "b1")
            assert settled(router) == {Outcome.FINISHED: 2}
            now = router.gateway.clock()
            assert board_of(router).of_backend("b1", now).completion_tokens == len(alive.text)
            assert b'pointsman_events_total{event="retried"} 1.0' in exposed(router)


async def test_a_class_that_cannot_keep_its_promise_is_shed_with_a_time_to_come_back() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=1)
    classes = {"chat": ServiceClass("chat", 0, ttft_s=0.001), "batch": ServiceClass("batch", 1)}
    config = replace(with_batch(a_picker_config()), classes=classes, on_miss={"chat": (Shed(429),)})
    async with a_gateway(engine, config=config, max_requests=1) as (envoy, _):
        first = await under_way(envoy, headers={**AUTH, "x-pointsman-priority": "batch"})
        reply = await chat(Envoy(envoy.picker))
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["content-type"] == "application/json"
        assert error_in(reply.body)["type"] == "overloaded_error"
        await gone(first)


async def test_a_tenant_beyond_its_limit_is_refused_and_one_that_left_frees_its_place() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=3)
    async with a_gateway(engine, config=a_picker_config_of(a_tenant(concurrent=1))) as (envoy, router):
        first = await under_way(envoy)
        assert (await chat(Envoy(envoy.picker))).status == 429
        await gone(first)
        await until(lambda: settled(router).get(Outcome.CANCELLED) == 1)
        engine.hangs_after = None
        assert (await chat(Envoy(envoy.picker))).status == 200


async def test_a_client_that_leaves_in_the_middle_frees_its_flight_and_pays_for_what_it_saw() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=9)
    async with a_gateway(engine) as (envoy, router):
        call = asyncio.create_task(chat(changed(envoy, leaves_at=b'"content": "'), a_chat(stream=True)))
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: settled(router) == {Outcome.CANCELLED: 1})
        assert router.gateway.cluster.in_flight == 0
        assert 0 < totals(router).completion_tokens < len(engine.text)


async def test_a_client_that_leaves_while_it_waits_for_room_leaves_the_queue() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=1)
    async with a_gateway(engine, max_requests=1) as (envoy, router):
        first = await under_way(envoy)
        second = asyncio.create_task(chat(Envoy(envoy.picker)))
        await until(lambda: router.gateway.dispatcher.waiting()[0].get("acme", 0) == 1)
        await gone(second)
        await until(lambda: router.gateway.dispatcher.waiting()[0].get("acme", 0) == 0)
        await gone(first)


async def test_a_request_that_waits_goes_as_soon_as_there_is_room() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=1)
    async with a_gateway(engine, max_requests=1) as (envoy, router):
        first = await under_way(envoy)
        second = asyncio.create_task(chat(Envoy(envoy.picker)))
        await until(lambda: router.gateway.dispatcher.waiting()[0].get("acme", 0) == 1)
        engine.hangs_after = None
        await gone(first)
        assert (await second).status == 200


async def test_a_gateway_that_answers_by_itself_while_a_request_waits_is_let_go_on() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=1)
    async with a_gateway(engine, max_requests=1) as (envoy, router):
        first = await under_way(envoy)
        second = Envoy(envoy.picker)
        async with second.stream() as stream:
            await stream.write(second.first({":method": "POST", ":path": CHAT, **AUTH}, is_last=False))
            await stream.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=a_chat(), end_of_stream=True)))
            await until(lambda: router.gateway.dispatcher.waiting()[0].get("acme", 0) == 1)
            timed_out = core.HeaderMap(headers=[core.HeaderValue(key=":status", raw_value=b"504")])
            await stream.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=timed_out)))
            assert (await stream.read()).HasField("response_headers")
            assert settled(router) == {Outcome.CANCELLED: 1}
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        await gone(first)


OWN_REQUESTS: dict[str, tuple[bytes, dict[str, str]]] = {
    "an unknown model": (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', AUTH),
    "no JSON": (b"{", AUTH),
    "no key": (a_chat(), {}),
    "a list of models": (b"", {":method": "GET", ":path": "/v1/models", **AUTH}),
}


@pytest.mark.parametrize("response_mode", [DUPLEX, STREAMED])
@pytest.mark.parametrize("ends", ["with its head", "with a body", "never"])
@pytest.mark.parametrize("asked", OWN_REQUESTS)
async def test_the_picker_leaves_a_gateway_that_answers_its_client_by_itself(
    asked: str, ends: str, response_mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "QUIET_S", 0.1)
    body, headers = OWN_REQUESTS[asked]
    async with a_gateway() as (envoy, _):
        gateway = Envoy(envoy.picker, response_mode=response_mode)
        async with gateway.stream() as stream:
            # all at once: the picker decides, refuses and is answered in any order
            head = core.HeaderMap(headers=[core.HeaderValue(key=":status", raw_value=b"504")])
            messages = [
                gateway.first({":method": "POST", ":path": CHAT, **headers}, is_last=False),
                pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)),
                pb.ProcessingRequest(
                    response_headers=pb.HttpHeaders(headers=head, end_of_stream=ends == "with its head")
                ),
            ]
            if ends == "with a body":
                messages += [
                    pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x", end_of_stream=last))
                    for last in (False, True)
                ]
            # a message that comes too late is an error of this client: the picker has left
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(10):
                    for message in messages:
                        await stream.write(message)
                    while await stream.read() is not grpc.aio.EOF:
                        pass


async def test_an_endpoint_that_never_answers_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(OpenAIServer):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            return await asyncio.Event().wait()  # type: ignore[return-value, func-returns-value]

    async with a_gateway(Silent(model=MODEL), idle_s=0.05) as (envoy, router):
        reply = await chat(envoy)
        assert reply.status == 502
        assert error_in(reply.body)["message"] == BackendFailed.masked_message
        assert "was silent for 0.05 s" in caplog.text
        assert settled(router) == {Outcome.FAILED: 1}


async def test_the_gateways_own_deadline_ends_the_call() -> None:
    engine = OpenAIServer(model=MODEL, hangs_after=1)
    async with a_gateway(engine, max_requests=1) as (envoy, router):
        first = await under_way(envoy)
        (ended,) = await asyncio.gather(chat(changed(Envoy(envoy.picker), timeout_s=0.1)), return_exceptions=True)
        # it is the call's deadline too: the first to notice reports it
        if isinstance(ended, Reply):
            assert ended.status == 504
        else:
            assert isinstance(ended, grpc.aio.AioRpcError), ended
            assert ended.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: settled(router) != {})
        await gone(first)


async def test_an_engines_refusal_reaches_the_client_as_it_is_and_counts_as_one() -> None:
    engine = OpenAIServer(model=MODEL, is_busy=True)
    async with a_gateway(engine) as (envoy, router):
        reply = await chat(envoy)
        assert (reply.status, error_in(reply.body)["message"]) == (429, "Too many requests")
        assert settled(router) == {Outcome.REJECTED: 1}
        assert totals(router).prompt_tokens == 0


async def test_an_answer_that_is_not_understood_reaches_the_client_all_the_same() -> None:
    class Odd(OpenAIServer):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"no json" * 40_000, content_type="application/json")

    async with a_gateway(Odd(model=MODEL)) as (envoy, router):
        reply = await chat(envoy)
        assert (reply.status, reply.body) == (200, b"no json" * 40_000)
        assert settled(router) == {Outcome.FAILED: 1}


async def test_a_compressed_answer_passes_and_is_reported_as_uncounted() -> None:
    class Compressed(OpenAIServer):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    async with a_gateway(Compressed(model=MODEL)) as (envoy, router):
        assert (await chat(envoy)).body == b"\x1f\x8b"
        assert settled(router) == {Outcome.FAILED: 1}


REFUSALS: list[tuple[dict[str, Any], int, str]] = [
    ({"body": b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}'}, 404, "there is no model"),
    ({"body": b"{"}, 400, "not valid JSON"),
    ({"body": b""}, 400, "not valid JSON"),
    ({"body": b'{"model": "tiny"}'}, 400, "messages"),
    ({"body": b"x" * 70_000}, 413, "larger than 65536 bytes"),
    ({"headers": {}}, 401, "no API key"),
    ({"headers": {"authorization": "Bearer wrong"}}, 401, "not known"),
    ({"headers": {**AUTH, "content-encoding": "gzip"}}, 400, "compressed"),
    ({"path": "/v1/files"}, 404, "no endpoint is picked for POST /v1/files"),
]


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
@pytest.mark.parametrize(("asked", "status", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
async def test_a_refusal_comes_in_the_place_of_an_endpoint(
    asked: dict[str, Any], status: int, message: str, mode: int
) -> None:
    async with a_gateway(config=a_picker_config(max_body_bytes=65_536)) as (envoy, router):
        reply = await chat(changed(envoy, request_mode=mode), **asked)
        assert (reply.status, reply.sent_to) == (status, [])
        assert message in error_in(reply.body)["message"]
        assert router.gateway.admission.is_idle()


async def test_the_list_of_models_is_the_tenants() -> None:
    async with a_gateway() as (envoy, _):
        async with envoy.stream() as stream:
            await stream.write(envoy.first({":method": "GET", ":path": "/v1/models", **AUTH}, is_last=True))
            answer = (await stream.read()).immediate_response
        assert answer.status.code == 200
        assert [model["id"] for model in json.loads(answer.body)["data"]] == [MODEL]
        async with envoy.stream() as stream:
            await stream.write(envoy.first({":method": "GET", ":path": "/v1/models"}, is_last=True))
            assert (await stream.read()).immediate_response.status.code == 401


async def test_anthropics_dialect_goes_through_as_it_is() -> None:
    class Speaks(OpenAICompatible):
        own_paths = frozenset({"/v1/messages"})

    engine = AnthropicServer(model=MODEL, cached_tokens=2)
    async with running(engine):
        backend = Speaks("b0", engine.url, pool="own", options=OpenAIOptions(served=frozenset({MODEL})))
        async with picking([backend]) as (envoy, router):
            message = {"role": "user", "content": "12345"}
            body = json.dumps({"model": MODEL, "max_tokens": 99, "stream": True, "messages": [message]}).encode()
            headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "content-type": "application/json"}
            reply = await chat(envoy, body, headers, "/v1/messages?beta=true")
            assert (reply.status, reply.sent_body) == (200, body)
            spent = totals(router)
            assert (spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens) == (5, 2, len(engine.text))
            refused = await chat(envoy, body.replace(b"tiny", b"huge"), headers, "/v1/messages")
            assert json.loads(refused.body)["type"] == "error"


async def test_documents_reach_the_engine_as_text() -> None:
    async with a_gateway() as (envoy, _):
        reply = await chat(envoy, a_chat(documents=[{"id": "fox", "text": "The fox is quick."}], kept=1))
        sent = json.loads(reply.sent_body)
        assert "documents" not in sent
        assert sent["kept"] == 1
        assert "Document fox\nThe fox is quick.\n\n" in sent["messages"][0]["content"]
        assert reply.headers["x-pointsman-document-order"] == '["fox"]'


async def test_embeddings_of_many_texts_go_to_one_endpoint() -> None:
    async with a_gateway() as (envoy, router):
        body = json.dumps({"model": MODEL, "input": ["a", "bcd"]}).encode()
        reply = await chat(envoy, body, path="/v1/embeddings")
        assert len(json.loads(reply.body)["data"]) == 2
        assert totals(router).prompt_tokens == 4


async def test_a_completion_with_several_prompts_goes_to_one_endpoint_below_any_path() -> None:
    class Several(OpenAIServer):
        def routes(self) -> Iterable[web.RouteDef]:
            return (*super().routes(), web.post("/llm/v1/completions", self.complete))

        async def complete(self, request: web.Request) -> web.StreamResponse:
            usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
            choices = [{"index": at, "text": "a", "finish_reason": "stop"} for at in range(2)]
            return web.json_response({"choices": choices, "usage": usage})

    async with a_gateway(Several(model=MODEL)) as (envoy, router):
        body = json.dumps({"model": MODEL, "prompt": ["short", "longest"]}).encode()
        reply = await chat(envoy, body, path="/llm/v1/completions")
        assert (reply.status, reply.sent_body) == (200, body)
        assert totals(router).prompt_tokens == 9


async def test_an_objective_that_is_a_class_of_ours_is_what_the_caller_asks_for() -> None:
    async with a_gateway(config=with_batch(a_picker_config())) as (envoy, _):
        for name in OBJECTIVES:
            for objective, given in (("batch", "batch"), ("somebody-elses", "chat")):
                reply = await chat(envoy, headers={**AUTH, name: objective})
                assert reply.headers["x-pointsman-class"] == given


@pytest.mark.parametrize("name", MODEL_REWRITES)
async def test_the_model_of_a_header_takes_the_place_of_the_bodys(name: str) -> None:
    async with a_gateway() as (envoy, _):
        body = json.dumps({"model": "another", "messages": [{"role": "user", "content": "hi"}]}).encode()
        assert (await chat(envoy, body)).status == 404
        reply = await chat(envoy, body, headers={**AUTH, name: MODEL})
        assert (reply.status, json.loads(reply.sent_body)["model"]) == (200, MODEL)
        assert (await chat(envoy, headers={**AUTH, name: "another"})).status == 404


@pytest.mark.parametrize("name", FAIRNESS_IDS)
async def test_a_fairness_id_is_the_end_user_where_the_body_names_none(name: str) -> None:
    tenant = replace(a_tenant(), needs_user=True)
    async with a_gateway(config=a_picker_config_of(tenant)) as (envoy, _):
        assert (await chat(envoy)).status == 400
        assert (await chat(envoy, headers={**AUTH, name: "ann"})).status == 200


@pytest.mark.parametrize("names", [TTFT_TARGETS, TPOT_TARGETS])
async def test_targets_of_a_caller_reach_the_decision(names: tuple[str, str]) -> None:
    async with a_gateway() as (envoy, router):
        promised = list[ServiceClass | None]()
        router.gateway.observer.decided = lambda request, *_, **__: promised.append(request.promised)  # type: ignore[method-assign]
        for name in names:
            for given in ("60000", "0", "-1", "nan", "inf", "soon", ""):
                assert (await chat(envoy, headers={**AUTH, name: given})).status == 200
        found = [None if each is None else (each.ttft_s, each.tpot_s)[names is TPOT_TARGETS] for each in promised]
        assert found[0] == found[7] == 60.0
        assert set(found[1:7]) == set(found[8:]) == {found[1]}


async def test_the_choice_is_explained_on_request() -> None:
    async with a_gateway() as (envoy, _):
        reply = await chat(envoy, headers={**AUTH, "x-pointsman-explain": "1"})
        assert "b0" in reply.headers["x-pointsman-decision"]


async def test_a_router_that_drains_lets_streams_end_and_takes_none() -> None:
    engine = OpenAIServer(model=MODEL, delay_s=0.01)
    async with a_gateway(engine) as (envoy, router):
        first = await under_way(envoy)
        router.gateway.doors.close()
        assert (await chat(Envoy(envoy.picker))).status == 503
        assert (await first).status == 200


async def test_health_has_the_protocols_names() -> None:
    async with a_gateway() as (envoy, _), grpc.aio.insecure_channel(envoy.picker) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == SERVING
        for name in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
            # it began before the backends were reached
            statuses = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            assert (await statuses.read()).status == SERVING or (await statuses.read()).status == SERVING
            statuses.cancel()


async def test_a_router_without_the_word_serves_no_picker() -> None:
    assert Router(replace(a_picker_config(), server=ServerSettings())).picker is None


def changed(envoy: Envoy, **fields: Any) -> Envoy:
    for name, value in fields.items():
        setattr(envoy, name, value)
    return envoy


def a_picker_config_of(tenant: Tenant) -> Config:
    keys = dict.fromkeys(tenant.key_hashes, tenant)
    return replace(a_picker_config(), tenants={tenant.name: tenant}, tenant_by_key_hash=keys)


def with_batch(config: Config) -> Config:
    return replace(config, rules=(Rule("batch", when=When(priority=("batch",))), Rule("chat")))


async def under_way(envoy: Envoy, headers: Mapping[str, str] = AUTH) -> asyncio.Task[Reply]:
    """A streamed answer that has begun."""
    call = asyncio.create_task(chat(envoy, a_chat(stream=True), headers))
    picked = asyncio.create_task(envoy.picked.wait())
    await asyncio.wait((call, picked), timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert picked.done(), call.result() if call.done() else "it is not placed"
    return call


def allowing(subset: Any) -> dict[str, dict[str, Any]]:
    return {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": subset}}


def settled(router: Router) -> dict[Outcome, int]:
    return dict(router.gateway.admission.settled)


def totals(router: Router) -> Totals:
    return board_of(router).of_tenant("acme", router.gateway.clock())


def exposed(router: Router) -> bytes:
    return router.telemetry.exposition("")[0]


def error_in(body: bytes) -> Any:
    return json.loads(body)["error"]


async def gone(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)
