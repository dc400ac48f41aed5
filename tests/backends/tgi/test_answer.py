from __future__ import annotations

import json
from typing import Any

import pytest

from backends.tgi.answer import TGIAnswer, error_in_chat, error_of_tgi
from policies.errors import BackendErred, BackendFailed, ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, TokenLogprob, Usage
from tests.standins.standin import event

# As TGI 3.3 streams it: no [DONE], the last event has the whole text and the details.
GOLDEN = (
    b'data:{"index":1,"token":{"id":578,"text":" The","logprob":-0.25,"special":false},"generated_text":null,'
    b'"details":null}\n\n'
    b'data:{"index":2,"token":{"id":4062,"text":" h\xc3\xa9","logprob":-0.5,"special":false},"top_tokens":[{"id":4062,'
    b'"text":" h\xc3\xa9","logprob":-0.5,"special":false}],"generated_text":null,"details":null}\n\n'
    b'data:{"index":3,"token":{"id":128009,"text":"<|eot_id|>","logprob":-0.125,"special":true},"generated_text":'
    b'" The h\xc3\xa9","details":{"finish_reason":"eos_token","generated_tokens":3,"seed":42,"input_length":6}}\n\n'
)
END = [Delta(finish_reason="stop"), Delta(usage=Usage(6, 3))]


def read(data: bytes, size: int = 1 << 20, **options: Any) -> list[Delta]:
    answer = TGIAnswer("b", **options)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_tokens_become_deltas_however_they_are_cut(size: int) -> None:
    assert read(GOLDEN, size) == [Delta(text=" The", token_ids=(578,)), Delta(text=" hé", token_ids=(4062,)), *END]


def test_log_probabilities_come_if_requested() -> None:
    first = (TokenLogprob(578, " The", -0.25),)
    second = (TokenLogprob(4062, " hé", -0.5, (TokenLogprob(4062, " hé", -0.5),)),)
    assert [delta.logprobs for delta in read(GOLDEN, wants_logprobs=True)[:2]] == [first, second]


def test_the_stop_string_is_cut_off_as_openais_clients_expect() -> None:
    def token(text: str, details: object = None) -> bytes:
        fields = {"id": 1, "text": text, "logprob": 0.0, "special": False}
        return event({"index": 1, "token": fields, "generated_text": None, "details": details})

    details = {"finish_reason": "stop_sequence", "generated_tokens": 3, "input_length": 2}
    data = token("a EN") + token("D") + token(" END", details)
    deltas = read(data, stops=("END",))
    assert "".join(delta.text for delta in deltas) == "a "
    assert deltas[-2].finish_reason == "stop"


def test_text_that_may_begin_a_stop_string_and_does_not_is_sent_at_the_end() -> None:
    details = {"finish_reason": "length", "generated_tokens": 1, "input_length": 2}
    token = {"id": 1, "text": "a EN", "logprob": 0.0, "special": False}
    deltas = read(event({"index": 1, "token": token, "generated_text": "a EN", "details": details}), stops=("END",))
    assert "".join(delta.text for delta in deltas) == "a EN"
    assert deltas[-2].finish_reason == "length"


WRONG = "Input validation error"
TOO_LONG = f"{WRONG}: `inputs` tokens + `max_new_tokens` must be <= 10. Given: 9 `inputs` tokens and 5"


@pytest.mark.parametrize(
    ("error", "error_type", "kind", "param"),
    [
        ("Model is overloaded", "overloaded", Overloaded, None),
        (TOO_LONG, "validation", ContextExceeded, "prompt"),
        (
            "Input validation error: `inputs` must have less than 4 tokens. Given: 9",
            "validation",
            ContextExceeded,
            "prompt",
        ),
        (
            "Input validation error: `temperature` must be strictly positive",
            "validation",
            InvalidRequest,
            "temperature",
        ),
        ("Input validation error: `top_n_tokens` must be >= 0", "validation", InvalidRequest, "top_logprobs"),
        ("Template error: undefined", "template_error", InvalidRequest, None),
        ("Tool error: no such tool", "tool_error", InvalidRequest, None),
        ("Request failed during generation: CUDA out of memory", "generation", BackendErred, None),
        ("Incomplete generation", "incomplete_generation", BackendErred, None),
        ("unhealthy", "healthcheck", BackendErred, None),
    ],
)
def test_each_error_type_has_its_error(
    error: str, error_type: str, kind: type[ExpectedError], param: str | None
) -> None:
    body = {"error": error, "error_type": error_type}
    with pytest.raises(ExpectedError) as streamed:
        read(event(body))
    plain = error_of_tgi("b", 422, json.dumps(body).encode(), {"retry-after": "2"})
    in_chat = error_in_chat("b", {"message": error, "http_status_code": 422})
    assert {type(streamed.value), type(plain), type(in_chat)} == {kind}
    assert streamed.value.param == plain.param == in_chat.param == param
    assert plain.retry_after_s == (2.0 if kind in (Overloaded, BackendErred) else None)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"Failed to deserialize the JSON body into the target type: messages: missing field", InvalidRequest),
        (b'{"error": {"message": "no"}}', InvalidRequest),
        (b"\xff", InvalidRequest),
    ],
)
def test_other_error_bodies_are_passed_on_unchanged(body: bytes, kind: type[ExpectedError]) -> None:
    assert type(error_of_tgi("b", 422, body, {})) is kind
    assert type(error_of_tgi("b", 502, body, {})) is BackendErred


@pytest.mark.parametrize(
    "data", [b"data:{\n\n", b"data:[1]\n\n", b'data:{"token":{}}\n\n', b"data:5\n\n", GOLDEN[:150], b""]
)
def test_nonsense_and_an_early_end_are_failures(data: bytes) -> None:
    with pytest.raises(BackendFailed):
        read(data)


def test_nothing_is_heard_after_the_end() -> None:
    assert read(GOLDEN + b"data:{broken\n\n")[-2:] == END
