"""Pools that share a rule's requests: each session stays in one, and a bad canary loses its share within a minute."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from backends.fake import Answer, FakeBackend, Script
from policies.errors import BackendFailed
from policies.nouns import Request
from policies.sla.config import Config
from policies.sla.parse import parse
from router.call.gateway import Gateway
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, ended, well
from tests.router.parts import MODEL, a_chat, built
from tests.virtual_time import run_virtually

FILE = """
classes: {{chat: {{ttft_p95: 500ms, tpot_p95: 100ms}}}}
pools:
  stable: {{kind: fake, at: "s:1"}}
  canary: {{kind: fake, at: "c:1"}}
rules: [{{class: chat, pools: {{stable: {stable}, canary: {canary}}}{more}}}]
"""
BROKEN = Answer(error=BackendFailed("broke off"))


def a_file(canary: int = 50, more: str = "") -> Config:
    return parse(FILE.format(stable=100 - canary, canary=canary, more=more))


@dataclass
class World:
    """A gateway in virtual time with a backend in each pool; `counts` has what is told of requests."""

    config: Config = field(default_factory=a_file)
    canary: Script = field(default_factory=Answer)
    stable: Script = field(default_factory=Answer)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.backends = [
            FakeBackend(name, pool=pool, models=frozenset({MODEL}), script=script)
            for name, pool, script in (("s0", "stable", self.stable), ("c0", "canary", self.canary))
        ]
        clock = asyncio.get_running_loop().time
        self.gateway: Gateway = built(
            self.config, backends=lambda _: self.backends, rng=random.Random(1), clock=clock
        ).gateway
        self.gateway.observer.event = lambda name: self.events.update([name])  # type: ignore[method-assign]
        self.sent: Counter[str] = Counter()

    async def begin(self) -> World:
        await well(self.gateway, "s0", "c0")
        return self

    async def ask(self, number: int = 0, **ask: Any) -> Listener:
        caller = Listener(replace(chat_ask(a_chat("hello", stream=True)), explain=True, **ask), key=None)
        caller.id = f"r{number}"
        error = await ended(caller, self.gateway)
        assert error is None, error
        self.sent.update(caller.placed[:1])
        return caller

    @property
    def shares(self) -> dict[str, float]:
        return {each.pool: each.share for each in self.gateway.splits.standings()}

    def tally(self, pool: str) -> tuple[int, int, int]:
        (tally,) = [each.tally for each in self.gateway.splits.standings() if each.pool == pool]
        return tally.ended, tally.failed, tally.missed


def run(scenario: Callable[[], Any]) -> None:
    run_virtually(scenario())


def test_requests_are_divided_and_explained() -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=20)).begin()
        callers = [await world.ask(number) for number in range(300)]
        assert world.sent["c0"] / 300 == pytest.approx(0.2, abs=0.06)
        assert {caller.why[0].pools for caller in callers} == {("stable",), ("canary",)}
        assert callers[0].why[0].shares == {"stable": 0.8, "canary": 0.2}
        assert sum(each.tally.ended for each in world.gateway.splits.standings()) == 300
        world.gateway.check()

    run(scenario)


@pytest.mark.parametrize("by", ["session", "user"])
def test_a_session_or_a_user_stays_in_one_pool(by: str) -> None:
    async def scenario() -> None:
        world = await World().begin()
        pools = []
        for name in range(40):
            placed = {(await world.ask(10 * name + turn, **{by: f"n{name}"})).placed[0] for turn in range(5)}
            assert len(placed) == 1
            pools += placed
        assert set(pools) == {"s0", "c0"}

    run(scenario)


def test_a_canary_that_fails_loses_its_share_and_no_request_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=5), canary=BROKEN).begin()
        began_at = world.gateway.clock()
        with caplog.at_level(logging.WARNING, "pointsman.splits"):
            for number in range(600):
                await world.ask(number)
                await asyncio.sleep(0.1)
                if world.shares["canary"] == 0:
                    break
        assert world.gateway.clock() - began_at < 60
        assert world.shares == {"stable": 1.0, "canary": 0.0}
        assert world.events["rolled_back"] == 1
        assert "rule 1: pool canary loses its share to stable: 3 of 3 requests failed" in caplog.text
        before = world.backends[1].begun
        for number in range(600, 700):
            await world.ask(number)
        assert world.backends[1].begun == before

    run(scenario)


@pytest.mark.parametrize("turns", [BROKEN, Answer(delay_s=0.7)], ids=["broken", "late"])
def test_a_canary_that_turns_bad_after_many_good_requests_loses_its_share_within_a_minute(
    turns: Answer,
) -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=40)).begin()
        for number in range(700):
            await world.ask(number)
        assert world.tally("canary")[0] > 200
        world.backends[1].script = turns
        began_at = world.gateway.clock()
        for number in range(700, 850):
            await world.ask(number)
            await asyncio.sleep(0.4)
            if world.shares["canary"] == 0:
                break
        assert world.gateway.clock() - began_at < 60

    run(scenario)


def test_a_canary_that_is_late_loses_its_share() -> None:
    def late(request: Request, prompt: Any) -> Answer:
        return Answer(delay_s=0.7)

    async def scenario() -> None:
        world = await World(a_file(canary=20), canary=late).begin()
        for number in range(200):
            await world.ask(number)
        assert world.shares == {"stable": 1.0, "canary": 0.0}
        assert world.tally("canary")[2] == world.tally("canary")[0] == 10

    run(scenario)


def test_slow_decoding_misses_a_target_too() -> None:
    async def scenario() -> None:
        world = await World(canary=Answer(delay_s=0.2), stable=Answer(delay_s=0.05)).begin()
        for number in range(8):
            await world.ask(number)
        ended_, _, missed = world.tally("canary")
        assert ended_ == missed > 0
        assert world.tally("stable")[2] == 0

    run(scenario)


def test_without_rollback_a_canary_keeps_its_share() -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=50, more=", rollback: false"), canary=BROKEN).begin()
        for number in range(60):
            await world.ask(number)
        assert world.shares["canary"] == 0.5
        assert world.tally("canary")[1] >= 3

    run(scenario)


def test_the_stable_pool_never_loses_its_share() -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=5), stable=BROKEN).begin()
        for number in range(30):
            await world.ask(number)
        assert world.shares == {"stable": 0.95, "canary": 0.05}

    run(scenario)


def test_a_pool_without_a_backend_that_is_well_leaves_its_requests_to_the_others() -> None:
    async def scenario() -> None:
        world = await World().begin()
        world.gateway.cluster.drain("c0")
        world.backends[1].is_well = False
        for _ in range(5):
            await world.gateway.cluster.probe("c0")
        for number in range(20):
            await world.ask(number)
        assert world.sent == {"s0": 20}

    run(scenario)


def test_a_file_that_leaves_the_rule_as_it_is_leaves_what_is_known_of_it() -> None:
    async def scenario() -> None:
        world = await World(a_file(canary=20), canary=BROKEN).begin()
        for number in range(60):
            await world.ask(number)
        assert world.shares["canary"] == 0.0
        world.gateway.splits.follow(a_file(canary=20).rules)
        assert world.shares["canary"] == 0.0
        world.gateway.splits.follow(a_file(canary=10).rules)
        assert (world.shares["canary"], world.tally("canary")) == (0.1, (0, 0, 0))
        world.gateway.splits.follow(())
        assert world.shares == {}

    run(scenario)


def test_an_operator_gives_the_share_back() -> None:
    async def scenario() -> None:
        world = await World(canary=BROKEN).begin()
        for number in range(20):
            await world.ask(number)
        assert world.gateway.splits.restore() == 1
        assert (world.shares["canary"], world.tally("canary")) == (0.5, (0, 0, 0))
        assert world.gateway.splits.restore() == 0

    run(scenario)


def test_only_the_last_minutes_count() -> None:
    async def scenario() -> None:
        world = await World().begin()
        await world.ask(0)
        await asyncio.sleep(540)
        assert sum(world.tally(pool)[0] for pool in ("stable", "canary")) == 1
        await asyncio.sleep(120)
        assert sum(world.tally(pool)[0] for pool in ("stable", "canary")) == 0

    run(scenario)
