from __future__ import annotations

import struct
from typing import Any

import pytest

from backends.kserve import inference_pb2 as kserve
from backends.protobuf import TooManyFields, read_in_turns
from backends.triton.answer import TritonAnswer, TritonText, error_of_triton, heard_of, is_final
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLacks,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, Sampling, Usage
from tests.backends.parts import a_request
from tests.standins.standin import event
from tests.work import work_of

# As generate_stream sends what the ensemble says: one event a response, no word at the end.
GOLDEN = (
    b'data: {"batch_index":0,"cum_log_probs":0.0,"model_name":"ensemble","model_version":"1","num_input_tokens":6,'
    b'"sequence_index":0,"text_output":" The"}\n\n'
    b'data: {"batch_index":0,"cum_log_probs":0.0,"model_name":"ensemble","model_version":"1","num_input_tokens":6,'
    b'"sequence_index":0,"text_output":" h\xc3\xa9"}\n\n'
)
# The same second response over gRPC, as tritonclient 2.73's own generated code writes it.
WIRE = (
    b'\x12v\n\x08ensemble\x12\x011\x1a\x017"\x1b\n\x15triton'
    b"_final_response\x12\x02\x08\x00*\x18\n\x0btext_"
    b"output\x12\x05BYTES\x1a\x02\x01\x01*\x1d\n\x10num_inp"
    b"ut_tokens\x12\x05INT32\x1a\x02\x01\x012\x08\x04\x00\x00\x00 h"
    b"\xc3\xa92\x04\x06\x00\x00\x00"
)


def a_response(text: str, prompt_tokens: int = 6) -> kserve.ModelInferResponse:
    response = kserve.ModelInferResponse(model_name="ensemble")
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    response.outputs.add(name="num_input_tokens", datatype="INT32", shape=[1, 1])
    response.outputs.add(name="cum_log_probs", datatype="FP32", shape=[1, 1])
    data = text.encode()
    raw = (struct.pack("<I", len(data)) + data, struct.pack("<i", prompt_tokens), struct.pack("<f", -1.5))
    response.raw_output_contents.extend(raw)
    return response


def read(data: bytes, size: int = 1 << 20, *, is_cumulative: bool = False, **fields: Any) -> list[Delta]:
    answer = TritonAnswer("b", a_request(**fields), is_cumulative=is_cumulative)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_responses_become_deltas_however_they_are_cut(size: int) -> None:
    assert read(GOLDEN, size) == [
        Delta(text=" The"), Delta(text=" hé"), Delta(finish_reason="stop"), Delta(usage=Usage(6, 2)),
    ]  # fmt: skip


def test_as_many_responses_as_tokens_were_asked_for_are_an_end_by_length() -> None:
    assert read(GOLDEN, max_new_tokens=2)[-2] == Delta(finish_reason="length")


def test_a_model_that_repeats_itself_is_heard_once_and_half_a_character_waits() -> None:
    stream = "".join(f'data: {{"text_output":"{text}"}}\n\n' for text in ("a", "a\ufffd", "aé", "aé!"))
    deltas = read(stream.encode(), is_cumulative=True)
    assert [delta.text for delta in deltas] == ["a", "é", "!", "", ""]


def test_the_reason_is_the_models_where_it_gives_one_and_stop_words_are_cut_off() -> None:
    data = event({"text_output": "a EN"}) + event({"text_output": "D", "finish_reason": "stop"})
    deltas = read(data, sampling=Sampling(stop=("END",)), max_new_tokens=2)
    assert ("".join(delta.text for delta in deltas), deltas[-2].finish_reason) == ("a ", "stop")


def test_of_several_sequences_the_first_is_heard() -> None:
    assert read(event({"text_output": ["a", "b"]}))[0] == Delta(text="a")


def test_tensors_are_read_as_triton_writes_them() -> None:
    response = kserve.ModelStreamInferResponse.FromString(WIRE).infer_response
    text = TritonText(a_request(), is_cumulative=False)
    assert (response.id, is_final(response), heard_of("b", text, response)) == ("7", False, [Delta(text=" hé")])


def test_tensors_say_the_same() -> None:
    text = TritonText(a_request(), is_cumulative=False)
    assert heard_of("b", text, a_response(" hé")) == [Delta(text=" hé")]
    assert heard_of("b", text, kserve.ModelInferResponse()) == []
    assert list(text.finish()) == [Delta(finish_reason="stop"), Delta(usage=Usage(6, 1))]


def test_only_the_final_response_is_the_end() -> None:
    response = kserve.ModelInferResponse()
    assert not is_final(response)
    response.parameters["triton_final_response"].bool_param = True
    assert is_final(response)


def a_broken(field: str) -> kserve.ModelInferResponse:
    response = a_response("hé")
    if field == "length":
        response.raw_output_contents[0] = b"\xff\xff\xff\x7fhi"
    elif field == "half a length":
        response.raw_output_contents[0] = b"\xff"
    elif field == "empty":
        response.raw_output_contents[0] = b""
    else:
        del response.raw_output_contents[1:]
    return response


@pytest.mark.parametrize("field", ["length", "half a length", "empty", "count"])
def test_tensors_that_cannot_be_read_are_a_failure(field: str) -> None:
    with pytest.raises(BackendFailed, match="cannot be read"):
        heard_of("b", TritonText(a_request(), is_cumulative=False), a_broken(field))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Prompt length (200) exceeds maximum input length (100).", ContextExceeded),
        ("input length 9000 exceeds the max_input_len", ContextExceeded),
        ("[request id: 1] Exceeds maximum queue size", Overloaded),
        ("Stub process 'ensemble_0_1' is not healthy.", BackendFailed),
        ("Request for unknown model: 'm' is not ready", BackendFailed),
        ("Request for unknown model: 'm' is not found", BackendRefused),
        ("output tensor shape does not match size of output for 'text_output'", BackendErred),
        ("CUDA error: an illegal memory access was encountered", BackendErred),
        ("expected 2 inputs but got 1 inputs for model 'ensemble'", InvalidRequest),
    ],
)
def test_each_sentence_has_its_error_whatever_its_status(message: str, kind: type[ExpectedError]) -> None:
    with pytest.raises(ExpectedError) as streamed:
        read(event({"error": message}))
    whole = error_of_triton("b", 400, b'{"error":"%s"}' % message.encode(), {})
    # the first response sets the status; more may follow it
    as_event = error_of_triton("b", 400, event({"error": message}) * 2, {})
    assert {type(streamed.value), type(whole), type(as_event)} == {kind}


def test_errors_of_other_statuses_name_the_number() -> None:
    assert type(error_of_triton("b", 404, b'{"error":"Request for unknown model"}', {})) is BackendLacks
    assert type(error_of_triton("b", 503, b"", {})) is BackendFailed


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b'data: {"x":1}\n\n', b""])
def test_nonsense_and_an_early_end_are_failures(data: bytes) -> None:
    with pytest.raises(BackendFailed):
        read(data)


def test_of_a_tensor_with_many_texts_only_the_first_is_read() -> None:
    response = kserve.ModelInferResponse(raw_output_contents=[b"\1\0\0\0a" * 100_000])
    response.outputs.add(name="text_output", datatype="BYTES")
    text = TritonText(a_request(), is_cumulative=False)
    assert work_of(lambda: heard_of("t", text, response)).lines < 100
    assert heard_of("t", text, response) == [Delta(text="a")]


def test_text_in_pieces_is_not_kept() -> None:
    text, usual = TritonText(a_request(), is_cumulative=False), "word " * 1000
    first = work_of(lambda: list(text.hear({"text_output": usual})))
    for _ in range(100):
        assert list(text.hear({"text_output": usual})) == [Delta(text=usual)]
    assert work_of(lambda: list(text.hear({"text_output": usual}))).allocated <= first.allocated + 1000


async def test_a_response_of_many_fields_is_refused_and_a_long_text_is_not() -> None:
    long = kserve.ModelStreamInferResponse(infer_response=a_response("a" * (1 << 20)))
    assert await read_in_turns(long.SerializeToString(), kserve.ModelStreamInferResponse()) == long
    with pytest.raises(TooManyFields):
        await read_in_turns(b"\x12\0" * (1 << 20), kserve.ModelStreamInferResponse())
