from __future__ import annotations

import pytest

from backends.llama_cpp.answer import LlamaCppAnswer
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Delta, TokenLogprob, Usage
from tests.standins.standin import event

# As llama-server of 2026 streams it, its settings left out: no [DONE], the last event has `stop`.
GOLDEN = (
    b'data: {"index":0,"content":"","tokens":[0],"stop":false,"id_slot":-1,"tokens_predicted":0,"tokens_evaluated":4,'
    b'"prompt_progress":{"total":4,"cache":0,"processed":4,"time_ms":2}}\n\n'
    b'data: {"index":0,"content":" this","tokens":[679],"stop":false,"id_slot":-1,"tokens_predicted":1,'
    b'"tokens_evaluated":4,"completion_probabilities":[{"id":679,"token":" this","bytes":[32,116,104,105,115],'
    b'"logprob":-3.5,"top_logprobs":[{"id":266,"token":" the","bytes":[32,116,104,101],"logprob":-1.5}]}]}\n\n'
    b'data: {"index":0,"content":" h\xc3\xa9","tokens":[47],"stop":false,"id_slot":-1,"tokens_predicted":2,'
    b'"tokens_evaluated":4}\n\n'
    b'data: {"index":0,"content":"","tokens":[],"id_slot":1,"stop":true,"model":"m","tokens_predicted":3,'
    b'"tokens_evaluated":4,"prompt":"<|bos|><|user|>BL","has_new_line":false,"truncated":false,"stop_type":"limit",'
    b'"stopping_word":"","tokens_cached":6,"timings":{"cache_n":1,"prompt_n":3,"prompt_ms":3.433,"predicted_n":3}}\n\n'
)
TOP = TokenLogprob(266, " the", -1.5)


def read(data: bytes, size: int = 1 << 20, **options: bool) -> list[Delta]:
    answer = LlamaCppAnswer("b", **options)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_events_become_deltas_however_they_are_cut(size: int) -> None:
    assert read(GOLDEN, size, wants_tops=True) == [
        Delta(computed_tokens=4),
        Delta(text=" this", token_ids=(679,), logprobs=(TokenLogprob(679, " this", -3.5, (TOP,)),)),
        Delta(text=" hé", token_ids=(47,)),
        Delta(finish_reason="length"),
        Delta(usage=Usage(4, 3, 1)),
    ]


def test_alternatives_that_were_not_requested_are_left_out() -> None:
    assert read(GOLDEN)[1].logprobs == (TokenLogprob(679, " this", -3.5),)


@pytest.mark.parametrize(
    ("stop_type", "finish"), [("eos", "stop"), ("word", "stop"), ("limit", "length"), (None, "stop")]
)
def test_each_way_to_stop_has_openais_word(stop_type: str | None, finish: str) -> None:
    last = {"content": "", "stop": True, "stop_type": stop_type, "tokens_evaluated": 4, "tokens_predicted": 1}
    assert read(event(last)) == [Delta(finish_reason=finish), Delta(usage=Usage(4, 1))]


def test_the_word_that_stopped_it_is_reported() -> None:
    last = {"content": "", "stop": True, "stop_type": "word", "stopping_word": "END"}
    (end, _) = read(event({**last, "tokens_evaluated": 4, "tokens_predicted": 1}))
    assert (end.finish_reason, end.stop) == ("stop", "END")


def test_without_a_report_the_cached_tokens_are_those_not_computed() -> None:
    last = {"content": "", "stop": True, "tokens_evaluated": 40, "tokens_predicted": 1, "timings": {"prompt_n": 8}}
    assert read(event(last))[-1] == Delta(usage=Usage(40, 1, 32))


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b'data: {"content":"x"}\n\n', GOLDEN[:300], b""])
def test_nonsense_and_an_early_end_are_failures(data: bytes) -> None:
    with pytest.raises(BackendFailed):
        read(data)


def test_an_error_event_is_the_same_error_as_its_status() -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        read(event({"error": {"code": 400, "message": "failed to parse grammar", "type": "invalid_request_error"}}))


def test_nothing_is_heard_after_the_end() -> None:
    assert read(GOLDEN + b"data: {broken\n\n")[-1] == Delta(usage=Usage(4, 3, 1))
