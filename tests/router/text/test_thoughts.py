"""Reasoning in a model's own text, however it is cut."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.nouns import Beginning, Delta, Grammar, Sampling
from router.text.thoughts import ThoughtReader, ThoughtSyntax, reading_thoughts, thinks, thoughts_behind

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
    (False, "<think>a</think>b</think>c <think>d", "a", "b</think>c <think>d"),
    (True, "a</think>", "a", ""),
]


def read(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    reader = ThoughtReader(ThoughtSyntax(is_open))
    parts = [*(reader.push(piece) for piece in pieces), reader.push("", is_last=True)]
    thoughts, texts = zip(*parts, strict=True)
    return "".join(thoughts), "".join(texts)


@pytest.mark.parametrize(("is_open", "text", "thought", "rest"), CASES)
@given(places=st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_and_answer_do_not_depend_on_the_cut(
    is_open: bool, text: str, thought: str, rest: str, places: list[int]
) -> None:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read([text[begin:end] for begin, end in pairwise(ends)], is_open=is_open) == (thought, rest)


def test_reasoning_streams_while_it_is_thought() -> None:
    reader = ThoughtReader(ThoughtSyntax(is_open=True))
    assert reader.push("First, ") == ("First,", "")
    assert reader.push("second") == (" second", "")
    assert reader.push(".</think>ok") == (".", "ok")
    assert reader.push(" then") == ("", " then")


def test_a_prompt_may_end_within_the_reasoning() -> None:
    assert thoughts_behind("<|assistant|><think>\n").is_open
    assert not thoughts_behind("<think>\n\n</think>\n\n").is_open
    assert thinks("{% if x %}<think>{{ y }}</think>{% endif %}")
    assert not thinks("<|im_start|>assistant")


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
    got: Got, *, speaks_tokens: bool = True, grammar: Grammar | None = None, beginning: Beginning | None = None
) -> Any:
    backend = SimpleNamespace(describe=lambda: SimpleNamespace(speaks_tokens=speaks_tokens))
    request = SimpleNamespace(sampling=Sampling(grammar=grammar))
    return reading_thoughts(got, cast("Any", backend), cast("Any", request), ThoughtSyntax(), beginning)


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
    assert reading(got, beginning=Beginning(5, "Four")) is got
    reading(got, beginning=Beginning(5, "")).take(Delta(text="so</think>Four", tokens=3))
    assert (got.deltas[0].text, got.deltas[0].message) == ("Four", {"reasoning_content": "so"})
