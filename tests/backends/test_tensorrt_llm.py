from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.base import Load
from backends.tensorrt_llm import TensorRTLLM, TensorRTLLMOptions, load_of, transfer_of
from policies.errors import BackendErred, BackendFailed, ContextExceeded, InvalidRequest
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


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": True}
PARAMS = {"request_type": "context_only", "ctx_request_id": 1, "encoded_opaque_state": "c3RhdGU="}


async def test_a_context_server_is_asked_for_one_token_and_for_what_the_next_server_needs() -> None:
    async with a_backend() as (backend, server):
        done = await backend.prefill(a_request(), Prompt(body=CHAT))
        sent = server.received[0].body
    assert (sent["disaggregated_params"], sent["max_tokens"], sent["stream"]) == (
        {"request_type": "context_only"},
        1,
        False,
    )
    continued = {"request_type": "generation_only", "ctx_request_id": 1, "first_gen_tokens": [71]}
    assert done.transfer == {
        "disaggregated_params": continued | {"encoded_opaque_state": "c3RhdGU="},
        "prompt_token_ids": [1, 2, 3],
    }


async def test_a_generation_server_gets_the_words_of_the_context_server_in_either_endpoint() -> None:
    async with a_backend() as (backend, server):
        chat = await backend.prefill(a_request(), Prompt(body=CHAT))
        assert text_of(await everything(backend, prompt=Prompt(body=CHAT, transfer=chat.transfer))) == TEXT[:9]
        text = await backend.prefill(a_request(), a_prompt(body=None))
        assert text_of(await everything(backend, prompt=a_prompt(body=None, transfer=text.transfer))) == TEXT
    _, chat_answer, _, text_answer = (each.body for each in server.received)
    assert (chat_answer["disaggregated_params"]["ctx_request_id"], chat_answer["prompt_token_ids"]) == (1, [1, 2, 3])
    assert (text_answer["prompt"], "prompt_token_ids" in text_answer) == ([1, 2, 3], False)


async def test_kv_that_is_gone_is_the_servers_error() -> None:
    async with a_backend() as (backend, server):
        done = await backend.prefill(a_request(), Prompt(body=CHAT))
        server.kept.clear()
        with pytest.raises(BackendErred):
            await everything(backend, prompt=Prompt(body=CHAT, transfer=done.transfer))


async def test_a_server_without_a_transceiver_keeps_no_kv() -> None:
    async with a_backend() as (backend, server):
        server.keeps_kv = False
        with pytest.raises(BackendFailed, match="keeps no KV for others") as failed:
            await backend.prefill(a_request(), Prompt(body=CHAT))
    assert "cache_transceiver_config" in (failed.value.hint or "")


async def test_an_answer_that_ends_with_its_first_token_is_computed_again() -> None:
    async with a_backend() as (backend, server):
        server.text = "G"
        done = await backend.prefill(a_request(), Prompt(body=CHAT))
        assert done.transfer == {}
        assert text_of(await everything(backend, prompt=Prompt(body=CHAT, transfer=done.transfer))) == "G"
        assert "disaggregated_params" not in server.received[-1].body


def test_fields_that_the_server_leaves_out_are_not_passed_on() -> None:
    choice = {"finish_reason": "not_finished", "disaggregated_params": PARAMS | {"draft_tokens": None}}
    assert transfer_of({"choices": [choice]}) == {
        "disaggregated_params": PARAMS | {"request_type": "generation_only"},
    }
