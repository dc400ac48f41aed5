"""What clients read of backends: no address, URL, file or exception, over any protocol; operators read all of it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from policies.errors import (
    BackendFailed,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from policies.health import Trouble
from policies.nouns import Delta
from router.call.disclosure import public_message_of, public_trouble, shown_name, without_places
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from router.protocols.status import status_of
from tests.router.parts import (
    CHAT,
    COMPLETIONS,
    KEY,
    MODEL,
    ScriptedBackend,
    a_chat,
    a_client,
    a_config,
    a_router,
    an_answer,
)

WHERE = "Cannot connect to host 10.0.0.5:7001 ssl:default [OSError at /opt/engine/serve.py]"
FAILURES = (
    Unreached(f"b0 cannot be reached: {WHERE}", hint="is http://10.0.0.5:7001 up?"),
    BackendFailed(f"b0 answered 500: Traceback: {WHERE}"),
    Overloaded(f"b0 is busy: {WHERE}", retry_after_s=1.0),
    BackendRefused(f"b0 refused: {WHERE}", hint="is http://10.0.0.5:7001 up?"),
    InvalidRequest(f"'top_k' is too large: {WHERE}"),
    ContextExceeded(f"too long: {WHERE}"),
)
SECRETS = ("10.0.0.5", ":7001", "/opt", "serve.py", "http://", "ssl:default OSError")
MESSAGES = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
DIALECTS: dict[str, dict[str, Any]] = {
    CHAT: a_chat(),
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": MESSAGES,
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/rerank": {"model": MODEL, "query": "hi", "documents": ["a"]},
}


def assert_no_secret(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


def again(failure: ExpectedError) -> ExpectedError:
    """An equal new one: the text for clients is set on it."""
    return type(failure)(failure.message, hint=failure.hint, retry_after_s=failure.retry_after_s)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("path", DIALECTS)
async def test_no_dialect_shows_a_backends_address(path: str, failure: ExpectedError) -> None:
    backend = ScriptedBackend(scripts=[[again(failure)] for _ in range(3)])
    async with a_router(backend) as router, a_client(router) as client, client.post(path, DIALECTS[path]) as reply:
        text = f"{dict(reply.headers)} {await reply.text()}"
    assert len(backend.requests) == 1
    assert reply.status in (status_of(failure).http, 529)
    assert_no_secret(text)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
async def test_nor_does_the_last_event_of_a_stream(path: str, failure: ExpectedError) -> None:
    backend = ScriptedBackend(scripts=[[Delta(text="a", token_ids=(1,)), again(failure)]])
    body = {**DIALECTS[path], "stream": True}
    async with a_router(backend) as router, a_client(router) as client, client.post(path, body) as reply:
        text = await reply.text()
    assert reply.status == 200
    assert '"error"' in text
    assert_no_secret(text)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("streams", [False, True])
async def test_nor_does_grpc(failure: ExpectedError, *, streams: bool) -> None:
    backend = ScriptedBackend(scripts=[[again(failure)] for _ in range(3)])
    async with a_router(backend, config=a_config(grpc="127.0.0.1:0")) as router:
        assert router.grpc_address is not None
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
            ask = pb.GenerateRequest(model=MODEL, prompt="hi")
            metadata = (("authorization", f"Bearer {KEY}"),)
            answer = stub.Generate(ask, metadata=metadata).read() if streams else stub.Complete(ask, metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answer
    assert refused.value.code() == status_of(failure).grpc
    assert_no_secret(f"{refused.value.details()} {refused.value.trailing_metadata()}")


async def test_a_backend_that_was_found_at_an_address_is_shown_without_it() -> None:
    backend = ScriptedBackend("own@10.0.0.5:7001", scripts=[an_answer("a")])
    config = a_config(grpc="127.0.0.1:0")
    async with a_router(backend, config=config) as router, a_client(router) as client:
        async with client.post(CHAT, a_chat(), headers={"x-pointsman-explain": "1"}) as reply:
            header = reply.headers["x-pointsman-decision"]
            shown = reply.headers["x-pointsman-backend"]
        await router.gateway.cluster.remove(backend.name, within_s=0)
        async with client.post(CHAT, a_chat(), headers={"x-pointsman-explain": "1"}) as reply:
            refusal = f"{dict(reply.headers)} {await reply.text()}"
    assert shown == shown_name("own@10.0.0.5:7001")
    assert shown.startswith("own@")
    assert json.loads(header)["chosen"] == json.loads(header)["candidates"][0]["backend"] == shown
    assert_no_secret(header + shown + refusal)


async def test_a_refusal_that_names_dropped_backends_names_no_address() -> None:
    backend = ScriptedBackend("own@10.0.0.5:7001")
    config = dataclasses.replace(a_config(), outage_s=0.0)
    async with a_router(backend, config=config) as router, a_client(router) as client:
        router.gateway.cluster.drain(backend.name)
        async with client.post(CHAT, a_chat(), headers={"x-pointsman-explain": "1"}) as reply:
            text = f"{dict(reply.headers)} {await reply.text()}"
    assert reply.status == 503
    assert "dropped by policy" in text
    assert shown_name(backend.name) in text
    assert_no_secret(text)


async def test_log_and_decision_log_have_all_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "decisions.jsonl"
    backend = ScriptedBackend(scripts=[[again(FAILURES[0])]])
    with caplog.at_level(logging.INFO):
        async with a_router(backend, config=a_config(decision_log=str(path))) as router, a_client(router) as client:
            status, body = await client.answer(CHAT, a_chat())
    assert (status, body["error"]["code"]) == (502, "backend_failed")
    assert json.loads(path.read_text())["error"] == str(FAILURES[0])
    warned, ended = (
        next(record.getMessage() for record in caplog.records if record.name == name)
        for name in ("pointsman.pipeline", "pointsman.outcome")
    )
    assert str(FAILURES[0]) in warned
    assert backend.requests[0].id in warned
    assert json.loads(ended)["error"] == str(FAILURES[0])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no route to 10.0.0.5", "no route to ..."),
        ("connect to [fd00::1]:7001 failed", "connect to ... failed"),
        ("connect to engine.svc.cluster.local:8000", "connect to ..."),
        ("vllm@10.0.0.5:8000 refused: no", "vllm@... refused: no"),
        ("see http://internal/docs, please", "see ... please"),
        ("model `/models/llama-3/8b` is not loaded", "model `...` is not loaded"),
        (r"C:\models\llama is missing", "... is missing"),
        ("messages.0.content: at most 10:30 or [1:2] or a/b", "messages.0.content: at most 10:30 or [1:2] or a/b"),
        ("use /v1/responses; 1.5/2 is 3/4, version 0.9.1", "use /v1/responses; 1.5/2 is 3/4, version 0.9.1"),
    ],
)
def test_addresses_are_left_out_of_a_backends_text(text: str, shown: str) -> None:
    assert without_places(text) == shown


def test_what_a_client_can_help_keeps_its_words_and_what_it_cannot_does_not() -> None:
    assert public_message_of(InvalidRequest("top_k is 3 at most")) == "top_k is 3 at most"
    assert public_message_of(BackendFailed("org-123 is over its budget")) == BackendFailed.masked_message
    assert "org-123" not in public_message_of(Overloaded("b0 is busy: org-123 is over its limit"))


def test_names_of_the_file_stay_and_those_of_found_backends_differ() -> None:
    assert shown_name("own-0") == "own-0"
    assert shown_name("own@10.0.0.5:7001") != shown_name("own@10.0.0.6:7001")
    assert shown_name("own@10.0.0.5:7001/3") == shown_name("own@10.0.0.5:7001") + "/3", "a data-parallel rank"
    assert shown_name("own@10.0.0.5:7001/llm") != shown_name("own@10.0.0.5:7001")


@pytest.mark.parametrize(
    ("reason", "was_well", "shown"),
    [
        (f"cannot be reached: {WHERE}", False, "never reached for 12 s (it cannot be reached)"),
        (
            "answered 401 when asked for http://a:1/x",
            False,
            "never reached for 12 s (it answered 401 when asked for ...)",
        ),
        (f"answered 500: Traceback: {WHERE}", True, "ill for 12 s"),
    ],
)
def test_clients_learn_how_long_a_backend_was_ill_and_no_details(reason: str, was_well: bool, shown: str) -> None:
    name = "own@10.0.0.5:7001"
    assert public_trouble(name, Trouble(f"{name} {reason}", 12.4, was_well)) == shown
