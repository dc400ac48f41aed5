from __future__ import annotations

import pytest

from backends.http.generate_answer import GenerateAnswer, flat_error
from policies.errors import BackendErred, ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, TokenLogprob, Usage
from tests.standins.standin import event

# As SGLang 0.5 streams it: text, ids and log-probabilities repeat what came before.
GOLDEN = (
    b'data: {"text": " Paris", "output_ids": [12095], "meta_info": {"id": "r", "finish_reason": null, "prompt_tokens":'
    b' 6, "weight_version": "default", "completion_tokens": 1, "cached_tokens": 4, "e2e_latency": 0.1, '
    b'"output_token_logprobs": [[-0.25, 12095, " Paris"]], "output_top_logprobs": [[[-0.25, 12095, " Paris"], '
    b"[-2.5, 279, null]]]}}\n\n"
    b'data: {"text": " Paris", "output_ids": [12095, 145], "meta_info": {"id": "r", "finish_reason": null, '
    b'"prompt_tokens": 6, "completion_tokens": 2, "cached_tokens": 4, "output_token_logprobs": [[-0.25, 12095, " Paris"'
    b'], [null, 145, null]], "output_top_logprobs": [[[-0.25, 12095, " Paris"]], null]}}\n\n'
    b'data: {"text": " Paris\xc3\xa9.", "output_ids": [12095, 145, 13], "meta_info": {"id": "r", "finish_reason": '
    b'{"type": "stop", "matched": 128009}, "prompt_tokens": 6, "completion_tokens": 3, "cached_tokens": 4, '
    b'"output_token_logprobs": [[-0.25, 12095, " Paris"], [null, 145, null], [-0.5, 13, "."]]}}\n\n'
    b"data: [DONE]\n\n"
)
TOP = (TokenLogprob(12095, " Paris", -0.25), TokenLogprob(279, "", -2.5))
DELTAS = [
    Delta(text=" Paris", token_ids=(12095,), logprobs=(TokenLogprob(12095, " Paris", -0.25, TOP),)),
    Delta(token_ids=(145,), logprobs=(TokenLogprob(145, "", 0.0),)),
    Delta(text="é.", token_ids=(13,), logprobs=(TokenLogprob(13, ".", -0.5),), finish_reason="stop"),
    Delta(usage=Usage(6, 3, 4)),
]


def read(data: bytes, *, is_cumulative: bool = True, size: int = 1 << 20, choices: int = 1) -> list[Delta]:
    answer = GenerateAnswer("b", is_cumulative=is_cumulative, choices=choices, error_of=flat_error)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_repeated_text_is_sent_once_however_it_is_cut(size: int) -> None:
    assert read(GOLDEN, size=size) == DELTAS


def test_pieces_are_taken_as_pieces() -> None:
    # LMDeploy's way: pieces, and log-probabilities without text
    events = [
        event({"text": "a", "output_ids": [1], "meta_info": {"prompt_tokens": 2, "completion_tokens": 1}}),
        event(
            {
                "text": "b",
                "output_ids": [2, 3],
                "meta_info": {
                    "prompt_tokens": 2,
                    "completion_tokens": 3,
                    "finish_reason": {"type": "length"},
                    "output_token_logprobs": [[-1.0, 2], [-2.0, 3]],
                },
            }
        ),
        b"data: [DONE]\n\n",
    ]
    drawn = (TokenLogprob(2, "", -1.0), TokenLogprob(3, "", -2.0))
    assert read(b"".join(events), is_cumulative=False) == [
        Delta(text="a", token_ids=(1,)),
        Delta(text="b", token_ids=(2, 3), logprobs=drawn, finish_reason="length"),
        Delta(usage=Usage(2, 3)),
    ]


def test_choices_do_not_mix_and_their_tokens_are_counted_together() -> None:
    def a_body(index: int, text: str) -> bytes:
        meta = {"prompt_tokens": 2, "completion_tokens": len(text), "cached_tokens": index}
        return event({"index": index, "text": text, "output_ids": [7] * len(text), "meta_info": meta})

    deltas = read(a_body(0, "a") + a_body(1, "x") + a_body(1, "xy") + a_body(0, "ab") + b"data: [DONE]\n\n", choices=2)
    assert [(delta.choice, delta.text) for delta in deltas[:-1]] == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    assert deltas[-1].usage == Usage(2, 4, 1)


@pytest.mark.parametrize(("matched", "stop"), [("END", "END"), (151645, None), (None, None)])
def test_the_stop_that_ended_a_choice_is_reported(matched: object, stop: str | None) -> None:
    meta = {"prompt_tokens": 2, "completion_tokens": 1, "finish_reason": {"type": "stop", "matched": matched}}
    (last, _) = read(event({"text": "", "output_ids": [], "meta_info": meta}) + b"data: [DONE]\n\n")
    assert (last.finish_reason, last.stop) == ("stop", stop)


ABORT = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}
FULL = {"type": "abort", "message": "out of room", "status_code": 429}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (event({"error": {"message": "The input is longer than the model's context length"}}), ContextExceeded),
        (event({"error": {"message": "top_k must be positive"}}), InvalidRequest),
        (event({"error": "plain"}), InvalidRequest),
        (event({"error": {"message": "boom", "code": 500}}), BackendErred),
        (event(ABORT), BackendErred),
        (event({"text": "", "meta_info": {"finish_reason": FULL}}), Overloaded),
        (event({"text": "a"}), BackendErred),
        (b"data: {\n\n", BackendErred),
        (b"data: [1]\n\n", BackendErred),
        (event({"text": 5, "meta_info": {}}), BackendErred),
        (GOLDEN[:200], BackendErred),
        (b"", BackendErred),
    ],
)
def test_what_goes_wrong_has_its_error(data: bytes, kind: type[ExpectedError]) -> None:
    with pytest.raises(ExpectedError) as failure:
        read(data)
    assert type(failure.value) is kind


def test_nothing_is_heard_after_the_end() -> None:
    assert read(GOLDEN + b"data: {broken\n\n") == DELTAS
