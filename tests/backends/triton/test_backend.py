from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from backends.base import Load
from backends.triton.backend import TritonOptions, TritonServer, load_of
from backends.triton.grpc import infer_request
from backends.triton.inputs import Signature
from policies.errors import BackendFailed, ContextExceeded, DeadlineExceeded, InvalidRequest, Overloaded
from policies.nouns import Prompt, Sampling, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.shards.attached import eventually
from tests.standins.standin import TEXT, running
from tests.standins.triton_server import LLMAPI, TritonStandIn

# What tritonclient 2.73's own generated code writes for the same request.
GOLDEN = (
    b'\n\x01m\x1a\x017"(\n"triton_enable_empt'
    b"y_final_response\x12\x02\x08\x01*\x1e\n\ntext"
    b"_input\x12\x05BYTES\x1a\x02\x01\x01*\x05B\x03h\xc3\xa9*\x1c\n\n"
    b"max_tokens\x12\x05INT32\x1a\x02\x01\x01*\x03\x12\x01\t*\x19"
    b"\n\x05top_p\x12\x04FP32\x1a\x02\x01\x01*\x062\x04\x00\x00\x00?*\x1f\n"
    b"\nstop_words\x12\x05BYTES\x1a\x02\x01\x02*\x06B\x01xB"
    b"\x01y*\x17\n\x06stream\x12\x04BOOL\x1a\x02\x01\x01*\x03\n\x01\x01*"
    b"\x1c\n\x04seed\x12\x06UINT64\x1a\x02\x01\x01*\x08*\x06\x80\x80\x80\x80\x80"
    b" "
)
PROMPT = Prompt(body={"model": "m", "prompt": "Hello"}, path="/v1/completions")


@asynccontextmanager
async def a_backend(
    server: TritonStandIn | None = None, *, over_grpc: bool = False, **options: Any
) -> AsyncIterator[tuple[TritonServer, TritonStandIn]]:
    async with running(server or TritonStandIn()) as standin:
        port = standin.grpc_port if over_grpc else None
        made = TritonOptions(grpc_port=port, metrics_port=urlsplit(standin.url).port or 0, **options)
        backend = TritonServer("t", standin.url, pool="p", options=made, clock=lambda: 3.0)
        await backend.probe()
        try:
            yield backend, standin
        finally:
            await backend.close()


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_a_text_is_answered_with_the_prompts_length_from_the_model(over_grpc: bool) -> None:
    async with a_backend(over_grpc=over_grpc) as (backend, _):
        sampling = Sampling(stop=("zz", "yy"), seed=3, temperature=0.5)
        deltas = await everything(backend, a_request(prompt_tokens=99, sampling=sampling), PROMPT)
        short = await everything(backend, a_request(max_new_tokens=3), PROMPT)
    assert text_of(deltas) == TEXT
    assert deltas[-1].usage == Usage(5, len(TEXT))
    assert (text_of(short), short[-2].finish_reason) == (TEXT[:3], "length")


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_a_model_that_accumulates_is_heard_once(over_grpc: bool) -> None:
    async with a_backend(TritonStandIn(accumulates=True), over_grpc=over_grpc, cumulative=True) as (backend, _):
        deltas = await everything(backend, prompt=PROMPT)
    assert text_of(deltas) == TEXT
    assert "\ufffd" not in text_of(deltas)


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_errors_are_recognised_by_their_sentence(over_grpc: bool) -> None:
    async with a_backend(over_grpc=over_grpc) as (backend, server):
        server.is_busy = True
        with pytest.raises(Overloaded):
            await everything(backend, prompt=PROMPT)
        server.is_busy, server.fails_with = False, "Stub process 'm_0' is not healthy."
        with pytest.raises(BackendFailed, match="not healthy"):
            await everything(backend, prompt=PROMPT)
        server.context_tokens = 4
        with pytest.raises(ContextExceeded, match="maximum input length"):
            await everything(backend, prompt=PROMPT)


async def test_a_model_with_a_stop_input_is_stopped_under_the_generations_own_id() -> None:
    async with a_backend(TritonStandIn(inputs=LLMAPI, hangs_after=1)) as (backend, server):
        async with aclosing(backend.generate(a_request(), PROMPT)) as deltas:
            await anext(deltas)
        await eventually(lambda: server.stopped == [server.received[0].body["id"]])


async def test_models_that_do_not_take_and_give_text_are_not_served() -> None:
    async with a_backend(models={"llama": "m"}) as (backend, _):
        described = backend.describe()
    assert described is not None
    assert (described.models, described.capabilities) == ({"llama"}, frozenset())


async def test_what_the_model_has_no_input_for_is_refused_before_it_is_sent() -> None:
    async with a_backend() as (backend, server):
        for prompt, param in ((a_prompt(), "messages"), (a_prompt(body=None), "prompt")):
            with pytest.raises(InvalidRequest) as failure:
                await everything(backend, prompt=prompt)
            assert failure.value.param == param
        assert server.received == []


async def test_a_deadline_is_kept_over_grpc_and_silence_is_the_servers_fault() -> None:
    async with a_backend(TritonStandIn(hangs_after=1), over_grpc=True, idle_s=0.05) as (backend, _):
        with pytest.raises(BackendFailed, match="was silent"):
            await everything(backend, prompt=PROMPT)
    async with a_backend(TritonStandIn(hangs_after=1), over_grpc=True) as (backend, _):
        with pytest.raises(DeadlineExceeded):
            await everything(backend, a_request(deadline_s=0.05), PROMPT)


def test_inputs_become_tensors_of_one_row_and_a_last_response_is_asked_for() -> None:
    inputs: dict[str, Any] = {
        "text_input": "hé",
        "max_tokens": 9,
        "top_p": 0.5,
        "stop_words": ["x", "y"],
        "stream": True,
    }
    inputs["seed"] = 2**40
    kinds = {"text_input": "BYTES", "max_tokens": "INT32", "top_p": "FP32", "stop_words": "BYTES"}
    signature = Signature({**kinds, "stream": "BOOL", "seed": "UINT64"}, frozenset())
    sent = infer_request("m", inputs, signature, "7")
    assert sent.SerializeToString(deterministic=True) == GOLDEN
    assert [list(tensor.shape) for tensor in sent.inputs] == [[1, 1], [1, 1], [1, 1], [1, 2], [1, 1], [1, 1]]
    assert list(sent.inputs[3].contents.bytes_contents) == [b"x", b"y"]
    flat = infer_request("m", inputs, Signature(signature.inputs, frozenset(), is_batched=False), "7")
    assert [list(tensor.shape) for tensor in flat.inputs][3] == [2]


def test_metrics_make_a_load() -> None:
    page = b"""# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_inference_pending_request_count{model="ensemble",version="1"} 2
"""
    assert load_of(page, 1.0) == Load(5, 3, free_tokens=6400, max_requests=512, reported_at=1.0)
    assert load_of(page.splitlines(keepends=True)[-1], 1.0) == Load(waiting=2, reported_at=1.0)


async def test_a_probe_learns_load_and_a_server_without_metrics_makes_no_reports() -> None:
    async with a_backend(TritonStandIn(waiting=2)) as (backend, server):
        assert backend.load() == Load(0, 2, free_tokens=5760, max_requests=64, reported_at=3.0)
        server.is_ill = True
        with pytest.raises(BackendFailed, match="/v2/health/ready answered 400"):
            await backend.probe()
    async with a_backend(TritonStandIn(has_metrics=False)) as (backend, _):
        assert backend.load() == Load()
