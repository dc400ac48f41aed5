from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.llama_cpp.backend import LlamaCpp, completion_body, load_of_slots
from backends.openai.answer import deltas_of
from backends.openai.compatible import OpenAIOptions
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest
from policies.nouns import Prompt, Sampling, TokenLogprob, Usage
from shards.wire.translate import pack_ids
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.llama_cpp import LlamaCppServer
from tests.standins.standin import TEXT, running

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def a_backend(
    server: LlamaCppServer | None = None, **options: Any
) -> AsyncIterator[tuple[LlamaCpp, LlamaCppServer]]:
    async with running(server or LlamaCppServer()) as standin:
        backend = LlamaCpp("l", standin.url, pool="p", options=OpenAIOptions(**options), clock=lambda: 3.0)
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_a_body_goes_through_whole_but_for_the_slot_which_may_be_anothers() -> None:
    body = {**CHAT, "grammar": "root ::= [a-z]+", "id_slot": 2, "repetition_penalty": 1.2, "user": "u"}
    async with a_backend() as (backend, server):
        await everything(backend, a_request(sampling=Sampling(repetition_penalty=1.2)), Prompt(body=body))
        path, sent, _ = server.received[0]
    assert path == "/v1/chat/completions"
    assert sent == {
        **CHAT,
        "grammar": "root ::= [a-z]+",
        "user": "u",
        "repeat_penalty": 1.2,
    }


async def test_token_ids_go_to_the_native_api_which_reports_ids_progress_and_cached_tokens() -> None:
    async with a_backend(LlamaCppServer(cached_tokens=2)) as (backend, server):
        deltas = await everything(backend, a_request(sampling=Sampling(top_logprobs=0)), a_prompt(body=None))
        assert server.received[0].path == "/completion"
    assert text_of(deltas) == TEXT
    assert [delta.computed_tokens for delta in deltas if delta.computed_tokens is not None] == [2, 5]
    assert [token for delta in deltas for token in delta.token_ids] == [ord(letter) for letter in TEXT]
    assert [logprob.top for delta in deltas for logprob in delta.logprobs] == [()] * len(TEXT)
    assert deltas[-1].usage == Usage(5, len(TEXT), 2)


def test_the_native_body_has_all_requested_settings_and_switches_llama_cpps_own_filters_off() -> None:
    plain = completion_body(a_request(max_new_tokens=9), pack_ids([1, 2]))
    assert (plain["prompt"], plain["n_predict"], plain["top_k"], plain["min_p"]) == ([1, 2], 9, 0, 0.0)
    assert not {"seed", "n_probs"} & plain.keys()
    asked = Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.4, seed=7, stop=("x",), ignore_eos=True, top_logprobs=2, logit_bias={3: -1.0},
    )  # fmt: skip
    assert completion_body(a_request(sampling=asked, max_new_tokens=9), pack_ids([1])) == {
        "prompt": [1],
        "n_predict": 9,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "stop": ["x"],
        "ignore_eos": True,
        "logit_bias": [[3, -1.0]],
        "seed": 7,
        "n_probs": 2,
    }


@pytest.mark.parametrize("prompt", [a_prompt(), a_prompt(body=None)])
@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(min_new_tokens=2), "min_tokens"),
        (Sampling(stop_token_ids=(1,)), "stop_token_ids"),
        (Sampling(choices=2), "n"),
    ],
)
async def test_what_llama_cpp_would_skip_in_silence_is_refused_by_name(
    sampling: Sampling, param: str, prompt: Prompt
) -> None:
    async with a_backend() as (backend, server):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), prompt)
        assert (failure.value.param, server.received) == (param, [])


@pytest.mark.parametrize("prompt", [a_prompt(), a_prompt(body=None)])
async def test_a_prompt_that_is_too_long_is_refused_in_either_dialect(prompt: Prompt) -> None:
    async with a_backend(LlamaCppServer(context_tokens=4)) as (backend, _):
        with pytest.raises(ContextExceeded, match="available context size"):
            await everything(backend, prompt=prompt)


async def test_a_probe_learns_model_slots_and_load() -> None:
    async with a_backend(LlamaCppServer(waiting=3, context_tokens=2048)) as (backend, server):
        await backend.probe()
        assert backend.load() == Load(0, 3, max_requests=4, reported_at=3.0)
        described = backend.describe()
        assert described is not None
        assert (described.models, described.context_tokens) == ({"m"}, 2048)
        server.is_loading = True
        with pytest.raises(BackendFailed, match="/health answered 503"):
            await backend.probe()


async def test_without_metrics_the_slots_report_the_load_and_configured_limits_go_first() -> None:
    async with a_backend(LlamaCppServer(has_metrics=False), max_requests=2, context_tokens=99) as (backend, _):
        await backend.probe()
        assert backend.load() == Load(0, max_requests=2, reported_at=3.0)
        described = backend.describe()
        assert described is not None
        assert described.context_tokens == 99


async def test_llama_cpp_pythons_server_is_spoken_to_in_openais_dialect_alone() -> None:
    async with a_backend(LlamaCppServer(is_native=False)) as (backend, server):
        await backend.probe()
        assert backend.load() == Load()
        assert text_of(await everything(backend)) == TEXT
        with pytest.raises(InvalidRequest, match="takes text"):
            await everything(backend, prompt=a_prompt(body=None))
        assert len(server.received) == 1


async def test_a_wrong_key_is_an_error() -> None:
    async with a_backend(LlamaCppServer(key="right"), key="wrong") as (backend, _):
        with pytest.raises(BackendFailed, match="let the router in"):
            await everything(backend, prompt=a_prompt(body=None))


@pytest.mark.parametrize("page", [b"{", b"[1]", b'[{"id":0}]', b"5"])
def test_nonsense_about_slots_is_a_failure(page: bytes) -> None:
    with pytest.raises(BackendFailed):
        load_of_slots(page, 1.0)


def test_log_probabilities_of_a_text_are_read_in_the_shape_of_chats() -> None:
    entry = {"id": 39, "token": "A", "bytes": [65], "logprob": -2.0, "top_logprobs": []}
    chunk = {"choices": [{"text": "A", "index": 0, "logprobs": {"content": [entry]}, "finish_reason": None}]}
    (delta,) = deltas_of(chunk)
    assert delta.logprobs == (TokenLogprob(39, "A", -2.0, octets=b"A"),)
