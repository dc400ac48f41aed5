"""The schema of an answer, wherever clients write it, for every kind of backend that is told of it in other words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backends.anthropic.prompt import messages_body
from backends.mlc import own_fields
from backends.ollama.body import chat_body as ollama_body
from backends.openai.answer_schema import schema_in
from backends.tgi.backend import chat_body as tgi_body
from policies.nouns import Prompt
from router.protocols.openai.request import chat_ask
from tests.backends.parts import a_request

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
SPELLINGS: dict[str, dict[str, Any]] = {
    "OpenAI": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    "llama.cpp": {"type": "json_schema", "schema": SCHEMA},
    "Together, Fireworks": {"type": "json_object", "schema": SCHEMA},
    "TGI": {"type": "json_object", "value": SCHEMA},
}
"""Who writes it so, and how. Sources: llama.cpp's tools/server/README.md, llama-cpp-python#1122, litellm#29604."""


def at_anthropic(body: dict[str, Any]) -> Any:
    return messages_body(a_request(), Prompt(body=body), "m")["output_config"]["format"]["schema"]


def at_mlc(body: dict[str, Any]) -> Any:
    return json.loads(own_fields(a_request(), body)["response_format"]["schema"])


def at_tgi(body: dict[str, Any]) -> Any:
    value = tgi_body(a_request(), body, None)["response_format"]["value"]
    return value.get("schema", value)


def at_ollama(body: dict[str, Any]) -> Any:
    return ollama_body(a_request(), body)["format"]


def at_shards(body: dict[str, Any]) -> Any:
    grammar = chat_ask(body).sampling.grammar
    assert grammar is not None
    return json.loads(grammar.text)


@pytest.mark.parametrize("told", [at_shards, at_anthropic, at_mlc, at_ollama, at_tgi])
@pytest.mark.parametrize("shape", SPELLINGS.values(), ids=SPELLINGS)
def test_a_schema_holds_wherever_a_client_writes_it(shape: dict[str, Any], told: Callable[[Any], Any]) -> None:
    assert told({**CHAT, "response_format": shape}) == SCHEMA


@pytest.mark.parametrize(
    "shape", [{}, {"type": "json_object"}, {"json_schema": None}, {"json_schema": {"name": "p"}}, {"json_schema": "p"}]
)
def test_where_there_is_none_there_is_none(shape: dict[str, Any]) -> None:
    assert schema_in(shape) is None
