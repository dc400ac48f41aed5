"""Tool calls in a model's own text, however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.nouns import Delta, TokenLogprob, Usage
from router.protocols.answer import Answer
from router.text.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MOST_HELD_CHARACTERS,
    AnswerReader,
    CallReader,
    ToolFormat,
    ToolSyntax,
    format_of,
)

TOOLS = frozenset({"weather", "time_of.day"})
FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}

Call = tuple[str, Any]


def read(tool_format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls (name, arguments) of an answer that comes in `pieces`, as clients read deltas."""
    reader = CallReader(ToolSyntax(tool_format, TOOLS), lambda number: f"id{number}")
    answer = Answer()
    for parsed in [*map(reader.push, pieces), reader.push("", is_last=True)]:
        answer.add(Delta(text=parsed.text, message={"tool_calls": parsed.calls} if parsed.calls else None))
    calls = answer.message.get("tool_calls") or []
    assert [call["id"] for call in calls] == [f"id{at}" for at in range(len(calls))]
    return answer.text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(ends)]


NESTED = '{"at": "x", "n": {"m": "\\""}}'

CALLS: list[tuple[str, str, str, list[Call]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"at": "Köln"}}\n</tool_call>',
        "",
        [("weather", {"at": "Köln"})],
    ),
    (
        "hermes",
        (
            'I look.\n<tool_call>{"name": "weather", "arguments": {"a": "}<"}}</tool_call>\n'
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>\n'
        ),
        "I look.",
        [("weather", {"a": "}<"}), ("unknown", {})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1]}, "name": "weather"}</tool_call> done',
        " done",
        [("weather", {"a": [1]})],
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("weather", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}, "id": "}"}', "", [("weather", {})]),
    ("llama", f'{{"name": "weather", "parameters": {NESTED}}}', "", [("weather", json.loads(NESTED))]),
    (
        "llama",
        (
            ' <|python_tag|>{"type": "function", "name": "weather", "parameters": {}}; '
            '{"name": "weather", "parameters": {"a": 1}}'
        ),
        "",
        [("weather", {}), ("weather", {"a": 1})],
    ),
    (
        "mistral",
        (
            'Yes.[TOOL_CALLS] [{"name": "weather", "arguments": {"a": "]"}}, '
            '{"name": "weather", "arguments": {}, "id": "x"}]'
        ),
        "Yes.",
        [("weather", {"a": "]"}), ("weather", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]weather[ARGS]{"a": 1}[TOOL_CALLS]time_of.day{"b": 2}',
        "",
        [("weather", {"a": 1}), ("time_of.day", {"b": 2})],
    ),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [("weather", {"a": 1})]),
]


@pytest.mark.parametrize(("tool_format", "text", "expected", "calls"), CALLS)
def test_calls_are_read_out_of_text(tool_format: str, text: str, expected: str, calls: list[Call]) -> None:
    for pieces in ([text], list(text)):
        got, called = read(FORMATS[tool_format], pieces)
        assert got == expected
        assert [(name, json.loads(arguments)) for name, arguments in called] == calls


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "Write <tool_call> before a call, and </tool_call> behind it. \n"),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '{"name": "weather", "arguments": {}}'),
        ("hermes", "a <tool_"),
        ("hermes", "<tool_call>\n<function=weather>\n</function>\n</tool_call>"),
        ("hermes", "  \n"),
        ("llama", '{"name": "Ada", "parameters": {}} is JSON'),
        ("llama", '{"name": "weather"'),
        ("llama", 'Call {"name": "weather", "parameters": {}}'),
        ("llama", '[{"name": "weather", "parameters": {}}]'),
        ("llama", "{} and {"),
        ("mistral", '[{"name": "weather", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS] is how it begins {x}"),
        ("mistral", "weather{}"),
        ("mistral", "[TOOL_CALLS]"),
    ],
)
def test_text_that_is_no_call_passes_unharmed(tool_format: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(FORMATS[tool_format], pieces) == (text, [])


MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<tool", "_call>", "[TOOL", "weather", "weather{"),
)
OBJECTS = (
    '{"name": "weather", "arguments": {"a": "\\"}"}}',
    '{"name": "weather", "parameters": {}}',
    '{"name": "no", "arguments": {}}',
    '{"arguments": {"x": [1]}, "name": "weather"}',
    '{"name": "weather", "arguments": ',
    '{"a": 1}',
)
fragments = st.sampled_from([*MARKS, *OBJECTS, *' \n,;[]{}"\\', "text ", "é😀"])


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(fragments, max_size=8).map("".join),
    st.lists(st.integers(0, 500), max_size=12),
)
@example("mistral", '[TOOL_CALLS]weather{"a": 1}, [TOOL', [28])
def test_any_cut_of_any_text_gives_the_same(tool_format: str, text: str, places: list[int]) -> None:
    whole = read(FORMATS[tool_format], [text])
    assert read(FORMATS[tool_format], cut(text, places)) == whole
    assert read(FORMATS[tool_format], list(text)) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_text_without_a_mark_is_never_touched(tool_format: str, text: str, places: list[int]) -> None:
    assert read(FORMATS[tool_format], cut(text, places)) == (text, [])


def test_arguments_stream_before_the_call_is_whole() -> None:
    reader = CallReader(ToolSyntax(HERMES, TOOLS), str)
    begun = reader.push('<tool_call>{"name": "weather", "arguments": {"at": "K')
    assert [call["function"] for call in begun.calls] == [{"name": "weather", "arguments": '{"at": "K'}]
    assert reader.push("ö").calls == [{"index": 0, "function": {"arguments": "ö"}}]


@pytest.mark.parametrize(
    ("tool_format", "begins"), [("hermes", "<tool_call>{"), ("llama", "{"), ("mistral", "[TOOL_CALLS][{")]
)
def test_what_is_held_has_a_bound(tool_format: str, begins: str) -> None:  # fmt: skip
    reader = CallReader(ToolSyntax(FORMATS[tool_format], TOOLS), str)
    text = begins + '"x": "' + "y" * MOST_HELD_CHARACTERS
    assert reader.push(text).text == text
    spaces = " " * (MOST_HELD_CHARACTERS + 1)
    assert CallReader(ToolSyntax(FORMATS[tool_format], TOOLS), str).push(spaces).text == spaces


def test_a_delta_with_calls_keeps_all_but_its_text_and_has_the_finish_reason_of_calls() -> None:
    reader = AnswerReader("r", ToolSyntax(LLAMA, TOOLS))
    progress = Delta(computed_tokens=5)
    assert reader.read(progress) is progress
    logprob = (TokenLogprob(5, "{", -0.5),)
    first = reader.read(Delta(text='{"name": "weather", "parameters": {}', token_ids=(5,), logprobs=logprob))
    last = reader.read(Delta(text="}", token_ids=(6,), finish_reason="stop", usage=Usage(1, 2)))
    assert (first.text, first.token_ids, first.logprobs) == ("", (5,), logprob)
    assert first.message is not None
    # clients may rely on it that one chunk has one piece of each call
    (call,) = first.message["tool_calls"]
    assert (len(call["id"]), call["id"].isalnum(), call["function"]["arguments"]) == (9, True, "{}")
    assert last == Delta(token_ids=(6,), finish_reason="tool_calls", usage=Usage(1, 2))


def test_choices_are_read_apart_and_named_apart() -> None:
    reader = AnswerReader("r", ToolSyntax(HERMES, TOOLS))
    text = '<tool_call>{"name": "weather", "arguments": {}}'
    deltas = [reader.read(Delta(text=text, choice=choice)) for choice in range(2)]
    ids = {delta.message["tool_calls"][0]["id"] for delta in deltas if delta.message}
    assert len(ids) == 2
    assert reader.read(Delta(text="x", choice=2, finish_reason="stop")).finish_reason == "stop"
    assert reader.read(Delta(choice=1, finish_reason="length")).finish_reason == "length"


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("... return a json object within <tool_call></tool_call> XML tags ...", HERMES),
        ("{{- '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{- '<|python_tag|>' }}", LLAMA),
        ('{%- if message.role == \'ipython\' %}{"name": function name, "parameters": ...}', LLAMA),
        ("{{ messages }}", None),
    ],
)
def test_the_chat_template_says_how_its_model_calls(template: str, tool_format: ToolFormat | None) -> None:
    assert format_of(template) == tool_format
