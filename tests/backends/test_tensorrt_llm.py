from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.tensorrt_llm import TensorRTLLM, TensorRTLLMOptions, load_of
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest
from policies.nouns import Prompt
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.standins.standin import TEXT, running
from tests.standins.tensorrt_llm import TensorRTLLMServer

# Two records, the older one last, as two ranks may hand them out.
PAGE = b"""[{"gpuMemUsage": 76665782272, "iter": 155, "iterLatencyMS": 7.0, "kvCacheStats": {"allocNewBlocks": 3126,
"cacheHitRate": 0.00128, "freeNumBlocks": 101253, "maxNumBlocks": 101256, "tokensPerBlock": 32, "usedNumBlocks": 3},
"inflightBatchingStats": {"numContextRequests": 1, "numGenRequests": 4}, "maxNumActiveRequests": 2048,
"numActiveRequests": 5, "numQueuedRequests": 3}, {"iter": 154, "numActiveRequests": 1}]"""


@asynccontextmanager
async def a_backend(**options: Any) -> AsyncIterator[tuple[TensorRTLLM, TensorRTLLMServer]]:
    async with running(TensorRTLLMServer()) as standin:
        made = TensorRTLLMOptions(**options)
        backend = TensorRTLLM("t", standin.url, pool="p", options=made, clock=lambda: 8.0)
        try:
            yield backend, standin
        finally:
            await backend.close()


def test_the_newest_record_is_the_load() -> None:
    assert load_of(PAGE, 2.0) == Load(5, 3, free_tokens=101253 * 32, max_requests=2048, reported_at=2.0)


def test_a_record_may_lack_what_the_engine_does_not_keep() -> None:
    page = json.dumps([{"iter": 1, "numActiveRequests": 2, "kvCacheStats": None}]).encode()
    assert load_of(page, 2.0) == Load(running=2, reported_at=2.0)


@pytest.mark.parametrize("page", [b"{", b"5", b"[5]", b"\xff"])
def test_invalid_statistics_are_an_error(page: bytes) -> None:
    with pytest.raises(BackendFailed):
        load_of(page, 0.0)


async def test_where_no_iteration_ran_nothing_is_known_and_the_routers_own_counts_stand_in() -> None:
    async with a_backend() as (backend, server):
        server.queued = 2
        server.iterate()
        await backend.probe()
        assert backend.load().waiting == 2
        assert backend.load().reported_at == 8.0
        await backend.probe()
        assert backend.load() == Load()


async def test_statistics_that_others_read_are_left_to_them() -> None:
    async with a_backend(drain_metrics=False) as (backend, server):
        server.iterate()
        await backend.probe()
        assert backend.load() == Load()
        assert len(server.records) == 1


async def test_the_salt_is_the_tenants_domain_and_disaggregation_is_not_the_clients() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "disaggregated_params": {}, "priority": 1}
    async with a_backend() as (backend, server):
        await everything(backend, a_request(domain="acme"), Prompt(body=body))
        assert server.received[0].body["cache_salt"] == "acme"
    async with a_backend(cache_salt=False) as (backend, server):
        await everything(backend, a_request(domain="acme"), Prompt(body=body))
        assert "cache_salt" not in server.received[0].body


async def test_token_ids_go_to_completions() -> None:
    async with a_backend() as (backend, server):
        assert text_of(await everything(backend, prompt=a_prompt(body=None))) == TEXT
        assert server.received[0].body["prompt"] == [39, 68, 75, 75, 78]


async def test_a_field_that_it_does_not_know_is_the_clients_mistake() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest, match="extra_forbidden"):
            await everything(backend, prompt=Prompt(body={"model": "m", "messages": [], "vendor": 1}))


async def test_its_sentence_about_a_request_reaches_the_client_unchanged() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(InvalidRequest) as refused:
            await everything(backend, prompt=Prompt(body={"model": "m", "messages": [], "vendor": 1}))
    assert str(refused.value) == "[{'type': 'extra_forbidden', 'loc': ('body', 'vendor')}]"


async def test_a_prompt_that_is_too_long_is_refused_as_such() -> None:
    async with a_backend() as (backend, server):
        server.context_tokens = 2
        with pytest.raises(ContextExceeded, match="max_seq_len"):
            await everything(backend)


async def test_an_ill_server_fails_the_probe() -> None:
    async with a_backend() as (backend, server):
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()
