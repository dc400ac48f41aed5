from __future__ import annotations

from typing import Any

import pytest

from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import deltas_of
from backends.openai.passed import Ear
from policies.nouns import Delta

TEXT = {"type": "text", "text": "hello"}
CONTENTS = [
    ([TEXT], "hello", None),
    ([TEXT, {"type": "text", "text": " you"}], "hello you", None),
    (TEXT, "hello", None),
    (["hel", "lo"], "hello", None),
    ([{"type": "output_text", "text": "hello", "annotations": []}], "hello", None),
    ([{"type": "text", "text": {"value": "hello"}}], "hello", None),
    ([{"type": "thinking", "thinking": "hm"}], "", {"reasoning_content": "hm"}),
    # Mistral's
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, TEXT], "hello", {"reasoning_content": "hm"}),
    ([{"type": "reasoning", "text": "hm"}, TEXT], "hello", {"reasoning_content": "hm"}),
    ([{"type": "refusal", "refusal": "no"}], "", {"refusal": "no"}),
    ([{"type": "reference", "reference_ids": [1]}, TEXT], "hello", None),
    ([{"type": "text", "text": None}], "", None),
    ([], "", None),
]


@pytest.mark.parametrize(("content", "text", "beside"), CONTENTS)
@pytest.mark.parametrize("member", ["delta", "message"])
def test_text_is_text_and_thinking_is_reasoning_in_lists_of_parts(
    member: str, content: Any, text: str, beside: dict[str, str] | None
) -> None:
    delta, *_ = [*deltas_of({"choices": [{"index": 0, member: {"content": content}}]}), Delta()]
    assert (delta.text, delta.message) == (text, beside)


def test_ollamas_contents_may_be_parts() -> None:
    line = b'{"message":{"content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"hello"}]}}\n'
    (delta,) = OllamaAnswer("b").feed(line)
    assert (delta.text, delta.message) == ("hello", {"reasoning_content": "hm"})


def test_an_answer_of_parts_that_is_passed_on_is_not_continued_as_if_its_parts_were_text() -> None:
    chunk = Ear("b", 1).hear(b'{"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"hello"}]}}]}')
    assert (chunk.pieces, chunk.text) == (1, None)
