"""Official clients against kinds of backends that answer in dialects of their own, streamed, with calls of tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from shards.nouns import Submission
from shards.scripted import ScriptedEngine, ScriptedModel
from shards.wire.translate import unpack_ids
from tests.backends.parts import END, a_model_folder, a_tokenizer, ids_of
from tests.shards.attached import a_shard
from tests.standins.anthropic import AnthropicServer
from tests.standins.standin import TEXT, running
from tests.standins.vllm import VLLMServer

ARGUMENTS = '{"at": "Köln"}'
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{{ tools | tojson if tools }}"
)
SLA = """
tenants: {{acme: {{keys: ["${{env:CLIENT_KEY}}"]}}}}
pools:
  own: {{kind: {kind}, at: ["{address}"]{more}}}
server: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
"""


def says(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
    """The answer of a model with Hermes' format: a call, unless it has the result of one."""
    has_result = "<tool>wet" in a_tokenizer().decode(list(unpack_ids(prompt)))
    call = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    return ids_of(TEXT + ("" if has_result else call) + END)


@asynccontextmanager
async def behind(kind: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """An address of a `kind` of backend, and what the file says of it besides."""
    async with AsyncExitStack() as stack:
        if kind == "shard":
            a_model_folder(folder)
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
            engine = ScriptedEngine(says, model=ScriptedModel(name="m", path=folder))
            yield (await stack.enter_async_context(a_shard(engine))).address, ""
        elif kind == "vllm":
            yield (await stack.enter_async_context(running(VLLMServer(arguments=ARGUMENTS)))).url, ", model: m"
        else:
            server = AnthropicServer(arguments=ARGUMENTS, thinks="Hm.", key="theirs")
            yield (await stack.enter_async_context(running(server))).url, ', model: m, key: "${env:THEIR_KEY}"'


@pytest.fixture(params=["shard", "vllm", "anthropic"])
async def router(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Router]:
    async with behind(request.param, tmp_path) as (address, more):
        environment = {"CLIENT_KEY": "client-key", "THEIR_KEY": "theirs"}
        config = parse(SLA.format(kind=request.param, address=address, more=more), environment=environment)
        async with Router(config) as router:
            assert await router.wait_until_reached(10)
            yield router
            router.check()


PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}


async def test_openais_client_holds_a_conversation_with_a_tool(router: Router) -> None:
    function = {"name": "weather", "strict": True, "parameters": PARAMETERS}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="client-key", max_retries=0) as client:
        async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
            await stream.until_done()
            choice = (await stream.get_final_completion()).choices[0]
        assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
        (call,) = choice.message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"at": "Köln"})
        called = {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        turn = {"role": "assistant", "content": TEXT, "tool_calls": [called]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
        last = await client.chat.completions.create(model="m", messages=[*messages, turn, result], tools=tools)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (TEXT, "stop")
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


async def test_anthropics_client_holds_a_conversation_with_a_tool(router: Router) -> None:
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": "m", "max_tokens": 300, "tools": tools}
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key="client-key", max_retries=0) as client:
        async with client.messages.stream(messages=messages, **asked) as stream:
            answer = await stream.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert (text, call.name, call.input, answer.stop_reason) == (TEXT, "weather", {"at": "Köln"}, "tool_use")
        turn = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "wet"}
        history: list[Any] = [*messages, turn, {"role": "user", "content": [result]}]
        last = await client.messages.create(messages=history, **asked)
    assert last.content[-1].type == "text"
    assert (last.content[-1].text, last.stop_reason) == (TEXT, "end_turn")
    assert last.usage.output_tokens > 0


async def test_the_responses_api_holds_a_conversation_with_a_tool(router: Router) -> None:
    tools: Any = [{"type": "function", "name": "weather", "strict": True, "parameters": PARAMETERS}]
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="client-key", max_retries=0) as client:
        async with client.responses.stream(model="m", input="Weather?", tools=tools) as stream:
            answer = await stream.get_final_response()
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert (answer.output_text, call.name, json.loads(call.arguments)) == (TEXT, "weather", {"at": "Köln"})
        items: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "wet"},
        ]
        last = await client.responses.create(model="m", input=items, tools=tools)
    assert (last.output_text, last.status) == (TEXT, "completed")
