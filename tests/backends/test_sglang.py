from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from backends.base import Load
from backends.sglang import SGLang, SGLangOptions, generate_body, load_of, loads_of
from policies.errors import BackendErred, BackendFailed, ContextExceeded, Overloaded
from policies.nouns import Prompt, Sampling, Usage
from tests.backends.parts import a_prompt, a_request, everything, text_of
from tests.shards.attached import eventually
from tests.standins.sglang import Room, SGLangServer
from tests.standins.standin import TEXT, running

IDS = b"\x01\0\0\0\x02\0\0\0"
RANK = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "num_used_tokens": 100,
    "max_total_num_tokens": 1000,
}


@asynccontextmanager
async def a_backend(server: SGLangServer | None = None, **options: Any) -> AsyncIterator[tuple[SGLang, SGLangServer]]:
    async with running(server or SGLangServer()) as standin:
        backend = SGLang("s", standin.url, pool="p", options=SGLangOptions(**options), clock=lambda: 3.0)
        await backend.probe()
        try:
            yield backend, standin
        finally:
            await backend.close()


async def test_the_body_goes_through_whole_and_the_routers_fields_are_the_routers() -> None:
    forged = {
        "rid": "x",
        "priority": 9,
        "extra_key": "e",
        "cache_salt": "s",
        "bootstrap_host": "h",
        "routed_dp_rank": 1,
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "separate_reasoning": False}
    async with a_backend() as (backend, server):
        await everything(backend, a_request(domain="acme", rank=2), Prompt(body={**body, **forged}))
        sent = server.received[0].body
    assert len(sent.pop("rid")) == 32
    assert sent == {**body, "extra_key": "acme"}


@pytest.mark.parametrize(("low_first", "sent"), [(False, -2), (True, 2)])
async def test_the_rank_is_the_priority_whichever_way_the_server_counts(low_first: bool, sent: int) -> None:
    async with a_backend(priority=True, low_priority_first=low_first) as (backend, server):
        await everything(backend, a_request(rank=2))
        assert server.received[0].body["priority"] == sent


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_token_ids_without_a_body_go_to_the_native_api_however_the_server_streams(is_incremental: bool) -> None:
    server = SGLangServer(is_incremental=is_incremental, cached_tokens=3)
    async with a_backend(server) as (backend, _):
        deltas = await everything(backend, a_request(domain="acme"), a_prompt(body=None))
        path, sent, _ = server.received[0]
    assert path == "/generate"
    assert sent["extra_key"] == "acme"
    assert sent["input_ids"] == [39, 68, 75, 75, 78]
    assert text_of(deltas) == TEXT
    assert [token for delta in deltas for token in delta.token_ids] == [ord(letter) for letter in TEXT]
    assert deltas[-1].usage == Usage(5, len(TEXT), 3)


async def test_several_choices_and_log_probabilities_come_back() -> None:
    async with a_backend() as (backend, _):
        request = a_request(sampling=Sampling(choices=2, top_logprobs=1), max_new_tokens=3)
        deltas = await everything(backend, request, a_prompt(body=None))
    assert text_of(deltas, 0) == text_of(deltas, 1) == TEXT[:3]
    assert [logprob.token for delta in deltas for logprob in delta.logprobs if delta.choice == 1] == list(TEXT[:3])
    assert {delta.finish_reason for delta in deltas if delta.finish_reason} == {"length"}
    assert deltas[-1].usage == Usage(5, 6, 0)


def test_sampling_has_sglangs_names() -> None:
    sampling = Sampling(
        temperature=0.5, top_k=4, seed=1, stop=("x",), stop_token_ids=(2,), min_new_tokens=1, logit_bias={3: 1.0}
    )
    body = generate_body(a_request(sampling=sampling, max_new_tokens=9), IDS)
    assert body == {
        "input_ids": [1, 2],
        "stream": True,
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 4,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 1,
            "ignore_eos": False,
            "n": 1,
            "stop": ["x"],
            "stop_token_ids": [2],
            "sampling_seed": 1,
            "logit_bias": {"3": 1.0},
        },
    }
    assert generate_body(a_request(), IDS)["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    "body", [{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}, None]
)
async def test_what_is_left_is_aborted_by_its_own_id(body: dict[str, Any] | None) -> None:
    async with a_backend(SGLangServer(hangs_after=1)) as (backend, server):
        async with aclosing(backend.generate(a_request(), a_prompt(body=body))) as deltas:
            await anext(deltas)
        await eventually(lambda: server.aborted == [server.received[0].body["rid"]])
        await eventually(lambda: server.open_requests == 0)


async def test_a_finished_request_is_not_aborted_and_none_is_where_aborting_is_off() -> None:
    async with a_backend() as (backend, server):
        await everything(backend)
        await backend.close()
        assert server.aborted == []
    async with a_backend(SGLangServer(hangs_after=1), abort=False) as (backend, server):
        async with aclosing(backend.generate(a_request(), a_prompt())) as deltas:
            await anext(deltas)
        await eventually(lambda: server.open_requests == 0)
        await backend.close()
        assert server.aborted == []


def test_ids_are_of_one_length_since_an_abort_takes_all_that_begin_with_one() -> None:
    backend = SGLang("s", "http://h:1", pool="p")
    rids = {backend._rid(a_request(id=name)) for name in ("r-1", "r-10", "r-1")}
    assert len(rids) == 3
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize("body", [{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}, None])
async def test_a_full_queue_is_busy_in_either_dialect(body: dict[str, Any] | None) -> None:
    async with a_backend(SGLangServer(is_busy=True)) as (backend, _):
        with pytest.raises(Overloaded, match="queue is full"):
            await everything(backend, prompt=a_prompt(body=body))


async def test_a_prompt_that_is_too_long_is_refused_while_it_streams() -> None:
    async with a_backend(SGLangServer(context_tokens=4)) as (backend, _):
        with pytest.raises(ContextExceeded, match="5 tokens"):
            await everything(backend, prompt=a_prompt(body=None))


def test_loads_of_all_ranks_make_one() -> None:
    newer = {**RANK, "num_waiting_uncached_tokens": 70, "max_running_requests": 48}
    older = {**RANK, "num_total_tokens": 140, "max_running_requests": 48}
    page = json.dumps({"timestamp": "t", "version": "0.5.9", "loads": [newer, older]}).encode()
    assert load_of(page, 2.0) == Load(6, 4, 110, free_tokens=1800, max_requests=96, reported_at=2.0)


def test_the_older_page_counts_those_that_wait_among_its_requests() -> None:
    page = b'[{"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_tokens": 900}]'
    assert load_of(page, 2.0) == Load(running=4, waiting=3, waiting_tokens=0, reported_at=2.0)


@pytest.mark.parametrize("page", [b"{", b"5", b"[5]", b"{}", b'[{"dp_rank": 0}]'])
def test_invalid_loads_are_an_error(page: bytes) -> None:
    with pytest.raises(BackendFailed):
        load_of(page, 0.0)
    with pytest.raises(BackendFailed):
        loads_of(page, 0.0)


def test_each_rank_has_its_load_in_order() -> None:
    page = json.dumps({"loads": [{**RANK, "dp_rank": 1, "num_running_reqs": 7}, RANK]}).encode()
    assert [load.running for load in loads_of(page, 2.0)] == [3, 7]


@pytest.mark.parametrize("body", [{"model": "m", "messages": []}, None])
async def test_each_rank_is_a_backend_and_the_server_hears_which_one_it_is(body: dict[str, Any] | None) -> None:
    async with a_backend(SGLangServer(ranks=2)) as (backend, server):
        (second,) = backend.ranks()
        assert second.name == "s/1"
        for each in (backend, second):
            await everything(each, prompt=a_prompt(body=body))
        for rank, seen in enumerate(server.received):
            assert (seen.body["routed_dp_rank"], seen.body["data_parallel_rank"]) == (rank, rank)
            assert seen.headers["x-data-parallel-rank"] == str(rank)


@pytest.mark.parametrize(
    ("server", "options"), [(SGLangServer(ranks=2), {"ranks": 1}), (SGLangServer(ranks=2, has_loads=False), {})]
)
async def test_a_server_that_chooses_the_rank_or_is_too_old_gets_no_rank(
    server: SGLangServer, options: dict[str, Any]
) -> None:
    async with a_backend(server, **options) as (backend, _):
        assert backend.ranks() == []
        await everything(backend, a_request())
        assert not {"routed_dp_rank", "data_parallel_rank"} & server.received[0].body.keys()


@pytest.mark.parametrize("has_loads", [True, False])
async def test_a_probe_finds_the_page_that_the_version_has(has_loads: bool) -> None:
    async with a_backend(SGLangServer(has_loads=has_loads, waiting=2)) as (backend, _):
        assert backend.load().waiting == 2
        assert backend.load().reported_at == 3.0
        assert (backend.load().free_tokens == 15000) is has_loads


async def test_an_ill_server_fails_the_probe() -> None:
    async with a_backend() as (backend, server):
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}


@asynccontextmanager
async def both_legs(**prefill: Any) -> AsyncIterator[tuple[SGLang, SGLang, SGLangServer, SGLangServer]]:
    """A server that computes prompts and one that answers them, with their backends first."""
    rooms: dict[int, Room] = {}
    prompts = SGLangServer(mode="prefill", bootstrap_port=9001, rooms=rooms, **prefill)
    async with (
        a_backend(prompts) as (first, _),
        a_backend(SGLangServer(mode="decode", rooms=rooms)) as (second, answers),
    ):
        yield first, second, prompts, answers


@pytest.mark.parametrize("prompt", [Prompt(body=CHAT), Prompt(token_ids=IDS)], ids=["chat", "native"])
async def test_both_legs_get_one_room_at_the_same_time(prompt: Prompt) -> None:
    async with both_legs(cached_tokens=4) as (first, second, prompts, answers):
        paired = with_fields(prompt, transfer=first.pair())
        request = a_request(max_new_tokens=9)
        done, deltas = await asyncio.gather(first.prefill(request, paired), everything(second, request, paired))
        assert text_of(deltas) == TEXT[:9]
        assert done.usage.cached_tokens == 4
        (to_first,), (to_second,) = prompts.received, answers.received
    fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    assert [to_first.body[name] for name in fields] == [to_second.body[name] for name in fields]
    assert [to_first.body[name] for name in fields[:2]] == ["127.0.0.1", 9001]
    assert 0 <= to_first.body["bootstrap_room"] < 2**63


async def test_only_a_server_that_answers_alone_computes_prompts() -> None:
    async with both_legs() as (first, second, _, _), a_backend() as (alone, _):
        described = [backend.describe() for backend in (first, second, alone)]
        assert [known and known.needs_prefill for known in described] == [False, True, False]


async def test_a_server_of_another_mode_hands_no_kv_over() -> None:
    async with a_backend() as (backend, _):
        with pytest.raises(BackendFailed, match="hands no KV over") as failed:
            backend.pair()
    assert failed.value.hint == "run it with --disaggregation-mode prefill"


async def test_the_room_belongs_to_the_rank_that_computes_the_prompt() -> None:
    async with a_backend(SGLangServer(mode="prefill", ranks=4)) as (backend, _):
        ranks = [backend, *backend.ranks()]
        assert [[rank.pair()["bootstrap_room"] % 4 for _ in range(9)] for rank in ranks] == [
            [at] * 9 for at in range(4)
        ]


async def test_a_server_that_comes_back_in_another_mode_is_asked_for_it() -> None:
    async with a_backend(SGLangServer(mode="decode")) as (backend, server):
        server.is_ill = True
        with pytest.raises(BackendFailed):
            await backend.probe()
        server.is_ill, server.mode = False, "null"
        await backend.probe()
        known = backend.describe()
        assert known is not None
        assert not known.needs_prefill


async def test_a_failure_of_the_first_leg_is_an_error_of_both() -> None:
    async with both_legs(breaks=True) as (first, second, _, _):
        prompt = Prompt(body=CHAT, transfer=first.pair())
        both = first.prefill(a_request(), prompt), everything(second, None, prompt)
        ends = await asyncio.gather(*both, return_exceptions=True)
    assert [type(end) for end in ends] == [BackendErred, BackendErred]
