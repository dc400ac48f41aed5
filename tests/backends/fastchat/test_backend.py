from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.fastchat.backend import FastChat, FastChatOptions
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overloaded
from policies.nouns import Prompt, Sampling, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.fastchat import VICUNA, FastChatWorker
from tests.standins.standin import TEXT, running

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def a_backend(
    server: FastChatWorker | None = None, **options: Any
) -> AsyncIterator[tuple[FastChat, FastChatWorker]]:
    async with running(server or FastChatWorker()) as standin:
        made = FastChatOptions(**options)
        backend = FastChat("f", standin.url, pool="p", options=made, clock=lambda: 3.0)
        await backend.probe()
        try:
            yield backend, standin
        finally:
            await backend.close()


def a_text(text: str = "Hello", **fields: Any) -> Prompt:
    return Prompt(body={"model": "m", "prompt": text, **fields}, path="/v1/completions")


async def test_a_chat_is_put_into_the_workers_own_template_with_its_stops() -> None:
    server = FastChatWorker(conversation={**VICUNA, "stop_str": "###", "stop_token_ids": [2]})
    async with a_backend(server) as (backend, _):
        request = a_request(sampling=Sampling(stop=("x",), top_k=4, stop_token_ids=(1,)), max_new_tokens=50)
        deltas = await everything(backend, request, Prompt(body=CHAT))
    assert server.received[0].body == {
        "model": "m",
        "prompt": "A chat. USER: Hello ASSISTANT:",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 4,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_new_tokens": 50,
        "echo": False,
        "stop": ["x", "###"],
        "stop_token_ids": [1, 2],
    }
    assert text_of(deltas) == TEXT
    assert deltas[-1].usage == Usage(5, len(TEXT))


async def test_a_text_goes_unchanged_and_no_half_character_is_sent() -> None:
    async with a_backend() as (backend, server):
        deltas = await everything(backend, prompt=a_text())
    assert (server.received[0].body["prompt"], server.received[0].body["stop"]) == ("Hello", [])
    assert text_of(deltas) == TEXT


async def test_an_answer_that_could_have_the_prompt_cut_is_made_shorter() -> None:
    async with a_backend(FastChatWorker(context_tokens=64)) as (backend, server):
        deltas = await everything(backend, a_request(max_new_tokens=1000), a_text("x" * 50))
        assert server.received[0].body["max_new_tokens"] == 13
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.prompt_tokens == 50


@pytest.mark.parametrize(
    ("text", "fields", "param"),
    [("x" * 63, {}, None), ("x" * 500, {"max_tokens": 5}, None), ("x" * 50, {"max_tokens": 14}, "max_tokens")],
)
async def test_what_the_worker_would_cut_in_silence_is_refused(
    text: str, fields: dict[str, Any], param: str | None
) -> None:
    async with a_backend(FastChatWorker(context_tokens=64)) as (backend, server):
        with pytest.raises(ContextExceeded, match=r"maximum context length is 64 tokens. .* of 'm'") as failure:
            await everything(backend, prompt=a_text(text, **fields))
        assert failure.value.param == param
        assert server.received == []


@pytest.mark.parametrize(
    ("options", "sampling", "param"),
    [
        ({}, Sampling(presence_penalty=1.0), "presence_penalty"),
        ({"vllm_worker": True}, Sampling(repetition_penalty=1.2), "repetition_penalty"),
        ({}, Sampling(seed=1), "seed"),
        ({}, Sampling(choices=2), "n"),
        ({}, Sampling(top_logprobs=1), "logprobs"),
    ],
)
async def test_sampling_that_this_worker_does_not_know_is_refused_by_name(
    options: dict[str, Any], sampling: Sampling, param: str
) -> None:
    async with a_backend(**options) as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), a_text())
    assert failure.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (a_prompt(body=None), "prompt"),
        (Prompt(body={"prompt": [1, 2]}, path="/v1/completions"), "prompt"),
        (a_text(suffix="x"), "suffix"),
        (Prompt(body={**CHAT, "tools": [{}]}), "tools"),
    ],
)
async def test_what_fastchat_would_skip_is_refused_by_name(prompt: Prompt, param: str) -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, prompt=prompt)
    assert failure.value.param == param


async def test_a_controller_takes_texts_alone() -> None:
    async with a_backend(FastChatWorker(is_controller=True)) as (backend, _):
        assert text_of(await everything(backend, prompt=a_text())) == TEXT
        with pytest.raises(InvalidRequest, match="template is not known"):
            await everything(backend, prompt=Prompt(body=CHAT))


async def test_a_worker_that_names_no_reason_is_heard_to_its_end() -> None:
    async with a_backend(FastChatWorker(reports_finish=False)) as (backend, _):
        assert (await everything(backend, prompt=a_text()))[-2].finish_reason == "stop"


async def test_errors_come_in_frames() -> None:
    async with a_backend() as (backend, server):
        server.is_busy = True
        with pytest.raises(Overloaded):
            await everything(backend)
        server.is_busy, server.error = False, (50002, "CUDA out of memory")
        with pytest.raises(BackendFailed, match="CUDA"):
            await everything(backend)


async def test_a_probe_learns_models_context_and_queue() -> None:
    async with a_backend(FastChatWorker(waiting=7), max_requests=5) as (backend, server):
        assert backend.load() == Load(5, 2, max_requests=5, reported_at=3.0)
        described = backend.describe()
        assert described is not None
        assert (described.models, described.context_tokens, described.capabilities) == ({"m"}, 4096, frozenset())
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()


async def test_without_a_limit_all_that_a_worker_has_counts_as_running() -> None:
    async with a_backend(FastChatWorker(waiting=7)) as (backend, _):
        assert backend.load() == Load(7, reported_at=3.0)
