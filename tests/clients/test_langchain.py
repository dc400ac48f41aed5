"""LangChain against a router; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.serving import KEY, KINDS, MODEL, PARAMETERS, a_router
from tests.standins.standin import TEXT

langchain_openai: Any = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.filterwarnings("default")

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}


@KINDS
@pytest.mark.parametrize("uses_responses", [False, True])
async def test_a_chat_streams_with_calls_of_tools_and_usage(uses_responses: bool, kind: str) -> None:
    async with a_router(kind) as url:
        chat = langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key=KEY, model=MODEL, stream_usage=True, use_responses_api=uses_responses
        )
        whole = await chat.ainvoke("Hello")
        answer = None
        async for piece in chat.bind_tools([WEATHER]).astream("Weather?"):
            answer = piece if answer is None else answer + piece
    assert whole.text == TEXT
    assert answer is not None
    assert answer.text == TEXT
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"at": "Köln"})]
    assert answer.usage_metadata["output_tokens"] > 0


async def test_texts_are_embedded() -> None:
    async with a_router() as url:
        embedder = langchain_openai.OpenAIEmbeddings(
            base_url=f"{url}/v1", api_key=KEY, model="text-embedding-3-small", check_embedding_ctx_length=False
        )
        vectors = await embedder.aembed_documents(["a", "b"])
    assert vectors == [[0.0, 0.5], [1.0, 0.5]]


@KINDS
async def test_anthropics_dialect_streams_with_calls_of_tools(kind: str) -> None:
    langchain_anthropic: Any = pytest.importorskip("langchain_anthropic")
    async with a_router(kind) as url:
        chat = langchain_anthropic.ChatAnthropic(base_url=url, api_key=KEY, model="claude", max_tokens=300)
        answer = None
        async for piece in chat.bind_tools([WEATHER]).astream("Weather?"):
            answer = piece if answer is None else answer + piece
    assert answer is not None
    assert answer.text == TEXT
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"at": "Köln"})]
