"""Tools and backends that draw tokens only: calls are read out of text, in the format of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anthropic
import openai
import pytest

from policies.nouns import Delta, Usage
from tests.router.parts import KEY, MODEL, TEMPLATE, ScriptedBackend, a_router, a_tokenizer

PARAMETERS = {"type": "object", "properties": {}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Bonn"}}\n</tool_call>'


class Hermes(ScriptedBackend):
    def assets(self) -> Mapping[str, bytes]:
        if not self.speaks_tokens:
            return {}
        settings = {"bos_token": "<s>", "chat_template": TEMPLATE + "{# <tool_call> #}"}
        text = a_tokenizer().to_str().encode()
        return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(settings).encode()}


def saying(text: str, **options: Any) -> Hermes:
    deltas: list[Any] = [Delta(text=letter, token_ids=(1,)) for letter in text]
    script = [*deltas, Delta(finish_reason="stop", usage=Usage(3, len(text)))]
    return Hermes(scripts=[list(script), list(script)], **options)


def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_official_client_gets_tool_calls(is_streamed: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with a_router(saying("I look." + CALL)) as router, official(router.http_url) as client:
        if is_streamed:
            async with client.chat.completions.stream(**asked) as stream:
                await stream.until_done()
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"at": "Bonn"})


async def test_anthropics_client_gets_them_too() -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": {"type": "object"}}]
    client = anthropic.AsyncAnthropic
    async with a_router(saying(CALL)) as router, client(base_url=router.http_url, api_key=KEY) as caller:
        answer = await caller.messages.create(
            model=MODEL, max_tokens=99, messages=[{"role": "user", "content": "hi"}], tools=tools
        )
    (block,) = answer.content
    assert block.type == "tool_use"
    assert (block.name, block.input, answer.stop_reason) == ("weather", {"at": "Bonn"}, "tool_use")


async def test_without_tools_the_same_text_is_text() -> None:
    async with a_router(saying(CALL)) as router, official(router.http_url) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == CALL


async def test_a_backend_that_was_sent_the_tools_is_left_to_read_its_own_text() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with a_router(saying(CALL, speaks_tokens=False)) as router, official(router.http_url) as client:
        answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == CALL
