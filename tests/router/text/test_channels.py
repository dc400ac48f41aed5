"""Channels in an answer of gpt-oss, however it is cut. Formats are those of OpenAI's harmony guide."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.nouns import Delta
from router.protocols.dialect import Answer
from router.text import channels
from router.text.channels import MOST_HEAD_CHARACTERS, ChannelReader

ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four.<|return|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"at": "K\u00f6ln"}<|call|>'
TURNED = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"at": 1}<|call|>'

Calls = list[tuple[str, str]]
CASES: list[tuple[str, str, str, Calls]] = [
    (ANALYSIS + FINAL, "Two and two.", "Four.", []),
    (FINAL.removesuffix("<|return|>"), "", "Four.", []),
    (ANALYSIS + CALL, "Two and two.", "", [("weather", '{"at": "K\u00f6ln"}')]),
    (CALL + TURNED, "", "", [("weather", '{"at": "K\u00f6ln"}'), ("weather", '{"at": 1}')]),
    ("<|channel|>commentary<|message|>I look.<|end|>" + TURNED, "", "I look.", [("weather", '{"at": 1}')]),
    ("<|channel|>analysis<|message|>cut <|o", "cut <|o", "", []),
    ("<|channel|>ana", "", "", []),
    ('{"a": "<b>"}', "", '{"a": "<b>"}', []),
    ("Four.", "", "Four.", []),
    ("", "", "", []),
]


def read(pieces: list[str]) -> tuple[str, str, Calls]:
    reader, answer, thought = ChannelReader(lambda number: f"id{number}"), Answer(), ""
    for parsed in [*map(reader.push, pieces), reader.push("", is_last=True)]:
        message: Any = {"tool_calls": parsed.calls} if parsed.calls else None
        answer.add(Delta(text=parsed.text, message=message))
        thought += parsed.thought
    calls = answer.message.get("tool_calls") or []
    return thought, answer.text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(("text", "thought", "rest", "calls"), CASES)
@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_what_is_read_does_not_depend_on_the_cut(
    text: str, thought: str, rest: str, calls: Calls, places: list[int]
) -> None:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read([text[begin:end] for begin, end in pairwise(ends)]) == (thought, rest, calls)


@pytest.mark.parametrize("mark", ["<|channel|>", "<|start|>", " to="])
@pytest.mark.parametrize("before", ["", "<|channel|>final<|message|>a<|end|>"])
def test_a_head_without_end_becomes_text(before: str, mark: str) -> None:
    text = mark + "x" * MOST_HEAD_CHARACTERS
    expected = ("", "a" * bool(before) + text, [])
    assert read([before + text]) == read(list(before + text)) == expected


MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", " to=functions.f", "assistant", "final", "x")


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=30), cut=st.integers(1, 30))
def test_any_marks_in_any_order_are_read_to_their_end(parts: list[str], cut: int) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(channels, "MOST_HEAD_CHARACTERS", 40)
        whole = read([text])
        assert read([text[at : at + cut] for at in range(0, len(text), cut)]) == whole
