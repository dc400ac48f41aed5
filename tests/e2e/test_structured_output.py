"""Answers of our own shards that are held to a schema, as official clients ask for them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import grpc
import jsonschema
import openai
import pydantic
import pytest

from router.protocols.grpc.v1 import inference_pb2 as wire
from router.protocols.grpc.v1 import inference_pb2_grpc as services
from shards.bundled import weights
from shards.model import Model
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole

QUESTION = "The keeper of the Amber mill is Ada Holm.\n\nQuestion: Who is the keeper of the Amber mill?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"keeper": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["keeper", "sure"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "keeper", "schema": SCHEMA, "strict": True}}


class Keeper(pydantic.BaseModel):
    """A mill and its keeper."""

    keeper: Literal["Ada Holm", "Hugo Lund"]
    mills: int = pydantic.Field(ge=1, le=9)


@pytest.fixture
async def whole() -> AsyncIterator[Whole]:
    async with a_whole(1) as whole:
        yield whole
        await whole.check_idle()


@pytest.fixture
async def client(whole: Whole) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{whole.router.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEYS["acme"], max_retries=0) as client:
        yield client


async def test_a_json_schema_holds(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, max_tokens=200, temperature=0
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


async def test_a_streamed_one_holds_too_for_every_choice(client: openai.AsyncOpenAI) -> None:
    texts = ["", "", ""]
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, n=3, seed=1, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


async def test_a_pydantic_model_is_parsed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Keeper, max_tokens=300, temperature=0
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.keeper == "Ada Holm"


async def test_any_object_will_do_for_json_mode(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.message.content or "").startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{4}-[0-9]"}}, "[a-c]{4}-[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "north" | "south"'}}, "north|south"),
        ({"guided_choice": ["Ada", "Hugo"]}, "Ada|Hugo"),
    ],
)
async def test_vllms_extensions_hold(client: openai.AsyncOpenAI, extra: dict[str, Any], pattern: str) -> None:
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra, seed=5)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = await client.completions.create(model=MODEL, prompt=QUESTION, extra_body=extra, seed=6)
    assert re.fullmatch(pattern, text.choices[0].text)


async def test_responses_hold_too(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.parse(model=MODEL, input=QUESTION, text_format=Keeper, temperature=0)
    assert answer.output_parsed is not None
    assert 1 <= answer.output_parsed.mills <= 9


async def test_anthropics_output_config_holds(whole: Whole) -> None:
    async with anthropic.AsyncAnthropic(base_url=whole.router.http_url, api_key=KEYS["acme"], max_retries=0) as client:
        answer = await client.messages.create(
            model=MODEL,
            max_tokens=600,
            extra_body={"temperature": 0},
            messages=MESSAGES,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
    (block,) = answer.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)


async def test_what_cannot_be_held_to_is_refused_before_anything_is_computed(
    whole: Whole, client: openai.AsyncOpenAI
) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=shape, stream=True)
    assert caught.value.param == "response_format"
    assert "uniqueItems" in caught.value.message


async def test_it_is_refused_by_the_name_that_it_has_in_the_clients_dialect(
    whole: Whole, client: openai.AsyncOpenAI
) -> None:
    shape: Any = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format") as refused:
        await client.responses.create(model=MODEL, input=QUESTION, text={"format": shape})
    assert refused.value.param == "text.format"
    async with anthropic.AsyncAnthropic(base_url=whole.router.http_url, api_key=KEYS["acme"], max_retries=0) as other:
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format.*not"):
            await other.messages.create(
                model=MODEL,
                max_tokens=9,
                messages=MESSAGES,
                output_config={"format": {"type": "json_schema", "schema": {"not": {}}}},
            )


async def test_grpc_holds_too(whole: Whole) -> None:
    chat = wire.Messages(messages=[wire.Message(role="user", content=QUESTION)])
    metadata = [("x-api-key", KEYS["acme"])]
    async with grpc.aio.insecure_channel(str(whole.router.grpc_address)) as channel:
        stub = services.InferenceStub(channel)
        answer = await stub.Complete(
            wire.GenerateRequest(model=MODEL, chat=chat, response_format_json=json.dumps(FORMAT)), metadata=metadata
        )
        jsonschema.validate(json.loads(answer.answers[0].text), SCHEMA)
        answer = await stub.Complete(
            wire.GenerateRequest(model=MODEL, prompt=QUESTION, structured_outputs_json='{"choice": ["up", "down"]}'),
            metadata=metadata,
        )
        assert answer.answers[0].text in ("up", "down")


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "give_up", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture
async def with_tools(tmp_path: Path) -> AsyncIterator[Whole]:
    """The bundled model, with Hermes' format of tool calls in its checkpoint."""
    folder = shutil.copytree(weights(), tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"] + "{# <tool_call> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    async with a_whole(1, model=Model.load(folder, name=MODEL)) as whole:
        yield whole
        await whole.check_idle()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
async def test_a_call_can_be_forced(with_tools: Whole, choice: Any) -> None:
    base_url = f"{with_tools.router.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEYS["acme"], max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "seed": 2, "max_tokens": 200}
        answer = await client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "look_up" or choice == "required"
    if call.function.name == "look_up":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


async def test_anthropics_client_can_force_one_too(with_tools: Whole) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=with_tools.router.http_url, api_key=KEYS["acme"], max_retries=0
    ) as client:
        answer = await client.messages.create(
            model=MODEL,
            max_tokens=300,
            messages=MESSAGES,
            tools=[{"name": "look_up", "input_schema": SCHEMA}],
            tool_choice={"type": "tool", "name": "look_up"},
        )
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
