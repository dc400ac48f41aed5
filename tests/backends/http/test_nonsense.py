"""Counts that no engine can mean are not known in any dialect: the answer is whole without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backends.fastchat.answer import FastChatAnswer
from backends.http.exchange import Answer
from backends.http.generate_answer import GenerateAnswer
from backends.http.nonsense import nonsense, reported_usage
from backends.llama_cpp.answer import LlamaCppAnswer
from backends.messages.answer import AnthropicAnswer
from backends.messages.passed import PassedMessage, PassedWholeMessage
from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import OpenAIAnswer
from backends.openai.passed import Ear, PassedWhole
from backends.openai.responses import PassedResponse, PassedWholeResponse
from backends.tgi.answer import TGIAnswer
from backends.triton.answer import TritonAnswer
from policies.errors import BackendFailed
from policies.nouns import Usage
from tests.backends.openai.test_passed import heard
from tests.backends.parts import a_request
from tests.standins.standin import event

DONE = b"data: [DONE]\n\n"
TOKEN = {"id": 1, "text": "a", "logprob": 0.0, "special": False}
META = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "stop"}}


def generated(**meta: Any) -> bytes:
    return event({"text": "a", "output_ids": [1], "meta_info": {**META, **meta}}) + DONE


def a_tgi_end(**details: Any) -> bytes:
    whole = {"finish_reason": "length", "generated_tokens": 1, "input_length": 1, **details}
    return event({"token": TOKEN, "details": whole})


def a_llama_end(**fields: Any) -> bytes:
    return event({"content": "", "stop": True, "tokens_evaluated": 1, "tokens_predicted": 1, **fields})


def an_ollama_end(**fields: Any) -> bytes:
    return json.dumps({"message": {"content": "a"}, "done": True, **fields}).encode() + b"\n"


def a_worker_frame(**usage: Any) -> bytes:
    counts = {"prompt_tokens": 1, "completion_tokens": 1, **usage}
    return json.dumps({"error_code": 0, "text": "a", "usage": counts, "finish_reason": "stop"}).encode() + b"\0"


def a_message_end(**usage: Any) -> bytes:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1, **usage}}}
    return event(start) + event({"type": "message_stop"})


def a_generation() -> GenerateAnswer:
    return GenerateAnswer("b", is_cumulative=False)


IN_JSON = [-1, "many", 1e300, 2**60, [], {}]
NO_COUNTS = [None, float("nan"), float("inf"), *IN_JSON]


@pytest.mark.parametrize("odd", NO_COUNTS, ids=repr)
def test_what_is_no_count_is_not_known(odd: object) -> None:
    assert reported_usage(odd, 3) == Usage(0, 3, is_guess=odd is not None)
    assert reported_usage(3, odd) == Usage(3, 0, is_guess=odd is not None)
    assert reported_usage(odd, odd).is_guess
    assert reported_usage(3, 4, odd, odd, odd) == Usage(3, 4)


@pytest.mark.parametrize("index", [1, -1])
def test_a_choice_that_was_not_asked_for_is_nonsense(index: int) -> None:
    with pytest.raises(BackendFailed):
        heard(a_generation(), [event({"index": index, "text": "a", "meta_info": META}) + DONE])


RESPONSE = {
    "object": "response",
    "status": "completed",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "hello " * 20}]}],
}
MESSAGE = {"type": "message", "content": [{"type": "text", "text": "hello " * 20}], "stop_reason": "end_turn"}


def a_response_end(usage: Any) -> bytes:
    return event({"type": "response.completed", "response": {**RESPONSE, "usage": usage}})


ENDS: list[tuple[Callable[[], Answer], Callable[[Any], bytes]]] = [
    (a_generation, lambda odd: generated(prompt_tokens=odd)),
    (lambda: TGIAnswer("b"), lambda odd: a_tgi_end(generated_tokens=odd)),
    (lambda: TGIAnswer("b"), lambda odd: a_tgi_end(input_length=odd)),
    (lambda: LlamaCppAnswer("b"), lambda odd: a_llama_end(tokens_evaluated=odd, timings=odd)),
    (lambda: LlamaCppAnswer("b"), lambda odd: a_llama_end(tokens_predicted=odd)),
    (lambda: OllamaAnswer("b"), lambda odd: an_ollama_end(eval_count=odd)),
    (lambda: OllamaAnswer("b"), lambda odd: an_ollama_end(prompt_eval_count=odd, eval_count=1)),
    (lambda: FastChatAnswer("b"), lambda odd: a_worker_frame(completion_tokens=odd)),
    (lambda: AnthropicAnswer("b"), lambda odd: a_message_end(output_tokens=odd)),
    (lambda: PassedMessage("b"), lambda odd: a_message_end(output_tokens=odd)),
    (lambda: PassedResponse("b"), lambda odd: a_response_end(odd)),
    (lambda: PassedResponse("b"), lambda odd: a_response_end({"input_tokens": odd, "output_tokens": 1})),
    (
        lambda: TritonAnswer("b", a_request(), is_cumulative=False),
        lambda odd: event({"text_output": "a", "num_input_tokens": odd}),
    ),
]


@pytest.mark.parametrize("odd", IN_JSON, ids=repr)
@pytest.mark.parametrize(("answer", "end"), ENDS)
def test_no_streamed_answer_is_lost_for_its_counts(
    answer: Callable[[], Answer], end: Callable[[Any], bytes], odd: Any
) -> None:
    (usage,) = [delta.usage for delta in heard(answer(), [end(odd)]) if delta.usage is not None]
    assert usage.is_guess


@pytest.mark.parametrize("odd", NO_COUNTS, ids=repr)
@pytest.mark.parametrize(("read", "whole"), [(PassedWholeMessage, MESSAGE), (PassedWholeResponse, RESPONSE)])
def test_no_answer_in_one_piece_is_lost_for_its_counts(read: Any, whole: dict[str, Any], odd: Any) -> None:
    for usage in ({}, {"usage": odd}, {"usage": {"input_tokens": odd, "output_tokens": odd}}):
        (delta,) = read("b").read(json.dumps({**whole, **usage}).encode())
        assert delta.usage.is_guess
        assert delta.tokens == 30, "a fourth of its letters"


NO_ANSWERS = [
    '{"html-message": "lost"}',
    "{}",
    '{"choices": []}',
    '{"choices": null}',
    '{"object": "list", "data": []}',
]
EVENTS, LINES, FRAMES = "data: {}\n\n", "{}\n", "{}\0"


@pytest.mark.parametrize("sent", NO_ANSWERS)
@pytest.mark.parametrize(
    ("answer", "framed"),
    [
        (lambda: OpenAIAnswer("b", a_request(), is_streamed=False), "{}"),
        (a_generation, EVENTS),
        (lambda: TGIAnswer("b"), EVENTS),
        (lambda: LlamaCppAnswer("b"), EVENTS),
        (lambda: OllamaAnswer("b"), LINES),
        (lambda: FastChatAnswer("b"), FRAMES),
        (lambda: AnthropicAnswer("b"), EVENTS),
        (lambda: PassedMessage("b"), EVENTS),
        (lambda: PassedResponse("b"), EVENTS),
        (lambda: TritonAnswer("b", a_request(), is_cumulative=False), EVENTS),
    ],
)
def test_an_object_that_is_no_answer_is_no_empty_answer(answer: Callable[[], Answer], framed: str, sent: str) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        heard(answer(), [framed.replace("{}", sent).encode()])


@pytest.mark.parametrize("sent", NO_ANSWERS)
@pytest.mark.parametrize("read", [PassedWholeMessage, PassedWholeResponse, lambda name: PassedWhole(Ear(name, 9))])
def test_an_object_that_is_no_answer_passes_nowhere(read: Any, sent: str) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        read("b").read(sent.encode())


@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "the secret answ',
        b'{"the secret answer": 1, "choices": {"the secret": "answer"}}',
        b'"the secret answer"',
        b'["the secret answer"]',
        b"the secret answer",
        b"\xff the secret answer",
        b"[" * 100_000 + b'"the secret answer"',
    ],
)
def test_an_error_does_not_quote_what_may_be_an_answer(data: bytes) -> None:
    assert "secret" not in str(nonsense("b", data))
    for answer, sent in (
        (a_generation(), b"data: " + data + b"\n\n"),
        (AnthropicAnswer("b"), b"data: " + data + b"\n\n"),
        (OllamaAnswer("b"), data + b"\n"),
        (FastChatAnswer("b"), data + b"\0"),
    ):
        with pytest.raises(BackendFailed) as failure:
            heard(answer, [sent])
        assert "secret" not in str(failure.value)
    with pytest.raises(BackendFailed) as failure:
        PassedWhole(Ear("b", 9)).read(data)
    assert "secret" not in str(failure.value)


def test_an_error_has_the_shape_of_what_came() -> None:
    assert str(nonsense("b", b'{"choices": 1, "x": 2}')) == (
        "b answered nonsense: an object with choices, 1 other fields, in 22 bytes of JSON"
    )
    assert str(nonsense("b", b"[]")) == "b answered nonsense: a list, in 2 bytes of JSON"
