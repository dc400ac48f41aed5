"""Tool calls in a model's own text, however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.nouns import Delta, TokenLogprob, Usage
from router.ask import Chat
from router.protocols.dialect import Answer
from router.text.parsed_text import MOST_HELD_CHARACTERS
from router.text.tool_calls import AnswerReader, CallReader, reader_of
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
    ToolSyntax,
    format_of,
    syntax_of,
)
from tests.work import work_of

TOOLS = frozenset({"weather", "time_of.day"})
FORMATS = {
    each.name: each
    for each in (HERMES, LLAMA, MISTRAL, MISTRAL_11, DEEPSEEK_3, DEEPSEEK_31, PHI_4, GLM_45, QWEN_3_CODER, HARMONY)
}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"at": {"type": "string"}, "days": {"type": "integer"}, "in": {"enum": ["C", "F"]}, "any": {}}
        | {"maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "unit": {"$ref": "#/$defs/unit"}},
        "$defs": {"unit": {"type": "string"}},
    }
}

Call = tuple[str, Any]


def read(tool_format: ToolFormat, pieces: list[str], *, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls (name, arguments) of an answer that comes in `pieces`, as clients read deltas."""
    reader = reader_of(ToolSyntax(tool_format, TOOLS, SCHEMAS), lambda number: f"id{number}")
    answer = Answer()
    for parsed in [*map(reader.push, pieces), reader.push("", is_last=True, is_cut=is_cut)]:
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
    (
        "mistral 11",
        '[TOOL_CALLS]weather[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS]{"b": 2}',
        "",
        [("weather", {"a": 1}), ("weather", {"b": 2})],
    ),
    (
        "deepseek 3",
        (
            "I look.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"at": "Köln```"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time_of.day\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "I look.",
        [("weather", {"at": "Köln```"}), ("time_of.day", {})],
    ),
    (
        "deepseek 3.1",
        (
            "Yes.<｜tool▁calls▁begin｜>"
            '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"at": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{"a": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        "Yes.",
        [("weather", {"at": "<｜tool▁call▁end｜>"}), ("unknown", {"a": [1]})],
    ),
    (
        "deepseek 3.1",
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜> done",
        " done",
        [("weather", {})],
    ),
    (
        "phi 4",
        '<|tool_call|>[{"name": "weather", "arguments": {"a": 1}}, {"name": "weather", "arguments": {}}]<|/tool_call|>',
        "",
        [("weather", {"a": 1}), ("weather", {})],
    ),
    (
        "phi 4",
        'So:\nfunctools[{"name": "weather", "arguments": {"a": "]"}}]',
        "So:",
        [("weather", {"a": "]"})],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"at": "<|call|>"}<|call|>',
        "",
        [("weather", {"at": "<|call|>"})],
    ),
    (
        "glm 4.5",
        (
            "I look.\n<tool_call>weather\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n<arg_key>in</arg_key>\n<arg_value>C</arg_value>\n</tool_call>\n"
            "<tool_call>time_of.day\n</tool_call>"
        ),
        "I look.",
        [("weather", {"at": "12", "days": 3, "in": "C"}), ("time_of.day", {})],
    ),
    (
        "glm 4.5",
        (
            '<tool_call>weather<arg_key>at</arg_key><arg_value>a "b"\n<c> é😀\\</arg_value><arg_key>any</arg_key>'
            '<arg_value>{"x": [true]}</arg_value><arg_key>other</arg_key><arg_value>not JSON</arg_value></tool_call>'
            " done"
        ),
        " done",
        [("weather", {"at": 'a "b"\n<c> é😀\\', "any": {"x": [True]}, "other": "not JSON"})],
    ),
    (
        "glm 4.5",
        (
            "<tool_call>weather<arg_key>maybe</arg_key><arg_value>12345</arg_value>"
            "<arg_key>unit</arg_key><arg_value>12345</arg_value></tool_call>"
            "<tool_call>weather<arg_key>maybe</arg_key><arg_value>null</arg_value></tool_call>"
        ),
        "",
        [("weather", {"maybe": "12345", "unit": "12345"}), ("weather", {"maybe": None})],
    ),
    (
        "qwen 3 coder",
        (
            'I look.\n<tool_call>\n<function=weather>\n<parameter=at>\n a <b>\n"c"\n\n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n<parameter=maybe>\n5\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=time_of.day>\n</function>\n</tool_call>"
        ),
        "I look.",
        [("weather", {"at": ' a <b>\n"c"\n', "days": 3, "maybe": "5"}), ("time_of.day", {})],
    ),
    (
        "qwen 3 coder",
        (
            '<function=weather><parameter=any>{"x": [1]}</parameter><parameter=other>not JSON</parameter></function>'
            "</tool_call> done"
        ),
        " done",
        [("weather", {"any": {"x": [1]}, "other": "not JSON"})],
    ),
    (
        "glm 4.5",
        "<tool_call>weather\nwell <b> <arg_key>days</arg_key> <arg_value>3</arg_value> and</tool_call>",
        "<tool_call>weather\nwell <b> <arg_key>days</arg_key> <arg_value>3</arg_value> and</tool_call>",
        [],
    ),
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
        ("deepseek 3", "<｜tool▁calls▁begin｜> and <｜tool▁call▁begin｜> are marks {}"),
        ("deepseek 3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("deepseek 3.1", '{"name": "weather", "arguments": {}}'),
        ("phi 4", 'from functools import x; functools[{"a": 1}]'),
        ("phi 4", "<|tool_call|>[]<|/tool_call|>"),
        ("glm 4.5", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
        ("glm 4.5", "Write <tool_call> before a name, and <arg_key>. \n"),
        ("glm 4.5", "<tool_call>weather"),
        ("qwen 3 coder", "Write <tool_call> and <function= before a name. \n"),
        ("qwen 3 coder", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
        ("qwen 3 coder", "<tool_call>\n<function=weather"),
        ("glm 4.5", "  \n"),
    ],
)
def test_text_that_is_no_call_passes_unharmed(tool_format: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(FORMATS[tool_format], pieces) == (text, [])


@pytest.mark.parametrize(("tool_format", "text", "expected", "calls"), [each for each in CALLS if each[3]])
def test_a_call_that_the_length_limit_cuts_is_never_shown_as_text(
    tool_format: str, text: str, expected: str, calls: list[Call]
) -> None:
    for length in range(len(text)):
        got, called = read(FORMATS[tool_format], [text[:length]], is_cut=True)
        assert expected.startswith(got.rstrip()), text[:length]
        assert [name for name, _ in called] == [name for name, _ in calls[: len(called)]]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama", '{"name": "Ada Lovelace", "born": 18'),
        ("llama", '{"title": "x'),
        ("hermes", "1 <2 and 2 > 1"),
        ("glm 4.5", "Write <tool_call> before a name, and <arg_"),
    ],
)
def test_a_text_that_the_length_limit_cuts_stays_whole(tool_format: str, text: str) -> None:
    assert read(FORMATS[tool_format], [text], is_cut=True) == (text, [])


MARKS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("function", "```json\n", "\n```", "<|tool_call|>", "<|/tool_call|>", "functools["),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>at</arg_key>\n<arg_value>", "weather\n"),
    *("<|channel|>commentary to=functions.", "weather <|constrain|>json<|message|>", "<|call|>"),
    *(
        "<function=",
        "<function=weather>",
        "</function>",
        "<parameter=at>",
        "<parameter=",
        "</parameter>",
        "\n</parameter>",
    ),
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
@example("llama", '{"name": "weather", "parameters": {}}a ', [39])
@example("glm 4.5", "<tool_call>weather</tool_call>a ", [31])
@example("hermes", '<tool_call>{"' + "y" * 1500 + '<tool_call>{"name": "weather", "arguments": {}}', [700])
def test_any_cut_of_any_text_gives_the_same(tool_format: str, text: str, places: list[int]) -> None:
    whole = read(FORMATS[tool_format], [text])
    assert read(FORMATS[tool_format], cut(text, places)) == whole
    assert read(FORMATS[tool_format], list(text)) == whole


@pytest.mark.parametrize("tool_format", [name for name in sorted(FORMATS) if FORMATS[name].pairs is None])
@pytest.mark.parametrize("beginning", ["{", '{"'], ids=["apart", "in one text"])
@pytest.mark.parametrize("unit", ["{", '{"', '{"a": "', '{"a": ', "{\\", '"{', "{'", "["])
def test_calls_that_never_end_cost_the_same_for_each_character(tool_format: str, beginning: str, unit: str) -> None:
    """Each mark may begin a call, and none of them ends: the text behind a mark is not read anew for each."""
    mark = FORMATS[tool_format].opens[-1]

    def work(size: int) -> int:
        text = mark + beginning + (mark + unit) * (size // len(mark + unit))
        return work_of(lambda: read(FORMATS[tool_format], [text])).lines

    assert work(8000) <= 2.2 * work(4000) + 2000


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_text_without_a_mark_is_never_touched(tool_format: str, text: str, places: list[int]) -> None:
    assert read(FORMATS[tool_format], cut(text, places)) == (text, [])


def test_arguments_stream_before_the_call_is_whole() -> None:
    reader = CallReader(ToolSyntax(HERMES, TOOLS), str)
    begun = reader.push('<tool_call>{"name": "weather", "arguments": {"at": "K')
    assert [call["function"] for call in begun.calls] == [{"name": "weather", "arguments": '{"at": "K'}]
    assert reader.push("ö").calls == [{"index": 0, "function": {"arguments": "ö"}}]


def test_a_text_among_pairs_streams_and_other_values_come_whole() -> None:
    reader = reader_of(ToolSyntax(GLM_45, TOOLS, SCHEMAS), str)
    begun = reader.push("<tool_call>weather\n<arg_key>at</arg_key>\n<arg_value>Kö")
    assert [call["function"] for call in begun.calls] == [{"name": "weather", "arguments": '{"at": "Kö'}]
    assert reader.push('l"n</arg').calls == [{"index": 0, "function": {"arguments": 'l\\"n'}}]
    assert reader.push("_value><arg_key>days</arg_key><arg_value>1").calls == [
        {"index": 0, "function": {"arguments": '", "days": '}}
    ]
    assert reader.push("2</arg_value></tool_call>").calls == [{"index": 0, "function": {"arguments": "12}"}}]


def test_a_value_without_an_end_is_passed_on_as_a_text() -> None:
    reader = reader_of(ToolSyntax(GLM_45, TOOLS, SCHEMAS), str)
    reader.push("<tool_call>weather\n<arg_key>days</arg_key><arg_value>")
    passed = reader.push("9" * (MOST_HELD_CHARACTERS + 1))
    assert passed.calls[0]["function"]["arguments"] == '"' + "9" * (MOST_HELD_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("tool_format", "begins"),
    [("hermes", "<tool_call>{"), ("llama", "{"), ("mistral", "[TOOL_CALLS][{"), ("phi 4", "<|tool_call|>[{")],
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
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_11),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'", DEEPSEEK_3),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + tool['function']['arguments']|tojson", DEEPSEEK_31),
        ("{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}", PHI_4),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", GLM_45),
        ("{{- '<|start|>assistant<|channel|>final<|message|>' }}", HARMONY),
        ("{{ messages }}", None),
    ],
)
def test_the_chat_template_says_how_its_model_calls(template: str, tool_format: ToolFormat | None) -> None:
    assert format_of(template) == tool_format


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "string"}, "True", "True"),
        ({"type": ["string", "null"]}, "None", "None"),
        ({}, "True", "True"),
        ({"type": "integer"}, "True", "True"),
    ],
)
def test_values_in_pythons_spelling_follow_the_schema(schema: dict[str, Any], written: str, value: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"k": schema}}}}
    syntax = syntax_of(Chat([], tools=[tool]), QWEN_3_CODER)
    assert syntax is not None
    text = f"<tool_call>\n<function=f>\n<parameter=k>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = reader_of(syntax, str).push(text, is_last=True).calls
    assert json.loads(call["function"]["arguments"]) == {"k": value}
