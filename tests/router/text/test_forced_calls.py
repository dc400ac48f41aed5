"""Calls that must be made: whatever is drawn by their grammar is read as calls that fit the tools."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from backends.detokenize import CHANNEL_MARKS, TOOL_MARKS, TokenText, marks_of
from policies.nouns import Delta
from router.ask import Chat
from router.protocols.dialect import Answer
from router.text.forced_calls import grammar_of
from router.text.tokenize import How, Tokenizers
from router.text.tool_calls import reader_of
from router.text.tool_formats import (
    DEEPSEEK_3,
    DEEPSEEK_31,
    GLM_45,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_11,
    PHI_4,
    QWEN_3_CODER,
    ToolFormat,
    syntax_of,
)
from shards.exec.fake import FakeNetwork
from shards.grammar.compiler import Compiler
from shards.grammar.guide import Guide
from shards.model import Model
from shards.nouns import Grammar, GrammarForm
from tests.router.parts import MODEL, some_assets
from tests.shards.grammar.parts import TOKENIZER, end_id

WEATHER = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["at"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, 'o"dd.näme': {"enum": [{"a": 1}, {"b": "}"}]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": 'o"dd.näme', "parameters": SCHEMAS['o"dd.näme']}},
    {"type": "function", "function": {"name": "nothing"}},
]
NOTHING = {"type": "object", "maxProperties": 0}
FORMATS = {
    each.name: each
    for each in (HERMES, LLAMA, MISTRAL, MISTRAL_11, DEEPSEEK_3, DEEPSEEK_31, PHI_4, GLM_45, QWEN_3_CODER, HARMONY)
}
PLAIN = {"harmony", "qwen 3 coder", "mistral 11", "glm 4.5", "deepseek 3", "deepseek 3.1"}
"""Formats with names as they are, not in JSON."""


def a_tokenizer(marks: str) -> Tokenizer:
    """The bundled one, which has no marks, or has them as tokens of its own."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if marks != "text":
        is_special = marks == "special"
        tokenizer.add_tokens([AddedToken(mark, special=is_special) for mark in TOOL_MARKS])
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in CHANNEL_MARKS])
        tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[ARGS]", special=True)])
    return tokenizer


def the_guide(chat: Chat, tool_format: ToolFormat, tokenizer: Tokenizer) -> Guide:
    """The beginning of an answer to `chat`, as its grammar wants it."""
    grammar = grammar_of(chat, tool_format, tokenizer.token_to_id)
    assert grammar is not None
    assert (grammar.form, grammar.field) == ("rules", "tool_choice")
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    compiler = Compiler.of(Model("m", FakeNetwork(vocabulary=vocabulary), tokenizer, frozenset({end_id()})))
    assert compiler is not None
    return compiler.compile(Grammar(GrammarForm.RULES, grammar.text)).guide()


def drawn(chat: Chat, tool_format: ToolFormat, tokenizer: Tokenizer, seed: int) -> str | None:
    """Text that the grammar of `chat` lets through, at random; None if it did not end."""
    guide = the_guide(chat, tool_format, tokenizer)
    rng, text, answer_text = random.Random(seed), TokenText(tokenizer, marks_of(tokenizer, has_tools=True)), ""
    for _ in range(300):
        token = rng.choice(np.flatnonzero(guide.allowed()).tolist())
        guide.note(token)
        if token == end_id():
            return answer_text + text.flush()
        answer_text += text.push([token])
        if guide.is_over:
            return answer_text + text.flush()
    return None


def calls_in(answer_text: str, chat: Chat, tool_format: ToolFormat) -> tuple[str, list[tuple[str, str]]]:
    syntax, answer = syntax_of(chat, tool_format), Answer()
    assert syntax is not None
    reader = reader_of(syntax, str)
    for read in (reader.push(answer_text), reader.push("", is_last=True)):
        answer.add(Delta(text=read.text, message={"tool_calls": read.calls} if read.calls else None))
    calls = answer.message.get("tool_calls") or []
    return answer.text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("marks", ["text", "tokens", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_drawn_is_calls_and_nothing_else(name: str, marks: str) -> None:
    # names and arguments of pairs are letters, digits, _ and -, as OpenAI's API demands
    forced = {"weather", "nothing"} if name in PLAIN else {*SCHEMAS, "nothing"}
    chat = Chat([], TOOLS, forced=frozenset(forced))
    tokenizer, ended = a_tokenizer(marks), 0
    for seed in range(12):
        answer = drawn(chat, FORMATS[name], tokenizer, seed)
        if answer is None:
            continue
        ended += 1
        text, calls = calls_in(answer, chat, FORMATS[name])
        assert not text
        assert calls
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS.get(called, NOTHING))
    assert ended > 6


@pytest.mark.parametrize("behind", ["", "\n", " ", "\n\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_may_end_behind_its_last_call_with_or_without_white_space(name: str, behind: str) -> None:
    chat, tokenizer = Chat([], TOOLS, forced=frozenset({"nothing"})), a_tokenizer("special")
    guide = the_guide(chat, FORMATS[name], tokenizer)
    rng, tokens = random.Random(3), list[int]()
    while not (ends := guide.allowed()[end_id()]) and len(tokens) < 300:
        tokens.append(rng.choice(np.flatnonzero(guide.allowed()).tolist()))
        guide.note(tokens[-1])
    assert ends
    for letter in behind:
        # alone: at the beginning of a text some tokenizers write another space
        (number,) = tokenizer.encode(f"a{letter}").ids[1:]
        assert guide.allowed()[number]
        guide.note(number)
        tokens.append(number)
    assert guide.allowed()[end_id()] or guide.is_over
    text = TokenText(tokenizer, marks_of(tokenizer, has_tools=True))
    shown, calls = calls_in(text.push(tokens) + text.flush(), chat, FORMATS[name])
    assert (shown, set(calls)) == ("", {("nothing", "{}")})


@pytest.mark.parametrize("name", ["glm 4.5", "qwen 3 coder", "hermes"])
def test_arguments_that_refer_to_parts_of_their_schema_are_forced_by_it(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/unit"},
            "size": {"$ref": "#/$defs/size"},
            "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        },
        "required": ["unit", "size", "maybe"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["12", "13"]}, "size": {"type": "object", "maxProperties": 0}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = Chat([], [tool], forced=frozenset({"f"}), one_call=True)
    for seed in range(4):
        answer = drawn(chat, FORMATS[name], a_tokenizer("special"), seed)
        assert answer is not None
        text, ((_, arguments),) = calls_in(answer, chat, FORMATS[name])
        assert not text
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("name", FORMATS)
def test_only_one_call_of_the_named_tool_is_made(name: str) -> None:
    chat = Chat([], TOOLS, forced=frozenset({"nothing"}), one_call=True)
    answer = drawn(chat, FORMATS[name], a_tokenizer("special"), 1)
    assert answer is not None
    assert calls_in(answer, chat, FORMATS[name]) == ("", [("nothing", "{}")])


@pytest.mark.parametrize(
    ("chat", "tool_format"),
    [
        (Chat([], TOOLS), HERMES),
        (Chat([], None, forced=frozenset({"weather"})), HERMES),
        (Chat([], TOOLS, forced=frozenset({"weather"})), None),
    ],
)
def test_answers_are_free_if_calls_are_optional_or_the_model_has_no_format(
    chat: Chat, tool_format: ToolFormat | None
) -> None:
    assert grammar_of(chat, tool_format, lambda _: None) is None


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
async def test_a_model_that_was_taught_no_format_calls_as_it_is_forced_to(
    shows: bool, system: list[dict[str, str]]
) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + "{{ tools | tojson }}" * shows
    tokenizers = Tokenizers()
    text = await tokenizers.model(MODEL, {**some_assets(), "chat_template.jinja": template.encode()})
    await tokenizers.close()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chat = Chat([*system, {"role": "user", "content": "hi"}], [tool], forced=frozenset({"look"}))
    tokens = text.tokens(chat, How(root=1))
    prompt = text.tokenizer.decode(tokens.token_ids)
    assert prompt.count('"look"') == 1
    assert prompt.count("[system]") == (1 if system or not shows else 0)
    assert not system or "Be kind." in prompt
    assert tokens.calls is not None
    assert '"\\"look\\""' in tokens.calls.text
    assert tokens.tools is not None
    assert tokens.tools.format is HERMES
    free = text.tokens(replace(chat, forced=frozenset()), How(root=1))
    assert (free.calls, free.tools) == (None, None)
    assert text.tokens(chat, How(root=1, is_sent=False)).calls is None
