"""Reasoning in a model's own text, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.detokenize import THOUGHT_MARKS
from policies.nouns import Delta, Grammar, Sampling
from router.text.thoughts import ThoughtReader, ThoughtSyntax, reading_thoughts, thoughts_behind, thoughts_in

CASES = [
    (False, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (True, "\nTwo and two.\n\nYes.\n</think>\n\nFour.\n", "Two and two.\n\nYes.", "Four.\n"),
    (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
    (False, " Four.", "", " Four."),
    (False, "", "", ""),
    (False, "<thin", "", "<thin"),
    (False, "Four. <think> is a mark.", "", "Four. <think> is a mark."),
    (False, "<think>a < b, a </ b", "a < b, a </ b", ""),
    (True, "cut off </thi", "cut off </thi", ""),
    (True, "<think>a</think>b", "a", "b"),
    (True, "\n<think>\na</think>b", "a", "b"),
    (True, "<thin ice</think>b", "<thin ice", "b"),
    (False, "<think>a</think>b</think>c <think>d", "a", "b</think>c <think>d"),
    (True, "a</think>", "a", ""),
]


PLAIN = ThoughtSyntax()


def read(pieces: list[str], *, is_open: bool, is_cut: bool = True, syntax: ThoughtSyntax = PLAIN) -> tuple[str, str]:
    reader = ThoughtReader(replace(syntax, is_open=is_open))
    parts = [*(reader.push(piece) for piece in pieces), reader.push("", is_last=True)]
    text = "".join(part.text for part in parts) + ("" if is_cut else reader.unanswered)
    return "".join(part.thought for part in parts), text


@pytest.mark.parametrize(("is_open", "text", "thought", "rest"), CASES)
@given(places=st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_and_answer_do_not_depend_on_the_cut(
    is_open: bool, text: str, thought: str, rest: str, places: list[int]
) -> None:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read([text[begin:end] for begin, end in pairwise(ends)], is_open=is_open) == (thought, rest)


def test_reasoning_streams_while_it_is_thought() -> None:
    reader = ThoughtReader(ThoughtSyntax(is_open=True))
    parts = [reader.push(piece) for piece in ("First, ", "second", ".</think>ok", " then")]
    assert [(part.thought, part.text) for part in parts] == [
        ("First,", ""),
        (" second", ""),
        (".", "ok"),
        ("", " then"),
    ]


def test_a_prompt_may_end_within_the_reasoning() -> None:
    syntax = thoughts_in("{% if x %}<think>{{ y }}</think>{% endif %}")
    assert syntax == ThoughtSyntax()
    assert thoughts_behind(syntax, "<|assistant|><think>\n").is_open
    assert not thoughts_behind(syntax, "<think>\n\n</think>\n\n").is_open
    assert thoughts_in("<|im_start|>assistant") is None
    assert thoughts_in("<|start|>assistant<|channel|>final<|message|>") == ThoughtSyntax(has_channels=True)


@pytest.mark.parametrize(("is_open", "text", "thought", "rest"), CASES)
@pytest.mark.parametrize(("opens", "closes"), THOUGHT_MARKS)
def test_reasoning_stands_between_the_marks_that_the_template_teaches(
    is_open: bool, text: str, thought: str, rest: str, opens: str, closes: str
) -> None:
    syntax = thoughts_in(f"{{% if x %}}{opens}{{{{ x }}}}{closes}{{% endif %}}")
    assert syntax == ThoughtSyntax(opens=opens, closes=closes)
    spelled = [each.replace("</think>", closes).replace("<think>", opens) for each in (text, thought, rest)]
    if "<thin" not in spelled[0] or opens == "<think>":
        assert read([*spelled[0]], is_open=is_open, syntax=syntax) == (spelled[1], spelled[2])


@pytest.mark.parametrize("pieces", [["\nFour.\n"], ["Fo", "ur", "."], ["<think>\nFour."]])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_model_that_ends_by_itself_within_its_reasoning_has_answered(pieces: list[str], is_open: bool) -> None:
    thought, text = read(pieces, is_open=is_open, is_cut=False)
    assert text.strip() == "Four."
    if is_open or pieces[0].startswith("<think>"):
        assert (thought, text) == ("Four.", "Four.")
        assert read(pieces, is_open=is_open, is_cut=True) == ("Four.", "")


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "<think>", "</think>", "<", "[THINK]", "</thi"]), max_size=8),
    st.booleans(),
)
def test_no_answer_is_empty_whose_model_wrote_more_than_marks(pieces: list[str], is_open: bool) -> None:
    whole = "".join(pieces)
    thought, text = read(pieces, is_open=is_open, is_cut=False)
    assert (thought, text) == read([whole], is_open=is_open, is_cut=False)
    if whole.replace("<think>", "").replace("</think>", "").strip():
        assert text.strip()


@pytest.mark.parametrize(
    ("continued", "is_open"),
    [
        ("<think>\nTwo and", True),
        ("<think>\nTwo</think>\n\nFo", False),
        ("Fo", False),
        ("<think>a</think><think>b", True),
        ("", False),
    ],
)
def test_an_answer_may_be_continued_within_its_reasoning(continued: str, is_open: bool) -> None:
    assert thoughts_behind(ThoughtSyntax(), f"<|assistant|>{continued}", continued).is_open == is_open


class Got:
    """A Taker that keeps what it gets."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def take(self, delta: Delta) -> bool:
        self.deltas.append(delta)
        return True

    async def ready(self) -> None:
        """It always is."""


def reading(
    got: Got, syntax: ThoughtSyntax | None = None, *, speaks_tokens: bool = True, grammar: Grammar | None = None
) -> Any:
    backend = SimpleNamespace(describe=lambda: SimpleNamespace(speaks_tokens=speaks_tokens))
    request = SimpleNamespace(id="r", sampling=Sampling(grammar=grammar))
    return reading_thoughts(got, cast("Any", backend), cast("Any", request), syntax or ThoughtSyntax())


def test_each_choice_has_reasoning_of_its_own_and_keeps_its_tokens() -> None:
    got = Got()
    taker = reading(got)
    taker.take(Delta(text="<think>a</think>", token_ids=(1, 2), tokens=2))
    taker.take(Delta(text="no", choice=1, tokens=1))
    taker.take(Delta(text=" b", tokens=1, finish_reason="stop"))
    assert [(delta.choice, delta.text, delta.message) for delta in got.deltas] == [
        (0, "", {"reasoning_content": "a"}),
        (1, "no", None),
        (0, "b", None),
    ]
    assert [delta.tokens for delta in got.deltas] == [2, 1, 1]


def test_a_backend_that_parses_it_and_an_answer_held_to_a_grammar_pass_unchanged() -> None:
    got = Got()
    assert reading(got, speaks_tokens=False) is got
    assert reading(got, grammar=Grammar("json", "{}", "response_format")) is got


def test_an_answer_that_another_backend_began_goes_on_where_it_was() -> None:
    got = Got()
    taker = reading(got)
    # a shard repeats what was drawn elsewhere, and the repetition is not passed on to the client
    taker.take(Delta(text="<think>two and", tokens=3, is_repeat=True))
    taker.take(Delta(text=" two</think>Four", tokens=3))
    assert (got.deltas[1].text, got.deltas[1].message) == ("Four", {"reasoning_content": " two"})


def test_channels_are_reasoning_text_and_calls() -> None:
    got = Got()
    taker = reading(got, ThoughtSyntax(has_channels=True))
    taker.take(Delta(text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", tokens=5))
    taker.take(
        Delta(text="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>", tokens=5)
    )
    taker.take(Delta(finish_reason="stop"))
    assert got.deltas[0].message == {"reasoning_content": "Hm."}
    assert got.deltas[1].message is not None
    (call,) = got.deltas[1].message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": "{}"}
    assert got.deltas[2].finish_reason == "tool_calls"
