from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.deepspeed_mii import DeepSpeedMII
from backends.openai.compatible import OpenAIOptions
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest
from policies.nouns import Prompt, Sampling, Usage
from tests.backends.parts import a_request, everything
from tests.standins.deepspeed_mii import MIIServer
from tests.standins.standin import TEXT, running

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def a_backend(server: MIIServer | None = None, **options: Any) -> AsyncIterator[tuple[DeepSpeedMII, MIIServer]]:
    async with running(server or MIIServer()) as standin:
        backend = DeepSpeedMII("b", standin.url, pool="p", options=OpenAIOptions(**options))
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_the_number_of_tokens_is_always_sent_and_greedy_is_a_top_k_of_one() -> None:
    async with a_backend() as (backend, server):
        request = a_request(sampling=Sampling(temperature=0), max_new_tokens=50)
        body = {"model": "m", "messages": MESSAGES, "temperature": 0, "top_k": -1, "max_completion_tokens": 50}
        deltas = await everything(backend, request, Prompt(body=body))
    assert server.received[0].body == {"model": "m", "messages": MESSAGES, "max_tokens": 50, "top_k": 1, "stream": True}
    assert deltas[-1].usage == Usage(5, len(TEXT), is_guess=True), "where the server tells none it is estimated"


@pytest.mark.parametrize(
    ("sampling", "body", "param"),
    [
        (Sampling(seed=1), {}, "seed"),
        (Sampling(presence_penalty=1), {}, "presence_penalty"),
        (Sampling(stop=("a", "b")), {}, "stop"),
        (Sampling(), {"tools": [{"type": "function"}]}, "tools"),
        (Sampling(), {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_it_would_skip_is_refused(sampling: Sampling, body: dict[str, Any], param: str) -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), Prompt(body={"messages": MESSAGES, **body}))
    assert failure.value.param == param


async def test_a_prompt_that_would_break_the_answer_off_is_refused_where_the_context_is_known() -> None:
    async with a_backend(context_tokens=100) as (backend, server):
        with pytest.raises(ContextExceeded):
            await everything(backend, a_request(prompt_tokens=100))
    assert server.received == []


async def test_a_model_or_key_that_is_wrong_and_a_server_that_is_ill() -> None:
    async with a_backend(MIIServer(key="k")) as (backend, server):
        with pytest.raises(BackendFailed):
            await everything(backend)
        server.key = None
        with pytest.raises(InvalidRequest, match="not found"):
            await everything(backend, a_request(model="x"), Prompt(body={"model": "x", "messages": MESSAGES}))
        server.is_ill = True
        with pytest.raises(BackendFailed, match="not well"):
            await backend.probe()
