"""Prompts at and far beyond the model's context, as clients send them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.protocols.openai.fields import MOST_MESSAGES, MOST_TOOLS
from router.text.cuts import MOST_PIECE_CHARACTERS
from tests.router.call.test_model_text import with_pool
from tests.router.parts import (
    CHAT,
    COMPLETIONS,
    CONTEXT_TOKENS,
    MODEL,
    ScriptedBackend,
    a_chat,
    a_client,
    a_router,
    a_tokenizer,
)
from tests.router.text.kinds import a_kind
from tests.router.text.test_checkpoint import a_checkpoint

LONG = "the lazy dog " * 60_000
MESSAGES = "/v1/messages"


def a_prompt(tokens: int) -> dict[str, Any]:
    """A body with a prompt of so many tokens."""
    text = " the" * (tokens - 1)
    assert len(a_tokenizer().encode(text).ids) == tokens
    return {"model": MODEL, "prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, a_chat(LONG)),
        (COMPLETIONS, {"model": MODEL, "prompt": LONG, "max_tokens": 5}),
        (COMPLETIONS, {"model": MODEL, "prompt": ["short", LONG]}),
        (MESSAGES, {**a_chat(LONG), "max_tokens": 5}),
        (CHAT, a_chat(tools=[{"type": "function", "function": {"name": "f", "description": LONG}}])),
    ],
    ids=["chat", "text", "texts", "anthropic", "tools"],
)
async def test_a_prompt_far_beyond_the_context_is_refused_with_the_tokens_that_it_has_at_least(
    path: str, body: dict[str, Any]
) -> None:
    backend = ScriptedBackend()
    async with a_router(backend) as router, a_client(router) as client:
        status, reply = await client.answer(path, body)
        assert (await client.answer(CHAT, a_chat()))[0] == 200
    message = reply["error"]["message"]
    assert status == 400
    if path == MESSAGES:
        assert message.startswith("prompt is too long: ")
    assert f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, you" in message
    assert re.search(r"at least \d+ input tokens", message)
    assert message.endswith(" of 'tiny' (shorten the prompt)")
    assert len(backend.requests) == 1


async def test_a_prompt_fits_that_leaves_one_token_for_the_answer() -> None:
    backend = ScriptedBackend()
    async with a_router(backend) as router, a_client(router) as client:
        assert (await client.answer(COMPLETIONS, a_prompt(CONTEXT_TOKENS - 1)))[0] == 200
        status, reply = await client.answer(COMPLETIONS, a_prompt(CONTEXT_TOKENS))
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert reply["error"]["message"].startswith(f"This model's maximum context length is {CONTEXT_TOKENS} ")
    (request,) = backend.requests
    assert (request.prompt_tokens, request.max_new_tokens) == (CONTEXT_TOKENS - 1, 1)


async def test_a_long_prompt_is_read_whole_where_it_is_to_be_truncated_or_only_counted() -> None:
    backend = ScriptedBackend()
    async with a_router(backend) as router, a_client(router) as client:
        truncated = {"model": MODEL, "prompt": LONG, "truncate_prompt_tokens": 20, "max_tokens": 5}
        assert (await client.answer(COMPLETIONS, truncated))[0] == 200
        status, counted = await client.answer("/tokenize", {"model": MODEL, "prompt": LONG})
    assert backend.requests[0].prompt_tokens == 20
    assert (status, counted["count"]) == (200, len(a_tokenizer().encode(LONG).ids))


async def test_a_long_text_without_a_place_to_cut_it_is_left_to_engines_and_refused_by_shards(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    # this one composes characters, so that no bound on its tokens is certain
    (tmp_path / "tokenizer.json").write_text(a_kind("qwen").to_str())
    body = {"model": MODEL, "prompt": "-" * (MOST_PIECE_CHARACTERS + 1)}
    engine, shard = ScriptedBackend(speaks_tokens=False, context_tokens=10**6), ScriptedBackend(context_tokens=10**6)
    config = with_pool(str(tmp_path))
    async with a_router(engine, config=config) as router, a_client(router) as client:
        assert (await client.answer(COMPLETIONS, body))[0] == 200
    async with a_router(shard, config=config) as router, a_client(router) as client:
        status, reply = await client.answer(COMPLETIONS, body)
    assert engine.requests[0].least_prompt_tokens is not None
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert "break it into lines or words" in reply["error"]["message"]


async def test_more_messages_than_any_conversation_has_are_refused_before_they_are_read() -> None:
    body = a_chat() | {"messages": [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)}
    async with a_router() as router, a_client(router) as client:
        status, reply = await client.answer(CHAT, data=json.dumps(body, separators=(",", ":")))
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert str(MOST_MESSAGES) in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (CHAT, {"type": "function", "function": {"name": "f"}}),
        ("/v1/messages", {"name": "f", "input_schema": {}}),
        ("/v1/messages/count_tokens", {"name": "f", "input_schema": {}}),
        ("/v1/responses", {"type": "function", "name": "f"}),
    ],
)
async def test_more_tools_than_any_model_takes_are_refused_before_they_are_read(path: str, tool: Any) -> None:
    asked = {"model": MODEL, "input": "hi"} if "responses" in path else a_chat(max_tokens=5)
    async with a_router() as router, a_client(router) as client:
        said = []
        for count in (MOST_TOOLS, MOST_TOOLS + 1):
            body = json.dumps(asked | {"tools": [tool] * count}, separators=(",", ":"))
            said.append(str(await client.answer(path, data=body)))
    # so many are read: they are counted, or too long for this model
    assert f"length <= {MOST_TOOLS}" not in said[0]
    assert f"length <= {MOST_TOOLS}" in said[1]
