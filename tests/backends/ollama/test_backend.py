from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.ollama.backend import USUAL_NUM_CTX, Ollama, OllamaOptions, shown_of
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overloaded
from policies.nouns import Capability, Prompt, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.ollama import OllamaServer
from tests.standins.standin import TEXT, running

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def a_backend(server: OllamaServer | None = None, **options: Any) -> AsyncIterator[tuple[Ollama, OllamaServer]]:
    async with running(server or OllamaServer(context_tokens=32768)) as standin:
        backend = Ollama("o", standin.url, pool="p", options=OllamaOptions(**options))
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_a_chat_and_a_text_go_to_the_native_api() -> None:
    async with a_backend(keep_alive="30m") as (backend, server):
        chat = await everything(backend, prompt=Prompt(body=CHAT))
        text = await everything(backend, prompt=Prompt(body={"prompt": "Hello"}, path="/v1/completions"))
    assert [(request.path, request.body["model"], request.body["keep_alive"]) for request in server.received] == [
        ("/api/chat", "m", "30m"),
        ("/api/generate", "m", "30m"),
    ]
    assert text_of(chat) == text_of(text) == TEXT
    assert chat[-1].usage == text[-1].usage == Usage(5, len(TEXT))


async def test_every_request_states_the_same_context_so_that_the_model_is_loaded_once() -> None:
    async with a_backend(num_ctx=16384) as (backend, server):
        await backend.probe()
        for _ in range(3):
            await everything(backend)
            await backend.probe()
        assert {request.body["options"]["num_ctx"] for request in server.received} == {16384}
        assert server.loads == 1


@pytest.mark.parametrize(
    ("server", "options", "expected"),
    [
        ({}, {}, USUAL_NUM_CTX),
        ({"modelfile_num_ctx": 8192}, {}, 8192),
        ({"modelfile_num_ctx": 8192, "loaded": {"m:latest": 12288}}, {}, 12288),
        ({"modelfile_num_ctx": 8192, "loaded": {"m:latest": 12288}}, {"num_ctx": 16384}, 16384),
        # a model is loaded with no more than it was trained on
        ({"context_tokens": 2048}, {"num_ctx": 16384}, 2048),
    ],
)
async def test_the_context_is_the_pools_or_the_loaded_ones_or_the_modelfiles(
    server: dict[str, Any], options: dict[str, Any], expected: int
) -> None:
    async with a_backend(OllamaServer(**{"context_tokens": 32768, **server}), **options) as (backend, standin):
        await backend.probe()
        described = backend.describe()
        assert described is not None
        assert described.context_tokens == expected
        await everything(backend)
        assert standin.received[0].body["options"]["num_ctx"] == expected


async def test_what_ollama_would_cut_in_silence_is_refused_before_it_is_sent() -> None:
    async with a_backend(num_ctx=64) as (backend, server):
        await backend.probe()
        with pytest.raises(ContextExceeded, match=r"maximum context length is 64 tokens.*raise the pool's num_ctx"):
            await everything(backend, a_request(prompt_tokens=40, max_new_tokens=30))
        assert server.received == []
        await everything(backend, a_request(prompt_tokens=40, max_new_tokens=24))


async def test_a_length_that_was_only_guessed_is_ollamas_to_refuse_and_it_does_not_cut() -> None:
    long = Prompt(body={"messages": [{"role": "user", "content": "x" * 100}]})
    async with a_backend(num_ctx=64) as (backend, server):
        await backend.probe()
        with pytest.raises(ContextExceeded, match=r"request \(100 tokens\) exceeds the available context"):
            await everything(backend, a_request(prompt_tokens=25), long)
        assert server.received[0].body["truncate"] is False


async def test_a_server_that_cuts_in_silence_is_not_well() -> None:
    async with a_backend(OllamaServer(version="0.12.3")) as (backend, server):
        with pytest.raises(BackendFailed, match=r"update it to 0\.12\.4"):
            await backend.probe()
        server.version = "0.0.0"
        await backend.probe()


async def test_models_have_their_short_names_and_those_that_cannot_complete_are_left_out() -> None:
    others = {"embedder:latest": ("embedding",), "qwen3:8b": ("completion",)}
    async with a_backend(OllamaServer(others=others), models={"ours": "qwen3:8b", "mine": "m"}) as (backend, _):
        await backend.probe()
        described = backend.describe()
    assert described is not None
    assert described.models == {"ours", "mine"}
    assert described.capabilities == Ollama.capabilities
    assert Capability.SUFFIX in described.capabilities


async def test_a_model_that_was_pulled_anew_is_looked_at_anew() -> None:
    async with a_backend() as (backend, server):
        await backend.probe()
        server.others = {"new:latest": ("completion",)}
        server.model = "gone"
        await backend.probe()
        described = backend.describe()
    assert described is not None
    assert described.models == {"gone", "gone:latest", "new", "new:latest"}


async def test_a_model_that_is_removed_while_it_is_looked_at_is_left_out_and_the_server_is_well() -> None:
    others = {"removed:latest": ("completion",)}
    async with a_backend(OllamaServer(others=others, listed_only=("removed:latest",))) as (backend, _):
        await backend.probe()
        described = backend.describe()
    assert described is not None
    assert described.models == {"m", "m:latest"}


async def test_a_cached_prompt_is_counted_though_ollama_leaves_it_out() -> None:
    async with a_backend(OllamaServer(hides_cached=True, cached_tokens=4)) as (backend, _):
        assert (await everything(backend))[-1].usage == Usage(5, len(TEXT), 4)


async def test_thinking_and_calls_reach_the_client() -> None:
    async with a_backend(OllamaServer(thinking="Hm", calls=(("f", {"a": 1}),))) as (backend, _):
        deltas = await everything(backend)
    messages = [delta.message for delta in deltas if delta.message]
    assert messages[0] == {"reasoning": "Hm"}
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert deltas[-2].finish_reason == "tool_calls"


async def test_a_full_queue_is_busy_and_an_answer_that_breaks_off_has_failed() -> None:
    async with a_backend(OllamaServer(is_busy=True)) as (backend, server):
        with pytest.raises(Overloaded):
            await everything(backend)
        server.is_busy, server.breaks_off = False, True
        with pytest.raises(BackendFailed, match="broke the answer off"):
            await everything(backend)


async def test_token_ids_alone_are_refused() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, prompt=a_prompt(body=None))
    assert failure.value.param == "prompt"


async def test_it_reports_no_queue_and_an_ill_server_fails_its_probe() -> None:
    async with a_backend(OllamaServer(is_ill=True), max_requests=4) as (backend, _):
        with pytest.raises(BackendFailed):
            await backend.probe()
        assert backend.load() == Load(max_requests=4)


@pytest.mark.parametrize(("text", "sent"), [("30m", "30m"), ("-1", -1), ("0", 0), ("3600", 3600)])
async def test_a_number_is_sent_as_one_since_ollama_wants_a_unit_in_a_text(text: str, sent: object) -> None:
    async with a_backend(keep_alive=text) as (backend, server):
        await everything(backend)
    assert server.received[0].body["keep_alive"] == sent


def test_nonsense_about_a_model_is_a_failure() -> None:
    with pytest.raises(BackendFailed):
        shown_of({"model_info": [1]}, "d")
    assert shown_of({}, "d").completes


@pytest.mark.parametrize(
    ("version", "is_served"),
    [
        ("0.12.4", True),
        ("0.12.4-rc1", True),
        ("0.12.10", True),
        ("1.0.0+build.7", True),
        ("0.12.3", False),
        ("0.12.3-rc9", False),
        ("0.12", False),
        ("0.9.14-2-gabc123", False),
        # from source: commits behind no tag that says anything
        ("0.0.0", True),
        ("0.0.0-rc1", True),
        ("0.0.0-37-g1e7f", True),
        ("main", True),
    ],
)
async def test_a_version_is_its_first_three_numbers_whatever_follows(version: str, is_served: bool) -> None:
    async with a_backend(OllamaServer(version=version)) as (backend, _):
        if is_served:
            await backend.probe()
        else:
            with pytest.raises(BackendFailed, match="silently truncates"):
                await backend.probe()
