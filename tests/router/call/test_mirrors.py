"""Mirrors: another pool answers too, no client waits, no tenant pays, and nothing is left at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from backends.fake import Answer, FakeBackend, Script
from policies.errors import BackendFailed, ConfigError
from policies.sla.config import Config
from policies.sla.parse import parse
from router.call.gateway import Gateway
from router.call.mirrors import Compared
from router.protocols.openai.request import chat_ask
from router.start.build import build
from tests.router.callers import Listener, ended, well
from tests.router.parts import MODEL, a_chat
from tests.virtual_time import run_virtually

FILE = """
classes: {{chat: {{}}}}
tenants: {{acme: {{anonymous: true, limits: {{requests_per_minute: {limit}}}}}}}
pools: {{own: {{kind: fake, at: "s:1"}}, next: {{kind: fake, at: "c:1"}}}}
rules: [{{class: chat, pools: own, mirror: {mirror}}}]
"""
BROKEN = Answer(error=BackendFailed("broke off"), error_at=1)


def a_file(mirror: str = "{pool: next}", limit: int = 1000) -> Config:
    return parse(FILE.format(mirror=mirror, limit=limit))


@dataclass
class World:
    """A gateway in virtual time with a backend in each pool."""

    config: Config = field(default_factory=a_file)
    own: Script = field(default_factory=lambda: Answer(delay_s=0.1))
    next: Script = field(default_factory=lambda: Answer(texts=("Hi", "."), delay_s=0.2))
    told: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.backends = [
            FakeBackend(name, pool=pool, models=frozenset({MODEL}), script=script)
            for name, pool, script in (("o0", "own", self.own), ("n0", "next", self.next))
        ]
        self.gateway: Gateway = build(
            self.config,
            backends=lambda _: self.backends,
            rng=random.Random(1),
            clock=asyncio.get_running_loop().time,
        ).gateway
        self.gateway.mirrors._on_ended = lambda rule, pool, how: self.told.update([how])

    async def begin(self) -> World:
        await well(self.gateway, "o0", "n0")
        return self

    def caller(self, number: int = 0, **more: Any) -> Listener:
        caller = Listener(replace(chat_ask(a_chat("hello", stream=True)), **more), key=None)
        caller.id = f"r{number}"
        return caller

    async def ask(self, number: int = 0, **more: Any) -> Listener:
        caller = self.caller(number, **more)
        assert await ended(caller, self.gateway) is None
        return caller

    @property
    def compared(self) -> Compared:
        (found,) = self.gateway.mirrors.compared()
        return found

    async def over(self) -> None:
        """All mirrors have ended, and nothing is left."""
        await asyncio.gather(*self.gateway.mirrors._running)
        self.gateway.check()


def run(scenario: Callable[[], Any]) -> None:
    run_virtually(scenario())


def test_a_client_gets_its_own_answer_at_its_own_time_and_the_mirrors_is_compared() -> None:
    async def scenario() -> None:
        world = await World().begin()
        began_at = world.gateway.clock()
        caller = await world.ask()
        assert world.gateway.clock() - began_at == pytest.approx(0.5)
        assert "".join(delta.text for delta in caller.heard) == "Hello, world."
        assert caller.placed == ["o0"]
        await world.over()
        found = world.compared
        assert (found.rule, found.pool, found.share, found.pairs, found.left_out) == (1, "next", 1.0, 1, 0)
        assert found.own.ttft_s == pytest.approx(0.1)
        assert found.mirror.ttft_s == pytest.approx(0.2)
        assert found.own.seconds == pytest.approx(0.4)
        assert found.mirror.seconds == pytest.approx(0.4)
        assert (found.own.tokens, found.mirror.tokens) == (4, 2)
        assert world.told == {"answered": 1}
        ((request, _),) = world.backends[1].received
        assert (request.pools, request.preemptible, request.rank) == (("next",), True, 1)

    run(scenario)


def test_a_share_of_the_requests_is_mirrored() -> None:
    async def scenario() -> None:
        world = await World(a_file("{pool: next, share: 10%}")).begin()
        for number in range(300):
            await world.ask(number)
        assert world.backends[0].begun == 300
        assert 15 < world.backends[1].begun < 45
        await world.over()

    run(scenario)


def test_a_mirror_that_fails_is_counted_and_no_client_sees_it() -> None:
    async def scenario() -> None:
        world = await World(next=BROKEN).begin()
        await world.ask()
        await world.over()
        assert (world.compared.pairs, world.compared.own.failed, world.compared.mirror.failed) == (0, 0, 1)
        assert world.told == {"failed": 1}

    run(scenario)


def test_a_request_that_fails_itself_is_counted_too() -> None:
    async def scenario() -> None:
        world = await World(own=BROKEN).begin()
        assert isinstance(await ended(world.caller(), world.gateway), BackendFailed)
        await world.over()
        assert (world.compared.pairs, world.compared.own.failed, world.compared.mirror.failed) == (0, 1, 0)

    run(scenario)


def test_a_client_that_leaves_is_not_compared() -> None:
    async def scenario() -> None:
        world = await World().begin()
        asking = asyncio.create_task(ended(world.caller(), world.gateway))
        await asyncio.sleep(0.25)
        asking.cancel()
        await asyncio.wait([asking])
        await world.over()
        assert (world.compared.pairs, world.compared.own.failed, world.backends[1].finished) == (0, 0, 1)

    run(scenario)


def test_no_tenant_pays_for_a_mirror() -> None:
    async def scenario() -> None:
        world = await World(a_file(limit=2)).begin()
        for number in range(2):
            await world.ask(number)
        assert world.backends[1].begun == 2
        assert world.gateway.admission.is_idle()
        await world.over()

    run(scenario)


def test_a_pool_without_a_backend_that_is_well_gets_none_and_no_request_waits() -> None:
    async def scenario() -> None:
        world = await World().begin()
        world.gateway.cluster.drain("n0")
        began_at = world.gateway.clock()
        await world.ask()
        assert world.gateway.clock() - began_at == pytest.approx(0.5)
        assert (world.compared.left_out, world.backends[1].begun, world.told) == (1, 0, {"left_out": 1})

    run(scenario)


def test_mirrors_are_few_at_once_and_end_with_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.call.mirrors.MOST_AT_ONCE", 4)

    async def scenario() -> None:
        world = await World(next=Answer(hangs_at=1)).begin()
        for number in range(9):
            await world.ask(number)
        assert len(world.gateway.mirrors._running) == 4
        assert world.compared.left_out == 5
        await world.gateway.mirrors.close()
        assert (world.backends[1].open_requests, world.backends[1].cancelled) == (0, 4)
        world.gateway.check()

    run(scenario)


def test_a_rule_that_changes_is_compared_anew() -> None:
    async def scenario() -> None:
        world = await World().begin()
        await world.ask()
        await world.over()
        world.gateway.mirrors.follow(a_file().rules)
        assert world.compared.pairs == 1
        world.gateway.mirrors.follow(a_file("{pool: next, share: 50%}").rules)
        assert world.compared.pairs == 0
        await world.ask()
        world.gateway.mirrors.follow(())
        await world.over()
        assert world.gateway.mirrors.compared() == []

    run(scenario)


@pytest.mark.parametrize(
    ("mirror", "says"),
    [
        ("{pool: own}", "mirror.pool: gets requests of this rule already"),
        ("{pool: nex}", "did you mean 'next'"),
        ("{pool: next, share: 0}", "mirror.share: mirrors nothing"),
        ("{pool: next, share: 200%}", "must be a share of at most 100%"),
        ("{share: 5%}", "has no pool"),
    ],
)
def test_mistakes_are_named(mirror: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        a_file(mirror)
    assert says in str(raised.value)
