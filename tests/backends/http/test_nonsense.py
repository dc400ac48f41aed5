"""Counts that no engine can mean are errors in every dialect, and no tenant is charged for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.fastchat.answer import FastChatAnswer
from backends.http.exchange import Answer
from backends.http.generate_answer import GenerateAnswer
from backends.http.nonsense import nonsense, reported_usage
from backends.llama_cpp.answer import LlamaCppAnswer
from backends.messages.answer import AnthropicAnswer
from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import Ear, PassedWhole
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


def a_worker_frame(**usage: int) -> bytes:
    counts = {"prompt_tokens": 1, "completion_tokens": 1, **usage}
    return json.dumps({"error_code": 0, "text": "a", "usage": counts, "finish_reason": "stop"}).encode() + b"\0"


def a_message_end(**usage: int) -> bytes:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1, **usage}}}
    return event(start) + event({"type": "message_stop"})


def a_generation() -> GenerateAnswer:
    return GenerateAnswer("b", is_cumulative=False)


@pytest.mark.parametrize(
    ("answer", "data"),
    [
        (a_generation(), generated(prompt_tokens=-1)),
        (a_generation(), generated(completion_tokens=-5)),
        (a_generation(), generated(cached_tokens=1e308)),
        (a_generation(), event({"index": 1, "text": "a", "meta_info": META}) + DONE),
        (a_generation(), event({"index": -1, "text": "a", "meta_info": META}) + DONE),
        (TGIAnswer("b"), a_tgi_end(generated_tokens=-1)),
        (TGIAnswer("b"), a_tgi_end(input_length=-1)),
        (LlamaCppAnswer("b"), a_llama_end(tokens_evaluated=-1)),
        (LlamaCppAnswer("b"), a_llama_end(tokens_predicted=1e300)),
        (OllamaAnswer("b"), an_ollama_end(eval_count=-1)),
        (OllamaAnswer("b"), an_ollama_end(prompt_eval_count=-1)),
        (FastChatAnswer("b"), a_worker_frame(completion_tokens=-1)),
        (AnthropicAnswer("b"), a_message_end(output_tokens=-1)),
        (AnthropicAnswer("b"), a_message_end(cache_read_input_tokens=-1)),
        (TritonAnswer("b", a_request(), is_cumulative=False), event({"text_output": "a", "num_input_tokens": -1})),
    ],
)
def test_counts_and_places_that_cannot_be_are_nonsense(answer: Answer, data: bytes) -> None:
    with pytest.raises(BackendFailed):
        heard(answer, [data])


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


def test_a_count_that_is_not_reported_is_zero() -> None:
    assert reported_usage(None, 3) == Usage(0, 3, 0)
