from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.openai.backend import OpenAI, OpenAIAPIOptions
from backends.openai.pooled import EMBEDDINGS_PATH
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Prompt, Sampling
from tests.backends.parts import a_request, everything, text_of
from tests.standins.openai import OpenAIAPI
from tests.standins.standin import TEXT, running

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def a_backend(server: OpenAIAPI | None = None, **options: Any) -> AsyncIterator[tuple[OpenAI, OpenAIAPI]]:
    async with running(server or OpenAIAPI()) as standin:
        seconds = iter(float(second) for second in range(0, 1000, 20))
        backend = OpenAI("o", standin.url, pool="p", options=OpenAIAPIOptions(**options), clock=seconds.__next__)
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_words_of_open_models_are_left_out_or_respelt() -> None:
    hinted = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        *MESSAGES,
    ]
    body = {
        "messages": hinted,
        "max_tokens": 50,
        "chat_template_kwargs": {"enable_thinking": True},
        "top_k": -1,
        "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}],
    }
    async with a_backend() as (backend, server):
        deltas = await everything(backend, prompt=Prompt(body={"model": "m", **body}))
    assert text_of(deltas) == TEXT
    sent = server.received[0].body
    assert sent == {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            *MESSAGES,
        ],
        "max_completion_tokens": 50,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }


@pytest.mark.parametrize(
    ("sampling", "param"),
    [(Sampling(top_k=5), "top_k"), (Sampling(min_p=0.5), "min_p"), (Sampling(ignore_eos=True), "ignore_eos")],
)
async def test_what_would_change_the_answer_is_refused_by_name(sampling: Sampling, param: str) -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling))
    assert failure.value.param == param


async def test_a_message_that_is_to_be_continued_is_refused() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest, match="continues no message"):
            await everything(backend, prompt=Prompt(body={"messages": MESSAGES, "continue_final_message": True}))


async def test_an_unknown_argument_is_refused_in_openais_own_words() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest, match="Unrecognized request argument supplied: vendor"):
            await everything(backend, prompt=Prompt(body={"model": "m", "messages": MESSAGES, "vendor": 1}))


async def test_key_organization_and_project_are_sent_in_headers() -> None:
    async with a_backend(OpenAIAPI(key="k"), key="k", organization="org", project="proj") as (backend, server):
        await everything(backend)
    headers = server.received[0].headers
    assert headers["authorization"] == "Bearer k"
    assert (headers["openai-organization"], headers["openai-project"]) == ("org", "proj")


async def test_a_wrong_key_is_an_error() -> None:
    async with a_backend(OpenAIAPI(key="k"), key="x") as (backend, _):
        with pytest.raises(BackendFailed, match="does not let the router in"):
            await everything(backend)


async def test_its_models_are_not_asked_for_at_every_probe() -> None:
    class Counting(OpenAIAPI):
        asked = 0

        async def list_models(self, request: Any) -> Any:
            self.asked += 1
            return await super().list_models(request)

    async with a_backend(Counting(), asks_every_s=30) as (backend, server):
        assert isinstance(server, Counting)
        for _ in range(4):
            await backend.probe()
        assert server.asked == 2
        await backend.client.close()


async def test_a_probe_that_failed_is_made_again_at_once() -> None:
    backend = OpenAI("o", "http://127.0.0.1:1", pool="p", clock=lambda: 0.0)
    for _ in range(2):
        with pytest.raises(BackendFailed):
            await backend.probe()
    await backend.close()


async def test_it_embeds() -> None:
    async with a_backend() as (backend, server):
        prompt = Prompt(body={"model": "m", "input": "Hello"}, path=EMBEDDINGS_PATH)
        (delta,) = await everything(backend, prompt=prompt)
    assert delta.body is not None
    assert server.received[0].body == {"model": "m", "input": "Hello"}
