from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from backends.base import Load, Ranked
from backends.openai.prefill import PrefillAnswer
from backends.vllm import VLLM, VLLMOptions, load_of, loads_of, transfer_of
from policies.errors import BackendFailed, BackendLacks, ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Prompt, Usage
from tests.backends.parts import a_native_prompt, a_prompt, a_request, everything, text_of
from tests.standins.standin import TEXT, running
from tests.standins.vllm import BLOCK_SIZE, BLOCKS, VLLMServer

# As vLLM 0.32 prints it, with two data-parallel engines of 1,000 blocks each: each tells how many both have together.
PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
vllm:num_requests_running{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.0
vllm:num_requests_waiting{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="2000",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="2000",sliding_window="None"} 1.0
"""
OLD_PAGE = b"""vllm:num_requests_running{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"""


@asynccontextmanager
async def a_backend(server: VLLMServer | None = None, **options: Any) -> AsyncIterator[tuple[VLLM, VLLMServer]]:
    async with running(server or VLLMServer()) as standin:
        clock = iter(float(second) for second in range(100)).__next__
        backend = VLLM("v", standin.url, pool="p", options=VLLMOptions(**options), clock=clock)
        try:
            yield backend, standin
        finally:
            await backend.close()


async def sent_for(request: Any, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    async with a_backend(VLLMServer(has_priorities=True), **options) as (backend, server):
        await everything(backend, request, Prompt(body=body))
        sent: dict[str, Any] = server.received[0].body
        return sent


BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "chat_template_kwargs": {"a": 1}, "user": "u"}


async def test_the_body_goes_through_whole_and_the_salt_is_the_tenants_domain() -> None:
    forged = {"cache_salt": "other", "priority": -9, "kv_transfer_params": {"remote_host": "x"}, "request_id": "1"}
    sent = await sent_for(a_request(domain="acme", rank=2), {**BODY, **forged})
    added = {"cache_salt": "acme"}
    assert sent == {**BODY, **added}


@pytest.mark.parametrize("name", ["cache_salt", "c\\u0061che_salt"])
async def test_the_routers_own_fields_hold_for_readers_of_the_first_of_two_members_too(name: str) -> None:
    raw = f'{{"{name}":"other","model":"secret","m\\u006fdel":"m","messages":[],"cache_salt":"acme"}}'.encode()
    prompt = a_native_prompt(raw)
    async with a_backend() as (backend, _):
        content = backend.exchange(a_request(domain="acme"), prompt).post.content
    reply = json.loads(content, object_pairs_hook=list)
    assert [value for member, value in reply if member in ("cache_salt", "model")] == ["acme", "m", "m", "acme"]


async def test_the_rank_is_the_priority_where_the_server_knows_priorities() -> None:
    sent = await sent_for(a_request(rank=2), {**BODY, "priority": -9}, priority=True, cache_salt=False)
    assert sent["priority"] == 2
    assert "cache_salt" not in sent


async def test_a_server_without_priorities_says_so_in_its_own_words() -> None:
    async with a_backend(priority=True) as (backend, _):
        with pytest.raises(InvalidRequest, match="not enabled"):
            await everything(backend, a_request(rank=1))


async def test_tenants_do_not_find_each_others_prompts_in_the_cache() -> None:
    async with a_backend() as (backend, _):
        cached = []
        for domain in ("a", "a", "b"):
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 40}]}
            usage = (await everything(backend, a_request(domain=domain), Prompt(body=body)))[-1].usage
            assert usage is not None
            cached.append(usage.cached_tokens)
    assert cached == [0, 2 * BLOCK_SIZE, 0]


@pytest.mark.parametrize("body", [None, {"model": "m", "prompt": [72, 105]}])
async def test_token_ids_go_to_completions(body: dict[str, Any] | None) -> None:
    async with a_backend() as (backend, server):
        deltas = await everything(backend, prompt=a_prompt(body=body, path="/v1/completions"))
        assert text_of(deltas) == TEXT
        path, sent, _ = server.received[0]
    assert path == "/v1/completions"
    assert all(isinstance(token, int) for token in sent["prompt"])
    assert deltas[-1].usage == Usage(len(sent["prompt"]), len(TEXT), 0)


async def test_adapters_are_models_and_may_have_other_names_here() -> None:
    server = VLLMServer(adapters=("sql-lora",))
    async with a_backend(server, models={"sql": "sql-lora"}) as (backend, _):
        await backend.probe()
        described = backend.describe()
        assert described is not None
        assert described.models == {"sql"}
        assert described.context_tokens == 4096
        await everything(backend, a_request(model="sql"))
        assert server.received[0].body["model"] == "sql-lora"


def test_metrics_of_all_engines_make_one_load() -> None:
    assert load_of(PAGE, 9.0) == Load(running=5, waiting=7, free_tokens=20000, reported_at=9.0)


def test_metrics_give_the_load_of_each_engine() -> None:
    assert loads_of(PAGE, 9.0) == (
        Load(running=3, waiting=7, free_tokens=8000, reported_at=9.0),
        Load(running=2, waiting=0, free_tokens=12000, reported_at=9.0),
    )
    assert loads_of(b"", 9.0) == ()


def test_metrics_of_older_versions_are_read_and_what_they_lack_is_unknown() -> None:
    assert load_of(OLD_PAGE, 1.0) == Load(running=1, waiting=0, reported_at=1.0)


async def test_a_probe_refreshes_the_load_and_dates_it_from_when_it_was_asked() -> None:
    async with a_backend(max_requests=256) as (backend, server):
        server.waiting = 4
        await backend.probe()
        free = round(BLOCK_SIZE * BLOCKS * 0.75)
        assert backend.load() == Load(0, 4, free_tokens=free, max_requests=256, reported_at=0.0)
        await backend.probe()
        assert backend.load().reported_at == 1.0


async def test_a_server_that_sleeps_is_not_well_until_it_wakes() -> None:
    async with a_backend() as (backend, server):
        server.is_sleeping = True
        with pytest.raises(BackendFailed, match="sleeps"):
            await backend.probe()
        server.is_sleeping = False
        await backend.probe()


async def test_a_server_without_sleep_mode_is_asked_once() -> None:
    async with a_backend(VLLMServer(has_sleep_mode=False)) as (backend, server):
        await backend.probe()
        server.has_sleep_mode = server.is_sleeping = True
        await backend.probe()


async def test_a_dead_engine_fails_the_probe() -> None:
    async with a_backend() as (backend, server):
        server.is_ill = True
        with pytest.raises(BackendFailed, match="/health answered 503"):
            await backend.probe()


async def test_refusals_have_vllms_words_and_our_errors() -> None:
    async def failure(server: VLLMServer, **fields: Any) -> ExpectedError:
        async with a_backend(server) as (backend, _):
            with pytest.raises(ExpectedError) as raised:
                await everything(backend, a_request(**fields), a_prompt(body={**BODY, **fields, "max_tokens": 9}))
            return raised.value

    assert type(await failure(VLLMServer(), model="x")) is BackendLacks
    assert type(await failure(VLLMServer(context_tokens=9))) is ContextExceeded
    busy = await failure(VLLMServer(is_busy=True))
    assert (type(busy), busy.retry_after_s) == (Overloaded, 3.0)


def ranks_of(backend: VLLM) -> list[str]:
    assert isinstance(backend, Ranked)
    return [rank.name for rank in backend.ranks()]


@pytest.mark.parametrize("first_engine", [0, 4])
async def test_each_rank_that_the_server_reports_is_a_backend_and_requests_name_it(
    first_engine: int,
) -> None:
    async with a_backend(VLLMServer(ranks=4, first_engine=first_engine), max_requests=8) as (backend, server):
        assert ranks_of(backend) == [], "before the first probe nothing is known"
        await backend.probe()
        assert ranks_of(backend) == ["v/1", "v/2", "v/3"]
        third = backend.ranks()[2]
        assert third is backend.ranks()[2]
        assert (third.pool, third.address, third.describe()) == ("p", backend.address, backend.describe())
        server.engines[3].running = 5
        await backend.probe()
        assert (backend.load().running, third.load().running, third.load().max_requests) == (0, 5, 8)
        await everything(backend, a_request())
        await everything(third, a_request())
        assert [seen.headers["x-data-parallel-rank"] for seen in server.received] == ["0", "3"]
        assert [engine.served for engine in server.engines] == [1, 0, 0, 1]
        await third.close()
        await everything(backend, a_request())


@pytest.mark.parametrize(
    ("server", "options"),
    [
        (VLLMServer(), {}),
        (VLLMServer(ranks=2, version="0.10.2"), {}),
        (VLLMServer(ranks=2), {"ranks": 1}),
        (VLLMServer(has_metrics=False), {}),
    ],
    ids=["one", "too old", "switched off", "without metrics"],
)
async def test_a_server_that_has_one_rank_or_chooses_it_gets_no_rank(
    server: VLLMServer, options: dict[str, Any]
) -> None:
    async with a_backend(server, **options) as (backend, _):
        await backend.probe()
        assert ranks_of(backend) == []
        await everything(backend, a_request())
        assert "x-data-parallel-rank" not in server.received[0].headers


async def test_reported_ranks_go_before_configured_ones() -> None:
    async with a_backend(VLLMServer(ranks=2, has_metrics=False), ranks=2) as (backend, server):
        await backend.probe()
        assert ranks_of(backend) == ["v/1"]
        server.has_metrics, server.ranks, server.engines = True, 1, server.engines[:1]
        await backend.probe()
        assert ranks_of(backend) == []
        await everything(backend, a_request())
        assert "x-data-parallel-rank" not in server.received[0].headers


async def test_a_rank_of_a_server_that_was_started_anew_with_fewer_reports_nothing() -> None:
    async with a_backend(VLLMServer(ranks=2)) as (backend, server):
        await backend.probe()
        second = backend.ranks()[0]
        server.ranks, server.engines = 1, server.engines[:1]
        await backend.probe()
        assert (second.load(), ranks_of(backend)) == (Load(), [])


async def test_a_proxy_gets_the_rank_too_and_may_not_take_another_rank_instead() -> None:
    async with a_backend(VLLMServer(ranks=3)) as (backend, server), a_backend(server) as (other, _):
        await backend.probe()
        await other.probe()
        (first, second), (elsewhere, _) = backend.ranks(), other.ranks()
        assert first.forward(a_request(), "/v1/completions").headers["X-data-parallel-rank"] == "1"
        assert first.is_like(elsewhere)
        assert not first.is_like(second)
        assert not first.is_like(backend)


async def test_listed_adapters_and_those_loaded_on_demand_are_distinguished_by_clients_names() -> None:
    server = VLLMServer(adapters=("sql-lora",), found_by_resolver=("poem-lora",))
    models = {"m": "m", "sql": "sql-lora", "poem": "poem-lora"}
    async with a_backend(server, models=models, adapters=frozenset({"sql-lora", "poem-lora"})) as (backend, _):
        await backend.probe()
        before = backend.describe()
        await everything(backend, a_request(model="poem"))
        await backend.probe()
        after = backend.describe()
    assert before is not None
    assert after is not None
    assert (before.models, before.tuned, before.loadable) == ({"m", "sql", "poem"}, {"sql", "poem"}, {"poem"})
    assert (after.models, after.tuned, after.loadable) == ({"m", "sql", "poem"}, {"sql", "poem"}, set())
    assert server.received[0].body["model"] == "poem-lora"


@pytest.mark.parametrize(("models", "active"), [({}, {"a-lora"}), ({"a": "a-lora", "m": "m"}, {"a"})])
async def test_metrics_give_the_adapters_with_requests_and_how_many_fit(
    models: dict[str, str], active: set[str]
) -> None:
    async with a_backend(VLLMServer(adapters=("a-lora", "b-lora")), models=models) as (backend, server):
        server.active_adapters, server.adapter_slots = "a-lora", 2
        await backend.probe()
        assert (backend.load().active_adapters, backend.load().adapter_slots) == (active, 2)
        server.active_adapters = ""
        await backend.probe()
        assert backend.load().active_adapters == set()


async def test_of_several_engines_nothing_is_believed_of_the_adapters_in_use() -> None:
    async with a_backend(VLLMServer(ranks=2, adapters=("a-lora",), active_adapters="a-lora")) as (backend, _):
        await backend.probe()
        assert (backend.load().active_adapters, backend.load().adapter_slots) == (None, 1)


REMOTE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.7", "remote_port": 5600}


async def test_a_prompt_for_another_engine_draws_one_token_and_asks_to_keep_the_kv() -> None:
    async with a_backend(VLLMServer(has_nixl=True)) as (backend, server):
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "min_tokens": 5}
        done = await backend.prefill(a_request(), Prompt(body=body))
        sent = server.received[0].body
    assert {name: sent.get(name) for name in ("max_tokens", "stream", "min_tokens", "stream_options")} == {
        "max_tokens": 1,
        "stream": False,
        "min_tokens": None,
        "stream_options": None,
    }
    assert sent["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert (sent["messages"], sent["cache_salt"], sent["user"]) == (BODY["messages"], "d", "u")
    assert done.transfer["remote_host"] == "10.0.0.7"
    assert (done.usage.completion_tokens, done.usage.cached_tokens) == (1, 0)


async def test_the_engine_that_answers_is_told_where_the_kv_is() -> None:
    async with a_backend(VLLMServer()) as (backend, server):
        native = a_native_prompt(json.dumps(BODY).encode())
        deltas = await everything(backend, None, with_fields(native, transfer=REMOTE))
        assert server.received[0].body["kv_transfer_params"] == REMOTE
    assert text_of(deltas) == TEXT
    assert not any(delta.raw for delta in deltas), "its usage has to be changed"


async def test_a_prompt_of_token_ids_goes_to_completions_in_the_first_call_too() -> None:
    async with a_backend(VLLMServer(has_nixl=True)) as (backend, server):
        await backend.prefill(a_request(), Prompt(token_ids=a_prompt("Hello").token_ids))
        assert server.received[0].path == "/v1/completions"


async def test_an_engine_without_nixl_keeps_no_kv() -> None:
    async with a_backend(VLLMServer()) as (backend, _):
        with pytest.raises(BackendFailed, match="keeps no KV for others"):
            await backend.prefill(a_request(), a_prompt())


async def test_the_error_of_a_first_call_is_that_of_a_request() -> None:
    async with a_backend(VLLMServer(has_nixl=True)) as (backend, server):
        server.is_busy = True
        with pytest.raises(Overloaded):
            await backend.prefill(a_request(), a_prompt())


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"kv_transfer_params": 3}', b'{"usage": 3}'])
def test_nonsense_is_no_prefill(body: bytes) -> None:
    answer = PrefillAnswer("v", transfer_of, hint="")
    with pytest.raises(BackendFailed):
        answer.read(body)
    with pytest.raises(BackendFailed, match="answered nothing"):
        _ = answer.prefilled


@pytest.mark.parametrize("labels", ['{model_name="m"}', "", '{model_name="m",engine="0"}', '{engine="x"}'])
@pytest.mark.parametrize("name", ["vllm:num_requests_waiting", "vllm:num_requests_running"])
def test_metrics_that_name_no_engine_are_the_load_of_one(name: str, labels: str) -> None:
    (load,) = loads_of(f"{name}{labels} 1000\n".encode(), 0.0)
    assert {load.running, load.waiting} == {1000, None}


def test_a_page_without_a_load_is_of_no_engine() -> None:
    assert loads_of(b"python_gc_objects 1\n", 0.0) == ()
