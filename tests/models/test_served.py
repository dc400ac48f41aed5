"""Real models behind a router, as official clients ask for them: conversations, schemas and tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai

from shards.engine import EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams
from tests.e2e.cluster import KEYS, a_whole
from tests.models.real import QUESTIONS, chat, tokenizer_of
from tests.models.truth import Truth

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"enum": ["France", "Italy"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city now.", "parameters": WEATHER},
    }
]
ASKED = "What is the weather in Paris, in celsius?"


@asynccontextmanager
async def asked(model: Model) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a router in front of a shard with this model."""
    async with a_whole(1, model=model, options=EngineOptions(kv_blocks=64)) as whole:
        base_url = f"{whole.router.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEYS["acme"], max_retries=0) as client:
            yield client
        await whole.check_idle()


async def test_a_conversation_whole_and_streamed_is_that_of_transformers(
    model: Model, truth: Truth, tokenizer: Any
) -> None:
    turns = (QUESTIONS[0], "The capital of France is Paris.", "And of Italy?")
    messages: Any = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    async with asked(model) as client:
        options: dict[str, Any] = {"model": model.name, "messages": messages, "max_tokens": 12, "temperature": 0}
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    prompt, text = chat(tokenizer, *turns), whole.choices[0].message.content or ""
    assert "".join(pieces) == text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    assert truth.objections(prompt, tokenizer.encode(text), SamplingParams()) == []


async def test_a_schema_holds_and_a_stop_string_ends(model: Model) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    messages: Any = [{"role": "user", "content": "Which city is the capital of France? Answer as JSON."}]
    async with asked(model) as client:
        answer = await client.chat.completions.create(
            model=model.name, messages=messages, response_format=form, max_tokens=60, temperature=0
        )
        stopped = await client.chat.completions.create(
            model=model.name, messages=messages[:1], stop=[" "], max_tokens=20, temperature=0
        )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), CITY)
    assert stopped.choices[0].finish_reason == "stop"
    assert " " not in (stopped.choices[0].message.content or "")


async def test_tools_are_called_as_asked_and_their_results_are_read(qwen: Path) -> None:
    model, tokenizer = Model.load(qwen), tokenizer_of(qwen)
    messages: Any = [{"role": "user", "content": ASKED}]
    options: dict[str, Any] = {"model": model.name, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with asked(model) as client:
        for choice in ("auto", "required", named):
            answer = await client.chat.completions.create(**options, messages=messages, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls or ()
            assert (answer.choices[0].finish_reason, call.function.name) in (
                ("tool_calls", "get_weather"),
                ("stop", "get_weather"),
            )
            assert json.loads(call.function.arguments)["city"] == "Paris"
        stream = await client.chat.completions.create(**options, messages=messages, tool_choice="required", stream=True)
        deltas = [each async for chunk in stream for one in chunk.choices for each in one.delta.tool_calls or ()]
        assert json.loads("".join(each.function.arguments or "" for each in deltas))["city"] == "Paris"
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 31}'}
        told = [*messages, answer.choices[0].message.model_dump(exclude_none=True), result]
        last = await client.chat.completions.create(**options, messages=told)
    assert "31" in (last.choices[0].message.content or "")
    assert last.usage is not None
    asked_of_theirs: Any = [
        *messages,
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": json.loads(call.function.arguments)}}],
        },
        {"role": "tool", "content": '{"temperature": 31}'},
    ]
    theirs = tokenizer.apply_chat_template(asked_of_theirs, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert last.usage.prompt_tokens == len(theirs)
