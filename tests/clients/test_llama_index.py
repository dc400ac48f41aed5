"""LlamaIndex against a router; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.serving import KEY, KINDS, MODEL, a_router
from tests.standins.standin import TEXT

openai_like: Any = pytest.importorskip("llama_index.llms.openai_like")
pytestmark = pytest.mark.filterwarnings("default")


def weather(at: str) -> str:
    """Tells the weather."""
    return f"wet at {at}"


@KINDS
async def test_a_chat_streams_with_calls_of_tools(kind: str) -> None:
    tools: Any = pytest.importorskip("llama_index.core.tools")
    async with a_router(kind) as url:
        model = openai_like.OpenAILike(
            api_base=f"{url}/v1", api_key=KEY, model=MODEL, is_chat_model=True, is_function_calling_model=True
        )
        whole = await model.acomplete("Hello")
        stream = await model.astream_chat_with_tools([tools.FunctionTool.from_defaults(weather)], user_msg="Weather?")
        pieces = [piece async for piece in stream]
    assert whole.text == TEXT
    assert "".join(piece.delta or "" for piece in pieces) == TEXT
    calls = model.get_tool_calls_from_response(pieces[-1])
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [("weather", {"at": "Köln"})]


async def test_texts_are_embedded() -> None:
    embeddings: Any = pytest.importorskip("llama_index.embeddings.openai_like")
    async with a_router() as url:
        model = "text-embedding-3-small"
        embedder = embeddings.OpenAILikeEmbedding(api_base=f"{url}/v1", api_key=KEY, model_name=model)
        assert await embedder.aget_text_embedding("a") == [0.0, 0.5]
