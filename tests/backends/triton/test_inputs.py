from __future__ import annotations

from typing import Any

import pytest

from backends.triton.inputs import Signature, inputs_of, signature_of
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Sampling
from tests.backends.parts import a_request
from tests.standins.triton_server import ENSEMBLE, LLMAPI

TEXT = frozenset({"text_output"})
BODY = {"model": "m", "prompt": "Hello"}


def test_the_ensemble_is_sent_its_words() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=4, repetition_penalty=1.2, seed=7, stop=("x",))
    request, body = a_request(sampling=sampling, max_new_tokens=9), {**BODY, "bad_words": ["y"], "user": "u"}
    assert inputs_of(request, body, Signature(ENSEMBLE, TEXT)) == {
        "text_input": "Hello",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "repetition_penalty": 1.2,
        "seed": 7,
        "stop_words": ["x"],
        "bad_words": ["y"],
        "stream": True,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
    }


def test_llmapi_is_sent_its_own() -> None:
    request = a_request(sampling=Sampling(stop=("x",)), max_new_tokens=9)
    assert inputs_of(request, BODY, Signature(LLMAPI, TEXT)) == {
        "text_input": "Hello",
        "sampling_param_max_tokens": 9,
        "sampling_param_temperature": 1.0,
        "sampling_param_top_p": 1.0,
        "sampling_param_stop": ["x"],
        "sampling_param_exclude_input_from_output": True,
        "streaming": True,
        "return_finish_reason": True,
    }


def test_greedy_is_the_one_most_likely() -> None:
    sent = inputs_of(a_request(sampling=Sampling(temperature=0.0)), BODY, Signature(ENSEMBLE, TEXT))
    assert sent["top_k"] == 1
    assert "temperature" not in sent


@pytest.mark.parametrize(
    ("sampling", "body", "param"),
    [
        (Sampling(min_new_tokens=2), BODY, "min_tokens"),
        (Sampling(presence_penalty=1.0), BODY, "presence_penalty"),
        (Sampling(choices=2), BODY, "n"),
        (Sampling(logit_bias={1: 1.0}), BODY, "logit_bias"),
        (Sampling(), {**BODY, "lora_task_id": 1}, "lora_task_id"),
        (Sampling(), {"prompt": [1, 2]}, "prompt"),
        (Sampling(), {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
    ],
)
def test_what_the_model_has_no_input_for_is_refused_by_name(
    sampling: Sampling, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as failure:
        inputs_of(a_request(sampling=sampling), body, Signature(ENSEMBLE, TEXT))
    assert failure.value.param == param


def test_a_client_cannot_fill_the_routers_inputs() -> None:
    with pytest.raises(InvalidRequest):
        inputs_of(a_request(), {**BODY, "stop_words": ["x"]}, Signature(ENSEMBLE, TEXT))


def test_a_signature_is_read_from_metadata() -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    metadata = {
        "name": "m",
        "inputs": [text],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]}],
    }
    signature = signature_of(metadata)
    assert signature == Signature({"text_input": "BYTES"}, TEXT, is_batched=True)
    assert signature.is_text_model
    assert not signature.can_be_stopped
    assert not signature_of({**metadata, "inputs": [{**text, "shape": [-1]}]}).is_batched


@pytest.mark.parametrize("metadata", [None, {}, {"inputs": [{}]}, {"inputs": [], "outputs": [1]}])
def test_nonsense_for_a_signature_is_a_failure(metadata: object) -> None:
    with pytest.raises(BackendFailed):
        signature_of(metadata)
