from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.openai.answer import deltas_of
from backends.openai.compatible import OpenAIOptions
from backends.tabby import Tabby
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest
from policies.nouns import Prompt, Sampling, TokenLogprob, Usage
from shards.wire.translate import pack_ids
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.standin import TEXT, running
from tests.standins.tabby import TabbyServer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
IDS = [ord(letter) for letter in "Hello"]


@asynccontextmanager
async def a_backend(server: TabbyServer | None = None, **options: Any) -> AsyncIterator[tuple[Tabby, TabbyServer]]:
    async with running(server or TabbyServer()) as standin:
        backend = Tabby("t", standin.url, pool="p", options=OpenAIOptions(**options))
        await backend.probe()
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_a_body_goes_through_whole_but_for_two_words_that_tabby_spells_otherwise() -> None:
    body = {**CHAT, "xtc_probability": 0.5, "user": "u", "response_format": {"type": "json_object"}, "stop": "x"}
    request = a_request(sampling=Sampling(stop=("x",), stop_token_ids=(2,)))
    async with a_backend() as (backend, server):
        await everything(backend, request, Prompt(body={**body, "stop_token_ids": [2]}))
    assert server.received[0].body == {
        **CHAT,
        "xtc_probability": 0.5,
        "user": "u",
        "response_format": {"type": "json"},
        "stop": ["x", 2],
    }


async def test_a_schema_is_left_as_openai_spells_it() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    async with a_backend() as (backend, server):
        await everything(backend, prompt=Prompt(body={**CHAT, "response_format": shape}))
    assert server.received[0].body["response_format"] == shape


async def test_no_client_can_swap_the_model_even_with_the_admin_key() -> None:
    server = TabbyServer(key="user", admin_key="admin")
    async with a_backend(server, key="admin", models={"ours": "m"}) as (backend, _):
        await everything(backend, a_request(model="other"), Prompt(body={**CHAT, "model": "other"}))
        await everything(backend, a_request(model="ours"), Prompt(body={**CHAT, "model": "ours"}))
        described = backend.describe()
    assert ([request.body["model"] for request in server.received], server.loads) == (["m", "m"], 0)
    assert described is not None
    assert described.models == {"ours"}


@pytest.mark.parametrize("body", [None, {"model": "m", "prompt": IDS}])
async def test_token_ids_are_sent_as_the_text_that_they_are(body: dict[str, Any] | None) -> None:
    async with a_backend() as (backend, server):
        prompt = a_prompt(token_ids=pack_ids(IDS), body=body, path="/v1/completions")
        deltas = await everything(backend, prompt=prompt)
        path, sent, _ = server.received[0]
    assert (path, sent["prompt"], sent["add_bos_token"]) == ("/v1/completions", "Hello", False)
    assert text_of(deltas) == TEXT
    assert deltas[-1].usage == Usage(5, len(TEXT))


async def test_token_ids_that_no_text_is_are_refused() -> None:
    async with a_backend(TabbyServer(loses="e")) as (backend, server):
        with pytest.raises(InvalidRequest, match="no text is these token ids"):
            await everything(backend, prompt=a_prompt(token_ids=pack_ids(IDS), body=None))
        assert server.received == []


@pytest.mark.parametrize(
    ("sampling", "fields", "param"),
    [(Sampling(seed=1), {}, "seed"), (Sampling(), {"suffix": "x"}, "suffix"), (Sampling(), {"best_of": 2}, "best_of")],
)
async def test_what_tabby_would_pass_over_is_refused_by_name(
    sampling: Sampling, fields: dict[str, Any], param: str
) -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), Prompt(body={**CHAT, **fields}))
    assert failure.value.param == param


async def test_a_probe_learns_the_loaded_model_and_one_without_a_model_is_not_well() -> None:
    async with a_backend(TabbyServer(context_tokens=2048)) as (backend, server):
        described = backend.describe()
        assert described is not None
        assert (described.models, described.context_tokens) == ({"m"}, 2048)
        assert backend.load() == Load(max_requests=8)
        server.is_loaded = False
        with pytest.raises(BackendFailed, match="which model is loaded"):
            await backend.probe()
        with pytest.raises(BackendFailed, match="has no model"):
            await everything(backend)
        with pytest.raises(BackendFailed, match="has no model"):
            await everything(backend, prompt=a_prompt(token_ids=pack_ids(IDS), body=None))
        server.is_ill = True
        with pytest.raises(BackendFailed, match="/health answered 503"):
            await backend.probe()


async def test_a_prompt_that_is_too_long_and_a_wrong_key_are_errors() -> None:
    async with a_backend() as (backend, server):
        server.context_tokens = 4
        with pytest.raises(ContextExceeded):
            await everything(backend)
        server.key = "right"
        with pytest.raises(BackendFailed, match="let the router in"):
            await everything(backend)


def test_ids_of_log_probabilities_are_read() -> None:
    entry = {"token": "A", "token_id": 39, "logprob": -2.0, "top_logprobs": [{"token": "B", "logprob": -3.0}]}
    (delta,) = deltas_of({"choices": [{"index": 0, "delta": {"content": "A"}, "logprobs": {"content": [entry]}}]})
    assert delta.logprobs == (TokenLogprob(39, "A", -2.0, (TokenLogprob(0, "B", -3.0),)),)
