"""Warming goes through the whole gateway, behind everybody and at the tenant's cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec.structs
import pytest

from backends.fake import FakeBackend
from policies.errors import InvalidRequest, NoBackend, Unauthenticated, UnknownModel
from policies.nouns import Capability, Limits, ServiceClass
from policies.on_miss import Shed
from policies.rules import BACKGROUND_RANK, Rule, When
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from router.ask import Ask
from router.call.warming import GatewayWarmer, as_warm_up
from router.start.app import Router
from tests.router.parts import MODEL, a_config, a_tenant, board_of, some_assets

TEXT = "the quick brown fox jumps over the lazy dog " * 60


def a_keeper(name: str, *, pins: bool = True, model: str = MODEL, pool: str = "own") -> FakeBackend:
    return FakeBackend(
        name, pool, models=frozenset({model}), speaks_tokens=True, files=some_assets(), pins=pins, context_tokens=4096
    )


def an_ask(text: str = TEXT, *, model: str = MODEL, must_pin: bool = False) -> Ask:
    body = {"model": model, "prompt": text, "max_tokens": 1}
    return as_warm_up(Ask(model, (text,), (body,), "/v1/completions", max_new_tokens=500), body, must_pin=must_pin)


@asynccontextmanager
async def a_warmer(*backends: FakeBackend, config: Config | None = None) -> AsyncIterator[tuple[GatewayWarmer, Router]]:
    made = backends or (a_keeper("b0"), a_keeper("b1"))
    async with Router(config or a_config(), backends=lambda _: made) as router:
        assert await router.wait_until_reached(5)
        yield GatewayWarmer(lambda: router.gateway), router
        router.check()


def ignored(_: str) -> None:
    pass


async def test_a_prompt_is_measured_in_whole_blocks() -> None:
    async with a_warmer() as (warmer, _):
        measure = await warmer.measure(an_ask(), a_tenant())
        assert measure.model == MODEL
        assert measure.tokens == 64 * len(measure.keys) > 0


async def test_a_body_that_is_much_more_than_its_prompt_is_not_remembered() -> None:
    async with a_warmer() as (warmer, _):
        ask = an_ask()
        for junk, is_kept in (("x" * 60_000, True), ("x" * 200_000, False)):
            whole = msgspec.structs.replace(ask, bodies=({**ask.bodies[0], "notes": junk},))
            if is_kept:
                await warmer.measure(whole, a_tenant())
                continue
            with pytest.raises(InvalidRequest, match="is too much for a prefix of"):
                await warmer.measure(whole, a_tenant())


async def test_less_than_a_block_is_not_worth_keeping() -> None:
    async with a_warmer() as (warmer, _):
        with pytest.raises(InvalidRequest, match="too few to keep"):
            await warmer.measure(an_ask("hello"), a_tenant())


async def test_a_model_that_is_not_there_is_refused() -> None:
    async with a_warmer() as (warmer, _):
        with pytest.raises(UnknownModel):
            await warmer.measure(an_ask(model="gpt-9"), a_tenant())


async def test_the_refusal_of_a_required_pin_names_the_pools_that_could() -> None:
    backends = a_keeper("b0", pins=False), a_keeper("c0", model="other", pool="shards")
    config = a_config()
    config = replace(config, pools={**config.pools, "shards": PoolSpec("shards", kind="fake", model="other")})
    async with a_warmer(*backends, config=config) as (warmer, _):
        with pytest.raises(InvalidRequest, match=r"no backend of 'tiny' can pin prefixes \(these pools can: shards\)"):
            await warmer.measure(an_ask(must_pin=True), a_tenant())
    async with a_warmer(a_keeper("b0", pins=False)) as (warmer, _):
        with pytest.raises(InvalidRequest, match="only pools of kind 'shard' can"):
            await warmer.measure(an_ask(must_pin=True), a_tenant())


async def test_it_asks_for_one_token_behind_every_class_and_gives_way() -> None:
    config = a_config()
    config = replace(config, classes={"chat": ServiceClass("chat", 0, ttft_s=0.8), "bulk": ServiceClass("bulk", 1)})
    async with a_warmer(config=config) as (warmer, router):
        placed: list[str] = []
        warmed = await warmer.warm(an_ask(), "acme", avoiding=frozenset({"b0"}), placed=placed.append)
        assert (warmed, placed) == (("b1", "own"), ["b1"])
        backend = router.gateway.cluster.backend("b1")
        assert isinstance(backend, FakeBackend)
        ((request, prompt),) = backend.received
        assert (request.rank, request.preemptible, request.max_new_tokens) == (BACKGROUND_RANK, True, 1)
        assert (request.tenant, request.domain, request.sampling.temperature) == ("acme", "acme", 0.0)
        assert prompt.body is not None
        assert prompt.body["max_tokens"] == 1


async def test_it_goes_where_the_tenants_own_prompts_would() -> None:
    config = a_config()
    config = replace(
        config,
        pools={name: PoolSpec(name, kind="fake", model=MODEL) for name in ("own", "spot")},
        rules=(Rule("chat", When(tenant=("acme",)), pools=("spot",)), Rule("chat")),
    )
    async with a_warmer(a_keeper("b0"), a_keeper("c0", pool="spot"), config=config) as (warmer, _):
        assert await warmer.warm(an_ask(), "acme", avoiding=frozenset(), placed=ignored) == ("c0", "spot")


async def test_it_is_never_shed_for_a_latency_target() -> None:
    config = a_config()
    classes = {"chat": ServiceClass("chat", 0, ttft_s=1e-6)}
    config = replace(config, classes=classes, on_miss={"chat": (Shed(429),)})
    async with a_warmer(config=config) as (warmer, router):
        await warmer.warm(an_ask(), "acme", avoiding=frozenset(), placed=ignored)
        metrics = router.telemetry.exposition("")[0].decode()
        assert 'service_class="yielding"' in metrics
        assert 'pointsman_ttft_seconds_count{service_class="chat"' not in metrics


async def test_its_tokens_are_charged_to_the_tenant() -> None:
    tenant = a_tenant(limits=Limits(tokens_per_minute=100_000))
    async with a_warmer(config=a_config(tenant)) as (warmer, router):
        await warmer.warm(an_ask(), "acme", avoiding=frozenset(), placed=ignored)
        ((key, totals),) = board_of(router).totals.items()
        assert key == ("acme", MODEL)
        assert totals.prompt_tokens > 64


async def test_every_backend_avoided_is_none_left() -> None:
    async with a_warmer() as (warmer, _):
        with pytest.raises(NoBackend):
            await warmer.warm(an_ask(), "acme", avoiding=frozenset({"b0", "b1"}), placed=ignored)


async def test_a_tenant_that_left_the_file_gets_nothing_more() -> None:
    async with a_warmer() as (warmer, _):
        with pytest.raises(Unauthenticated, match="there is no tenant 'gone' any more"):
            await warmer.warm(an_ask(), "gone", avoiding=frozenset(), placed=ignored)


def test_a_prefix_that_must_be_pinned_needs_a_backend_that_can() -> None:
    assert Capability.PINS in an_ask(must_pin=True).needs
    assert Capability.PINS not in an_ask().needs
