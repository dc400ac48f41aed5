"""The rest of an answer that another server began, asked of a server with OpenAI's dialect."""

from __future__ import annotations

from typing import Any

import pytest

from backends.openai.answer import OpenAIAnswer
from backends.openai.continued import rest_of, whole_usage
from policies.nouns import Beginning, Delta, Native, Prompt, Usage
from tests.backends.parts import a_request
from tests.backends.upstream import DONE, a_chunk, used

TEXT = Beginning(3, "It was a ")


def rest(body: dict[str, Any], beginning: Beginning = TEXT, **request: Any) -> tuple[int, dict[str, Any]]:
    """The most new tokens, and the body."""
    native = Native("/v1/chat/completions", body)
    asked, prompt = rest_of(a_request(**request), Prompt(body=body, native=native, beginning=beginning))
    assert (prompt.native, prompt.beginning) == (None, None)
    assert prompt.body is not None
    return asked.max_new_tokens, dict(prompt.body)


def test_a_chat_ends_with_the_text_so_far_which_is_to_be_continued() -> None:
    question = {"role": "user", "content": "Tell me a story."}
    left, body = rest({"model": "m", "messages": [question], "max_tokens": 10, "min_tokens": 2}, max_new_tokens=10)
    assert left == 7
    assert body == {
        "model": "m",
        "messages": [question, {"role": "assistant", "content": "It was a"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 7,
        "min_tokens": 0,
    }


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ("Well: ", "Well: It was a"),
        (None, "It was a"),
        ([{"type": "text", "text": "Well: "}], [{"type": "text", "text": part} for part in ("Well: ", "It was a")]),
    ],
)
def test_a_message_that_the_client_wanted_continued_is_continued_further(content: Any, joined: Any) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "name": "n"}]
    _, body = rest({"messages": messages, "continue_final_message": True, "add_generation_prompt": False})
    assert body["messages"][-1] == {"role": "assistant", "content": joined, "name": "n"}
    assert len(body["messages"]) == 2


def test_a_text_is_prompt_and_text_so_far_and_is_not_echoed_again() -> None:
    _, body = rest({"prompt": "Once. ", "echo": True, "max_tokens": 3})
    assert body == {"prompt": "Once. It was a ", "echo": False, "max_tokens": 1}


def test_of_white_space_alone_nothing_is_continued() -> None:
    messages = [{"role": "user", "content": "?"}]
    assert rest({"messages": messages}, Beginning(1, "\n\n"))[1] == {"messages": messages}


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([" dark", " night"], "dark night"),
        ([" ", "dark"], "dark"),
        (["dark"], "dark"),
        (["  dark"], " dark"),
        (["\ndark"], "\ndark"),
    ],
)
def test_white_space_that_the_client_has_is_not_shown_twice(pieces: list[str], shown: str) -> None:
    answer = OpenAIAnswer("b", a_request(), is_streamed=True, beginning=TEXT)
    deltas = [delta for piece in pieces for delta in answer.feed(a_chunk(piece))]
    assert "".join(delta.text for delta in deltas) == shown


def test_usage_covers_the_whole_answer() -> None:
    answer = OpenAIAnswer("b", a_request(prompt_tokens=17), is_streamed=True, beginning=TEXT)
    deltas = [*answer.feed(used(20, 4, 16)), *answer.feed(DONE)]
    assert deltas == [Delta(usage=Usage(17, 7, 16))]


def test_several_tokens_in_one_piece_are_counted_where_the_prompt_is_known() -> None:
    known, estimated = a_request(prompt_tokens=12), a_request(prompt_tokens=12, least_prompt_tokens=5)
    assert whole_usage(Usage(20, 4, 16), TEXT, known) == Usage(12, 12, 12)
    assert whole_usage(Usage(20, 4, 16), TEXT, estimated) == Usage(17, 7, 16)


def test_no_more_is_cached_than_the_prompt_has() -> None:
    assert whole_usage(Usage(20, 4, 19), TEXT, a_request(prompt_tokens=17)) == Usage(17, 7, 17)
    assert whole_usage(Usage(2, 4, 2), TEXT, a_request(prompt_tokens=2)) == Usage(1, 7, 1)
