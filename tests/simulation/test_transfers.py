"""KV between simulated backends: fetched from a cache, or computed by another pool."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Fetched, Lender, Prefiller
from benchmarks.transfers import APART, alike, apart, run_of
from policies.catalogue import builtin_catalogue
from policies.nouns import Prompt, Request, Usage
from policies.sla.parse import parse
from shards.nouns import Submission
from simulation.arrivals import Arrival
from simulation.backend import NEW_TOKENS, TOKEN_IDS, SimulatedBackend
from simulation.engine import SimulatedEngine
from simulation.report import compared, shown, tables
from simulation.run import Run
from simulation.speed import Machine
from simulation.summary import summary_of
from simulation.workloads import ScaledLoad
from tests.policies.builders import a_request
from tests.simulation.scene import EVEN
from tests.virtual_time import run_virtually

LINKED = Machine(EVEN, link_bytes_s=1e9, link_s=0.005)
TOKENS = 6400
PROMPT = b"".join(number.to_bytes(4, "little") for number in range(TOKENS))
FETCH_S = 0.005 + TOKENS * 131072 / 1e9


class Kept:
    """Keeps what backends say of their caches."""

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        self.stored[backend] = self.stored.get(backend, 0) + len(keys)

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        pass

    def clear(self, backend: str) -> None:
        pass


def two(machine: Machine = LINKED, listener: Kept | None = None) -> tuple[SimulatedBackend, SimulatedBackend]:
    clock = asyncio.get_running_loop().time
    first, second = (
        SimulatedBackend(
            name,
            pool="own",
            kind="shard",
            machine=machine,
            models=frozenset({"llama"}),
            model="llama",
            listener=listener or Kept(),
            clock=clock,
        )
        for name in ("a", "b")
    )
    return first, second


def asked(tokens: int = TOKENS, **fields: object) -> tuple[Request, Prompt]:
    request = a_request(prompt_tokens=tokens, max_new_tokens=5, **fields)
    return request, Prompt(body={TOKEN_IDS: PROMPT[: 4 * tokens], NEW_TOKENS: 5})


async def answered(backend: SimulatedBackend, request: Request, prompt: Prompt) -> tuple[Usage, float]:
    """The usage of the answer, and the seconds to its first token."""
    clock = asyncio.get_running_loop().time
    began_at, first_s, usage = clock(), 0.0, Usage()
    async for delta in backend.generate(request, prompt):
        first_s = first_s or clock() - began_at
        usage = delta.usage or usage
    return usage, first_s


def lent(prompt: Prompt, backend: SimulatedBackend, tokens: int = TOKENS) -> Prompt:
    return Prompt(body=prompt.body, transfer=backend.lend(tokens))


def test_fetched_kv_is_in_the_cache_after_the_time_of_its_bytes() -> None:
    async def scenario() -> None:
        listener = Kept()
        holder, other = two(listener=listener)
        assert isinstance(holder, Lender)
        assert isinstance(holder, Prefiller)
        request, prompt = asked()
        _, computed_s = await answered(holder, request, prompt)
        usage, fetched_s = await answered(other, request, lent(prompt, holder))
        # the last block is computed: one token has to be
        assert usage.cached_tokens == TOKENS - 64
        assert FETCH_S < fetched_s < FETCH_S + 0.1
        assert computed_s > TOKENS * EVEN.token_s
        assert other.load().fetched == Fetched(1, TOKENS, TOKENS * 131072, pytest.approx(FETCH_S))
        assert listener.stored["a"] == listener.stored["b"]
        assert (other.engine.work.fetches, other.engine.work.fetched_tokens) == (1, TOKENS)
        holder.check()
        other.check()

    run_virtually(scenario())


def test_only_what_is_lacking_is_transferred() -> None:
    async def scenario() -> None:
        holder, other = two()
        await answered(holder, *asked())
        await answered(other, *asked(3200))
        request, prompt = asked()
        await answered(other, request, lent(prompt, holder))
        fetched = other.load().fetched
        assert fetched is not None
        assert fetched.tokens == TOKENS - 3200
        # nothing is lacking now
        await answered(other, request, lent(prompt, holder))
        assert other.load().fetched == fetched

    run_virtually(scenario())


def test_what_the_lender_has_lost_and_what_is_of_another_domain_is_computed() -> None:
    async def scenario() -> None:
        empty, other = two()
        request, prompt = asked()
        usage, _ = await answered(other, request, lent(prompt, empty))
        assert (usage.cached_tokens, other.load().fetched) == (0, None)
        third, fourth = two()
        await answered(third, *asked(domain="acme"))
        usage, _ = await answered(fourth, replace_domain(request), lent(prompt, third))
        assert usage.cached_tokens == 0

    run_virtually(scenario())


def replace_domain(request: Request) -> Request:
    return a_request(prompt_tokens=request.prompt_tokens, max_new_tokens=5, domain="labs")


def test_without_room_it_is_computed() -> None:
    async def scenario() -> None:
        holder, _ = two()
        await answered(holder, *asked())
        _, small = two(replace(LINKED, kv_tokens=2 * TOKENS))
        long = a_request(id="long", prompt_tokens=TOKENS, max_new_tokens=TOKENS - 1000)
        body = {TOKEN_IDS: bytes(4 * TOKENS), NEW_TOKENS: TOKENS - 1000}
        busy = asyncio.create_task(answered(small, long, Prompt(body=body)))
        await asyncio.sleep(20.0)
        assert small.engine.adopt(PROMPT, TOKENS, "acme") == 0
        await busy
        small.check()

    run_virtually(scenario())


def test_a_request_that_is_cancelled_while_it_fetches_leaves_nothing() -> None:
    async def scenario() -> None:
        holder, other = two()
        await answered(holder, *asked())
        request, prompt = asked()
        task = asyncio.create_task(answered(other, request, lent(prompt, holder)))
        await asyncio.sleep(FETCH_S / 2)
        assert other.load().waiting == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert other.load().waiting == 0
        other.check()
        assert not other.engine.has_requests

    run_virtually(scenario())


def test_a_prompt_is_computed_for_another_backend() -> None:
    async def scenario() -> None:
        prompts, answers = two()
        request, prompt = asked()
        done = await prompts.prefill(request, prompt)
        assert done.usage == Usage(TOKENS, 1, 0)
        usage, _ = await answered(answers, request, Prompt(body=prompt.body, transfer=done.transfer))
        assert usage.cached_tokens == TOKENS - 64
        assert usage.completion_tokens == 5

    run_virtually(scenario())


def test_without_a_link_nothing_is_exchanged() -> None:
    async def scenario() -> None:
        first, _ = two(replace(LINKED, link_bytes_s=0.0))
        assert first.kv_group is None

    run_virtually(scenario())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(("adopt", "ask", "cancel", "step")), st.integers(1, 40)), max_size=60))
def test_the_pool_agrees_after_any_order_of_fetches_and_requests(actions: list[tuple[str, int]]) -> None:
    engine = SimulatedEngine(replace(LINKED, kv_tokens=64 * 64, running=4), model="m")
    for number, (action, blocks) in enumerate(actions):
        tokens = 64 * blocks
        if action == "adopt":
            held = engine.held_tokens(PROMPT[: 4 * tokens], "acme")
            new_tokens = engine.adopt(PROMPT[: 4 * tokens], tokens, "acme")
            assert new_tokens in (0, tokens - held)
        elif action == "ask":
            submission = Submission(number, tokens, 8, domain="acme")
            engine.submit(submission, PROMPT[: 4 * tokens], new_tokens=8, now_s=float(number))
        elif action == "cancel":
            engine.cancel(number - 1, float(number))
        elif engine.ends_s is None:
            engine.begin(float(number))
        else:
            engine.end()
        if engine.ends_s is None:
            engine.check()


def shared(count: int) -> ScaledLoad:
    """Long prompts that begin alike, faster than one machine answers them."""
    arrivals = [Arrival(n, 10.0 + 0.2 * n, 12_500, 200, chunks=tuple(range(24)), model="m") for n in range(count)]
    return ScaledLoad((Arrival(count, 0.0, 12_500, 40, chunks=tuple(range(24)), model="m"), *arrivals), (), ())


def the_run(machine: Machine) -> Run:
    default = builtin_catalogue().policies["default"]
    return run_of(*alike(default, replace(machine, running=4), 4), shared(60), 1)


def test_a_prefix_in_demand_spreads_by_fetches_and_clients_wait_less() -> None:
    without, fetching = the_run(replace(LINKED, link_bytes_s=0.0)), the_run(replace(LINKED, link_bytes_s=25e9))
    assert all(call.fetch is None for call in without.calls)
    fetches = [call for call in fetching.calls if call.fetch is not None]
    # once to each of the other machines
    assert 1 <= len(fetches) <= 3
    computed, saved = (sum(backend.work.prompt_tokens for backend in run.backends) for run in (without, fetching))
    assert saved < computed
    before, after = (summary_of(run).classes[0].ttft_s for run in (without, fetching))
    assert before is not None
    assert after is not None
    assert after.p95 < before.p95
    first, second = summary_of(without), summary_of(fetching)
    assert (first.classes[0].fetched, second.classes[0].fetched) == (0, len(fetches))
    assert second.pools[0].fetched_tokens == sum(backend.work.fetched_tokens for backend in fetching.backends) > 0
    assert "fetched" not in shown(tables(first))
    assert shown(tables(second)).count("fetched") == 2
    side_by_side = shown(compared({"without": first, "with": second}))
    assert re.search(rf"^ *fetched +0 +{len(fetches)} +\+{len(fetches)}$", side_by_side, re.MULTILINE)


def test_the_same_seed_fetches_the_same() -> None:
    once, again = (the_run(replace(LINKED, link_bytes_s=25e9)) for _ in range(2))
    assert [call.fetch for call in once.calls] == [call.fetch for call in again.calls]


def test_long_prompts_are_computed_apart_where_they_would_stall_answers() -> None:
    default = builtin_catalogue().policies["default"]
    config, fleet = apart(default, replace(LINKED, link_bytes_s=100e9), 4, 1)
    long = [Arrival(n, 1.0 + n, 15_000, 50, chunks=(), model="m") for n in range(30)]
    short = [Arrival(100 + n, 0.05 * n, 200, 200, chunks=(), model="m") for n in range(400)]
    arrivals = tuple(sorted([*long, *short], key=lambda arrival: arrival.at_s))
    run = run_of(config, fleet, ScaledLoad(arrivals, (), ()), 1)
    legs = [call for call in run.calls if call.prefill is not None]
    shares = [
        sum(call.arrival.prompt_tokens == tokens for call in legs) / count
        for tokens, count in ((200, 400), (15_000, 30))
    ]
    assert shares[0] < shares[1] > 0
    assert {call.prefill.backend for call in legs if call.prefill} == {"prompts-0"}
    assert {call.pool for call in run.calls} == {"own"}
    assert sum(row.apart for row in summary_of(run).classes) == len(legs)
    assert "apart" in shown(tables(summary_of(run)))


def test_the_file_of_the_benchmark_separates_prompts() -> None:
    assert parse(APART).pools["own"].prefill == "prompts"
