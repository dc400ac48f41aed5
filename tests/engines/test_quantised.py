"""vLLM reads what `pointsman quantize` writes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shards.bundled import weights
from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights
from shards.quant.write.checkpoint import write_quantised
from shards.quant.write.forms import FormName
from tests.engines.programs import MISSING, VLLM, VLLMOptions, a_vllm
from tests.shards.tiny_checkpoints import a_batch

FORMS: tuple[FormName, ...] = ("int8", "int4")
PROMPT = [(37 * place + 11) % 900 + 10 for place in range(60)]


def log_probabilities(folder: Path) -> torch.Tensor:
    """Ours, of the matrices as they are stored, in float32."""
    config = read_config(folder)
    loaded = load_weights(folder, config, dtype="float32", is_for_gpu=True)
    return Decoder(config, loaded).forward(a_batch((PROMPT, 0, (0,))), KvCache(config, 1)).log_softmax(-1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[FormName, VLLM]]:
    """A vLLM with a checkpoint of each form, started side by side; the checkpoint's folder has its name."""
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("quantised")
    # its product of four bits on CPUs fails with float32; the last option counts
    options = VLLMOptions(events=False, extra=("--dtype", "bfloat16"))
    vllms: dict[FormName, VLLM] = {}
    try:
        for form in FORMS:
            write_quantised(weights(), folder / form, form)
            vllms[form] = a_vllm(form, folder, options, model=folder / form)
            vllms[form].start()
        yield vllms
    finally:
        for vllm in vllms.values():
            vllm.stop()


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_a_prompt_are_as_probable_there_as_here(quantised: dict[FormName, VLLM], form: FormName) -> None:
    vllm = quantised[form]
    vllm.wait_until_ready()
    body = {"model": "pointsman-reader", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 3}
    request = urllib.request.Request(
        f"{vllm.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        places = json.load(answer)["choices"][0]["prompt_logprobs"]
    ours = log_probabilities(vllm.folder / form)
    errors = [
        abs(float(ours[place - 1, int(token)]) - said["logprob"])
        for place in range(1, len(PROMPT))
        for token, said in places[place].items()
    ]
    assert len(errors) >= 3 * (len(PROMPT) - 1)
    # vLLM computes in bfloat16, and rounds inputs of int8
    assert sum(errors) / len(errors) < 0.2
