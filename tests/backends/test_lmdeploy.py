from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.lmdeploy import LMDeploy, LMDeployOptions, generate_body, load_of
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest
from policies.nouns import Prompt, Sampling, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.lmdeploy import LMDeployServer
from tests.standins.standin import TEXT, running

PAGE = b"""# HELP lmdeploy:num_requests_running Number of requests in model execution batches.
lmdeploy:num_api_requests_waiting{engine="0",model_name="internlm"} 1.0
lmdeploy:num_requests_running{engine="0",model_name="internlm"} 4.0
lmdeploy:num_requests_waiting{engine="0",model_name="internlm"} 2.0
lmdeploy:gpu_cache_usage_perc{engine="0",model_name="internlm"} 0.75
"""


@asynccontextmanager
async def a_backend(**options: Any) -> AsyncIterator[tuple[LMDeploy, LMDeployServer]]:
    async with running(LMDeployServer()) as standin:
        made = LMDeployOptions(**options)
        backend = LMDeploy("l", standin.url, pool="p", options=made, clock=lambda: 3.0)
        try:
            yield backend, standin
        finally:
            await backend.close()


def test_those_that_wait_for_the_engine_and_in_it_are_added_up() -> None:
    assert load_of(PAGE, 1.0) == Load(running=4, waiting=3, reported_at=1.0)
    assert load_of(PAGE, 1.0, kv_tokens=1000).free_tokens == 250
    assert load_of(b"", 1.0, kv_tokens=1000) == Load(reported_at=1.0)


async def test_a_text_goes_through_whole_but_for_the_servers_own_handles() -> None:
    body = {"model": "m", "prompt": "Hello", "spaces_between_special_tokens": False}
    forged = {"session_id": 1, "migration_request": {}, "with_cache": True, "preserve_cache": True}
    async with a_backend() as (backend, server):
        await everything(backend, prompt=Prompt(body={**body, **forged}, path="/v1/completions"))
        sent = server.received[0].body
    assert sent == body


@pytest.mark.parametrize("body", [None, {"model": "m", "prompt": [39, 68, 75, 75, 78]}])
async def test_token_ids_go_to_the_native_api(body: dict[str, Any] | None) -> None:
    async with a_backend() as (backend, server):
        request = a_request(sampling=Sampling(top_logprobs=0))
        deltas = await everything(backend, request, a_prompt(body=body, path="/v1/completions"))
        path, sent, _ = server.received[0]
    assert (path, sent["input_ids"]) == ("/generate", [39, 68, 75, 75, 78])
    assert text_of(deltas) == TEXT
    assert [logprob.token_id for delta in deltas for logprob in delta.logprobs] == [ord(letter) for letter in TEXT]
    assert deltas[-1].usage == Usage(5, len(TEXT))


def test_the_native_api_gets_only_what_was_asked_for() -> None:
    sampling = Sampling(temperature=0.5, stop=("x",), stop_token_ids=(2,), top_k=4, ignore_eos=True)
    assert generate_body(a_request(sampling=sampling, max_new_tokens=9), [1]) == {
        "input_ids": [1],
        "max_tokens": 9,
        "stream": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "stop_token_ids": [2],
        "top_k": 4,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(seed=1), "seed"),
        (Sampling(choices=2), "n"),
        (Sampling(top_logprobs=2), "logprobs"),
        (Sampling(logit_bias={1: 1.0}), "logit_bias"),
    ],
)
async def test_what_the_native_api_does_not_know_is_refused_by_name(sampling: Sampling, param: str) -> None:
    async with a_backend() as (backend, server):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), a_prompt(body=None))
        assert failure.value.param == param
        assert server.received == []


async def test_log_probabilities_of_a_text_are_refused_before_the_server_breaks_off() -> None:
    prompt = Prompt(body={"model": "m", "prompt": "Hello", "logprobs": 1}, path="/v1/completions")
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=Sampling(top_logprobs=1)), prompt)
    assert failure.value.param == "logprobs"


@pytest.mark.parametrize("body", [{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}, None])
async def test_a_prompt_that_is_too_long_is_refused_in_either_dialect(body: dict[str, Any] | None) -> None:
    async with a_backend() as (backend, server):
        server.context_tokens = 4
        with pytest.raises(ContextExceeded, match="context length"):
            await everything(backend, prompt=a_prompt(body=body))


async def test_a_server_without_its_engine_has_failed() -> None:
    async with a_backend() as (backend, server):
        server.is_busy = True
        with pytest.raises(BackendFailed, match="engine is unavailable"):
            await everything(backend)


async def test_a_probe_learns_models_and_load() -> None:
    async with a_backend(kv_tokens=1000, context_tokens=4096) as (backend, server):
        server.waiting = 2
        await backend.probe()
        assert backend.load() == Load(0, 2, free_tokens=500, reported_at=3.0)
        described = backend.describe()
        assert described is not None
        assert (described.models, described.context_tokens) == ({"m"}, 4096)
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()
