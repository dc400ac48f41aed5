"""Characters in halves are joined, however the pieces of an answer are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.halves import Halves
from backends.http.lenient_json import read_json
from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import OpenAIAnswer
from tests.backends.parts import a_request

TEXTS = st.text(st.sampled_from('a\\u"d8\U0001f600\U0001f1e9é\n'), max_size=20)


def units(text: str) -> list[str]:
    """The UTF-16 units of `text`, as JavaScript cuts it: characters beyond U+FFFF are two."""
    raw = text.encode("utf-16-le")
    return [raw[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(raw), 2)]


@given(TEXTS, st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_a_text_that_was_cut_anywhere_is_whole(text: str, sizes: list[int]) -> None:
    left, pieces = units(text), list[str]()
    for size in sizes * 2:
        pieces.append("".join(left[:size]))
        del left[:size]
    halves = Halves()
    read = [read_json(halves.joined(json.dumps({"a": piece, "b": [piece]}).encode())) for piece in pieces]
    assert "".join(value["a"] for value in read) == text
    assert "".join(value["b"][0] for value in read) == text


def test_what_is_no_half_stays() -> None:
    data = rb'{"a":"\\ud83d","b":"\"\ude00","c":"\u00e9"}'
    halves = Halves()
    assert halves.joined(data) == data
    assert halves.joined(data) == data


@pytest.mark.parametrize("after", [b'{"a":"x"}', rb'{"a":"\u00e9"}'])
def test_a_half_that_stays_alone_is_left_out(after: bytes) -> None:
    halves = Halves()
    assert halves.joined(rb'{"a":"x\ud83d"}') == b'{"a":"x"}'
    assert halves.joined(after) == after
    assert read_json(halves.joined(rb'{"a":"\ude00"}')) == {"a": "\ufffd"}


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
def test_answers_of_openais_dialect_are_joined(name: str) -> None:
    answer = OpenAIAnswer("b", a_request(), is_streamed=True)
    chunks = (b'data: {"choices":[{"index":0,"delta":{"%b":"%b"}}]}\n\n' % (name.encode(), text) for text in HALVES)
    deltas = [delta for chunk in chunks for delta in answer.feed(chunk)]
    assert "".join(delta.text or (delta.message or {}).get(name, "") for delta in deltas) == "hi \U0001f600!"


def test_answers_of_ollama_are_joined() -> None:
    answer = OllamaAnswer("b")
    lines = (b'{"message":{"content":"%b"},"done":false}\n' % text for text in HALVES)
    assert "".join(delta.text for line in lines for delta in answer.feed(line)) == "hi \U0001f600!"


HALVES = (rb"hi \ud83d", rb"\ude00!")
