from __future__ import annotations

import json
from typing import Any

import pytest

from backends.openai import pooled
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.openai.pooled import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH, PooledAnswer
from backends.vllm import VLLM, VLLMOptions
from policies.errors import BackendErred, BackendFailed, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, Prompt, Usage
from tests.backends.parts import a_request, everything
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

BODY: dict[str, Any] = {"model": "ours", "input": ["a", "bc"], "encoding_format": "base64", "dimensions": 2}
REPLY = b'{"object":"list","data":[{"index":0,"embedding":[0.10,-1e-3]}],"usage":{"prompt_tokens":3},"x":1}'


def read(data: bytes, path: str = EMBEDDINGS_PATH) -> list[Delta]:
    return PooledAnswer("b", path, prompt_tokens=5).read(data)


def test_the_reply_is_one_delta_with_every_byte_and_usage() -> None:
    assert read(REPLY) == [Delta(body=REPLY, usage=Usage(3))]


def test_without_reported_usage_the_prompts_length_counts() -> None:
    assert read(b'{"data":[]}')[0].usage == Usage(5, is_guess=True)


@pytest.mark.parametrize("usage", [b"null", b"[]", b'"none"', b'{"prompt_tokens":-1}', b'{"total_tokens":"many"}'])
def test_a_usage_that_cannot_be_read_is_as_none(usage: bytes) -> None:
    assert read(b'{"data":[],"usage":%b}' % usage)[0].usage == Usage(5, is_guess=True)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"error":{"message":"no","code":400}}', InvalidRequest),
        (b'{"object":"error","message":"slow down","code":429}', Overloaded),
        (b'{"object":"error","message":"oops","code":500}', BackendErred),
    ],
)
def test_an_error_behind_a_status_of_200_has_its_meaning(data: bytes, kind: type[ExpectedError]) -> None:
    with pytest.raises(kind):
        read(data)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"data":1}', b'{"data":null}', b"\xff"])
def test_nonsense_is_a_failure_of_the_backend(data: bytes) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        read(data)


@pytest.mark.parametrize(("path", "name"), [(RERANK_PATH, "results"), (SCORE_PATH, "data")])
def test_scores_are_one_delta_too_and_may_report_only_a_total(path: str, name: str) -> None:
    reply = json.dumps({"id": "x", name: [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 9}}).encode()
    assert read(reply, path=path) == [Delta(body=reply, usage=Usage(9))]
    with pytest.raises(BackendFailed, match=f"instead of `{name}`"):
        read(b'{"other": []}', path=path)


@pytest.mark.parametrize(
    ("before", "after", "prompt_tokens"),
    [
        (b'{"object":"list","data" : [', b'],"model":"m","usage":{"prompt_tokens":7,"total_tokens":7}}', 7),
        (b'{"usage":{"prompt_tokens":7},"model":"m","data":[', b"]}", 7),
        (b'{"data":[', b"]}", 5),
    ],
)
def test_of_a_large_reply_only_what_stands_around_its_list_is_read(
    before: bytes, after: bytes, prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled, "WHOLE_BYTES", 1000)
    sizes, read_json = list[int](), pooled.read_json
    monkeypatch.setattr(pooled, "read_json", lambda raw, *kind: sizes.append(len(raw)) or read_json(raw, *kind))
    whole = before + b",".join([b'{"object":"error","embedding":[1.5,2]}'] * 5000) + after
    (delta,) = read(whole)
    assert delta.body == whole
    assert delta.usage is not None
    assert delta.usage.prompt_tokens == prompt_tokens
    assert sum(sizes) < 1000


@pytest.mark.parametrize("data", [b'{"data":{"a":[1]}', b'{"data":[', b'{"usage":{}}', b'{"error":{"message":"no"}}'])
def test_a_large_reply_without_its_list_is_a_failure_of_the_backend(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled, "WHOLE_BYTES", 1000)
    with pytest.raises(BackendErred):
        read(data + b" " * 2000)


async def test_the_body_goes_through_whole_under_the_servers_name_of_the_model() -> None:
    async with running(OpenAIServer()) as server:
        options = OpenAIOptions(models={"ours": "m"})
        backend = OpenAICompatible("b", server.url, pool="p", options=options)
        (delta,) = await everything(backend, a_request(model="ours"), Prompt(body=BODY, path=EMBEDDINGS_PATH))
        await backend.close()
    (seen,) = server.received
    assert (seen.path, seen.body) == (EMBEDDINGS_PATH, {**BODY, "model": "m"})
    assert delta.body is not None
    assert len(json.loads(delta.body)["data"]) == 2
    assert delta.usage == Usage(3)


async def test_the_routers_own_fields_do_not_come_from_a_client() -> None:
    forged = {**BODY, "model": "m", "cache_salt": "other", "priority": -9}
    async with running(VLLMServer()) as server:
        backend = VLLM("b", server.url, pool="p")
        await everything(backend, a_request(), Prompt(body=forged, path=EMBEDDINGS_PATH))
        await backend.close()
    assert server.received[0].body == {**BODY, "model": "m"}


async def test_documents_are_reranked_under_the_servers_name_of_the_model() -> None:
    body = {"model": "ours", "query": "a", "documents": ["b", "c"], "top_n": 1, "priority": -9}
    async with running(VLLMServer()) as server:
        backend = VLLM("b", server.url, pool="p", options=VLLMOptions(models={"ours": "m"}))
        (delta,) = await everything(backend, a_request(model="ours"), Prompt(body=body, path=RERANK_PATH))
        await backend.close()
    assert (server.received[0].path, server.received[0].body) == (
        RERANK_PATH,
        {"model": "m", "query": "a", "documents": ["b", "c"], "top_n": 1},
    )
    assert delta.usage == Usage(3)


async def test_refusals_mean_what_they_mean_elsewhere() -> None:
    async with running(OpenAIServer(context_tokens=1)) as server:
        backend = OpenAICompatible("b", server.url, pool="p")
        prompt = Prompt(body={**BODY, "model": "m"}, path=EMBEDDINGS_PATH)
        with pytest.raises(InvalidRequest, match="maximum context length"):
            await everything(backend, prompt=prompt)
        server.is_busy = True
        with pytest.raises(Overloaded):
            await everything(backend, prompt=prompt)
        await backend.close()
