"""LiteLLM's SDK against a router; skipped where it is not installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.serving import KEY, KINDS, MODEL, PARAMETERS, a_router
from tests.standins.standin import TEXT

litellm: Any = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("default")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
MESSAGES = [{"role": "user", "content": "Weather?"}]


@KINDS
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_chat_streams_with_calls_of_tools(dialect: str, kind: str) -> None:
    async with a_router(kind) as url:
        base = f"{url}/v1" if dialect == "openai" else url
        model = MODEL if dialect == "openai" else "claude"
        asked: dict[str, Any] = {"model": f"{dialect}/{model}", "api_base": base, "api_key": KEY, "max_tokens": 300}
        whole = await litellm.acompletion(messages=MESSAGES, **asked)
        stream = await litellm.acompletion(messages=MESSAGES, tools=TOOLS, stream=True, **asked)
        answer = litellm.stream_chunk_builder([piece async for piece in stream])
    assert whole.choices[0].message.content == TEXT
    message = answer.choices[0].message
    assert message.content == TEXT
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"at": "Köln"})
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_texts_are_embedded() -> None:
    async with a_router() as url:
        reply = await litellm.aembedding(
            model="openai/text-embedding-3-small", input=["a", "b"], api_base=f"{url}/v1", api_key=KEY
        )
    assert [entry["embedding"] for entry in reply.data] == [[0.0, 0.5], [1.0, 0.5]]


async def test_a_wrong_key_is_litellms_own_error() -> None:
    async with a_router() as url:
        with pytest.raises(litellm.AuthenticationError):
            await litellm.acompletion(model=f"openai/{MODEL}", messages=MESSAGES, api_base=f"{url}/v1", api_key="x")
