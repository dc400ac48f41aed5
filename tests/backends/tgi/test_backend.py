from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.tgi.backend import TGI, TGIOptions, chat_body, generate_body, load_of
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overloaded
from policies.nouns import Capability, Prompt, Sampling, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.standin import TEXT, running
from tests.standins.tgi import TGIServer

PAGE = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 9000
tgi_batch_max_total_tokens 16000
tgi_request_queue_duration_bucket{le="0.001"} 7
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TEXT_PATH = "/v1/completions"


@asynccontextmanager
async def a_backend(server: TGIServer | None = None, **options: Any) -> AsyncIterator[tuple[TGI, TGIServer]]:
    async with running(server or TGIServer()) as standin:
        backend = TGI("t", standin.url, pool="p", options=TGIOptions(**options), clock=lambda: 3.0)
        await backend.probe()
        try:
            yield backend, standin
        finally:
            await backend.close()


def a_text(**fields: Any) -> Prompt:
    return a_prompt(path=TEXT_PATH, body={"model": "m", "prompt": "Hello", **fields})


async def test_a_chat_goes_to_the_chat_api_with_all_that_the_client_put_in() -> None:
    body = {**CHAT, "max_completion_tokens": 9, "stop": "x", "tool_prompt": "t", "user": "u", "presence_penalty": 0}
    async with a_backend() as (backend, server):
        deltas = await everything(backend, a_request(sampling=Sampling(stop=("x",))), Prompt(body=body))
        path, sent, _ = server.received[0]
    assert path == "/v1/chat/completions"
    assert sent == {
        "model": "tgi",
        "messages": CHAT["messages"],
        "max_tokens": 9,
        "stop": ["x"],
        "tool_prompt": "t",
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert text_of(deltas) == TEXT[:9]
    assert deltas[-1].usage == Usage(5, 9)


async def test_a_text_goes_to_the_native_api_which_knows_more_of_it() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=4, seed=7, stop=("zz",), top_logprobs=2, repetition_penalty=1.2
    )
    async with a_backend() as (backend, server):
        request = a_request(sampling=sampling, max_new_tokens=20)
        deltas = await everything(backend, request, a_text(typical_p=0.9, user="u"))
        path, sent, _ = server.received[0]
    assert path == "/generate_stream"
    assert sent == {
        "inputs": "Hello",
        "parameters": {
            "max_new_tokens": 20,
            "details": True,
            "do_sample": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "seed": 7,
            "stop": ["zz"],
            "top_n_tokens": 2,
            "repetition_penalty": 1.2,
            "typical_p": 0.9,
        },
    }
    assert text_of(deltas) == TEXT
    assert all(len(logprob.top) == 2 for delta in deltas for logprob in delta.logprobs)
    assert deltas[-1].usage == Usage(5, len(TEXT) + 1)


def test_what_is_off_is_left_out_since_tgi_refuses_the_edge_of_a_range() -> None:
    greedy = generate_body(a_request(sampling=Sampling(temperature=0.0)), {"prompt": "Hi"}, None)
    assert greedy["parameters"] == {"max_new_tokens": 100, "details": True, "do_sample": False}


async def test_any_name_means_the_model_but_for_those_of_adapters() -> None:
    adapters = frozenset({"sql-lora"})
    async with a_backend(models={"ours": "theirs", "sql": "sql-lora"}, adapters=adapters) as (backend, server):
        described = backend.describe()
        assert described is not None
        assert described.models == {"ours", "sql"}
        for name in ("ours", "m", "sql"):
            await everything(backend, a_request(model=name), Prompt(body=CHAT))
            await everything(backend, a_request(model=name), a_text())
        chats, texts = server.received[::2], server.received[1::2]
    assert [chat.body["model"] for chat in chats] == ["tgi", "tgi", "sql-lora"]
    assert [text.body["parameters"].get("adapter_id") for text in texts] == [None, None, "sql-lora"]


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        (None, None),
        ({"type": "text"}, None),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            {"type": "json_schema", "value": {"name": "a", "schema": {"type": "object"}}},
        ),
        ({"type": "regex", "value": "a+"}, {"type": "regex", "value": "a+"}),
    ],
)
def test_a_shape_is_spelt_as_tgi_does(shape: object, sent: object) -> None:
    assert chat_body(a_request(), {**CHAT, "response_format": shape}, None).get("response_format") == sent


@pytest.mark.parametrize(
    ("sampling", "prompt", "param"),
    [
        (Sampling(choices=2), Prompt(body=CHAT), "n"),
        (Sampling(top_k=2), Prompt(body=CHAT), "top_k"),
        (Sampling(presence_penalty=1.0), Prompt(body=CHAT), "presence_penalty"),
        (Sampling(), Prompt(body={**CHAT, "response_format": {"type": "json_object"}}), "response_format"),
        (Sampling(min_new_tokens=2), a_text(), "min_tokens"),
        (Sampling(logit_bias={1: 1.0}), a_text(), "logit_bias"),
        (Sampling(), a_text(prompt=[1, 2]), "prompt"),
        (Sampling(), a_prompt(body=None), "prompt"),
    ],
)
async def test_what_tgi_would_skip_in_silence_is_refused_by_name(
    sampling: Sampling, prompt: Prompt, param: str
) -> None:
    async with a_backend() as (backend, server):
        with pytest.raises(InvalidRequest) as failure:
            await everything(backend, a_request(sampling=sampling), prompt)
        assert failure.value.param == param
        assert server.received == []


@pytest.mark.parametrize("prompt", [Prompt(body=CHAT), a_text()])
async def test_errors_in_a_stream_are_distinguished(prompt: Prompt) -> None:
    async with a_backend() as (backend, server):
        server.is_busy = True
        with pytest.raises(Overloaded):
            await everything(backend, prompt=prompt)
        server.is_busy, server.context_tokens = False, 4
        with pytest.raises(ContextExceeded):
            await everything(backend, prompt=prompt)


def test_metrics_make_a_load_and_a_gauge_that_was_never_set_is_zero() -> None:
    assert load_of(PAGE, 1.0, max_requests=128) == Load(12, 3, free_tokens=7000, max_requests=128, reported_at=1.0)
    assert load_of(b"tgi_batch_max_total_tokens 16000\n", 1.0) == Load(0, 0, free_tokens=16000, reported_at=1.0)
    assert load_of(b"", 1.0) == Load(0, 0, reported_at=1.0)


async def test_a_probe_reads_info() -> None:
    async with a_backend(TGIServer(queue=2)) as (backend, server):
        described = backend.describe()
        assert described is not None
        assert (described.models, described.context_tokens) == ({"m"}, 4096)
        assert Capability.TOKEN_IDS not in described.capabilities
        assert backend.load() == Load(0, 2, free_tokens=16000, max_requests=128, reported_at=3.0)
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()
