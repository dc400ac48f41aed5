"""Required formats of answers, in all the fields that clients have for them."""

from __future__ import annotations

from typing import Any

import pytest

from policies.errors import InvalidRequest
from policies.nouns import Grammar
from router.protocols.openai.request import chat_ask, completion_ask

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
WRITTEN = '{"type":"object","properties":{"b":{"type":"string"},"a":{}}}'
ANY = '{"type":"object"}'


def shaped(**fields: Any) -> Grammar | None:
    """The same in chats and texts."""
    chat = chat_ask({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}).sampling.grammar
    assert completion_ask({"model": "m", "prompt": "Hi", **fields}).sampling.grammar == chat
    return chat


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", ANY, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Grammar("json_schema", WRITTEN, "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            Grammar("json_schema", "", "response_format"),
        ),
        ({"response_format": {"type": "json_schema"}}, Grammar("json_schema", "", "response_format")),
        ({"response_format": {"type": "structural_tag"}}, Grammar("structural_tag", "", "response_format")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", WRITTEN, "structured_outputs.json")),
        ({"structured_outputs": {"json": "{}"}}, Grammar("json_schema", "{}", "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", ANY, "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, Grammar("choice", '["ä","b"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: X"}}, Grammar("rules", "start: X", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            Grammar("structural_tag", "", "structured_outputs.structural_tag"),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", WRITTEN, "guided_json")),
        ({"guided_regex": "a"}, Grammar("regex", "a", "guided_regex")),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]', "guided_choice")),
        ({"guided_grammar": "x"}, Grammar("rules", "x", "guided_grammar")),
    ],
)
def test_every_spelling_of_a_grammar_is_read(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert shaped(**fields) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": 5}, "guided_json"),
    ],
)
def test_two_grammars_or_an_empty_one_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shaped(**fields)
    assert caught.value.param == param
