from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.mlc import MLC
from policies.errors import ContextExceeded, InvalidRequest
from policies.nouns import Prompt, Sampling
from tests.backends.parts import a_request, everything
from tests.standins.mlc import MLCServer
from tests.standins.standin import running

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def a_backend(server: MLCServer | None = None) -> AsyncIterator[tuple[MLC, MLCServer]]:
    async with running(server or MLCServer()) as standin:
        backend = MLC("b", standin.url, pool="p")
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_two_requests_of_one_user_do_not_meet_in_the_engine() -> None:
    async with a_backend() as (backend, server):
        body = {"model": "m", "messages": MESSAGES, "user": "u", "debug_config": {"x": 1}, "max_completion_tokens": 9}
        await everything(backend, prompt=Prompt(body=body))
    sent = server.received[0].body
    assert sent == {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 9,
    }


async def test_a_shape_goes_as_mlc_spells_it() -> None:
    schema = {"type": "object"}
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    async with a_backend() as (backend, server):
        await everything(backend, prompt=Prompt(body={"model": "m", "messages": MESSAGES, "response_format": shape}))
    assert server.received[0].body["response_format"] == {"type": "json_object", "schema": json.dumps(schema)}


async def test_errors_inside_of_errors_are_unwrapped() -> None:
    async with a_backend(MLCServer(context_tokens=4)) as (backend, server):
        with pytest.raises(ContextExceeded, match=r"^Request prompt has 5 tokens in total"):
            await everything(backend)
        server.context_tokens = 4096
        with pytest.raises(InvalidRequest, match=r'^The requested model "x" is not served'):
            await everything(backend, a_request(model="x"), Prompt(body={"model": "x", "messages": MESSAGES}))


@pytest.mark.parametrize(
    ("sampling", "body", "param"),
    [
        (Sampling(top_k=3), {}, "top_k"),
        (Sampling(), {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages"),
    ],
)
async def test_what_it_would_skip_or_cannot_read_is_refused(
    sampling: Sampling, body: dict[str, Any], param: str
) -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), Prompt(body={"messages": MESSAGES, **body}))
    assert failure.value.param == param
