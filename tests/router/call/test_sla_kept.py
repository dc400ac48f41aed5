"""The SLA file under overload, on the real router: fake backends, a virtual clock, hours in seconds."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from backends.base import Load
from backends.fake import Answer, FakeBackend
from policies.errors import ExpectedError
from policies.explain import Explanation
from policies.nouns import Delta
from policies.sla.parse import parse
from policies.waiting import ROOM
from router.ask import Ask
from router.call.bodies import Held
from router.call.caller import Placement
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.parts import built
from tests.virtual_time import run_virtually

SLOTS = 4
ANSWER_S = 1.0
"""How long a slot is taken by one answer, so that one backend does SLOTS / ANSWER_S requests a second."""


@dataclass
class Stopwatch:
    """A caller that notes when it heard the first piece of its answer."""

    id: str
    key: str
    ask: Ask
    came_at: float
    first_at: float | None = None
    over_at: float = 0.0
    refused: ExpectedError | None = None
    why: Explanation | None = None
    model: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)

    async def read(self, held: Held) -> Ask:
        return self.ask

    def limited(self, standing: object) -> None:
        pass

    def explain(self, index: int, explanation: Explanation) -> None:
        self.why = explanation

    def place(self, index: int, placement: Placement) -> None:
        self.model = placement.request.model

    async def write(self, index: int, delta: Delta) -> None:
        if self.first_at is None:
            self.first_at = asyncio.get_running_loop().time()

    def has_seen(self, index: int) -> bool:
        return self.first_at is not None

    @property
    def ttft_s(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.came_at


@dataclass
class Crowd:
    """Clients that come at random, `per_second` on average, with the key of one tenant."""

    key: str
    per_second: float
    fields: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    calls: list[Stopwatch] = field(default_factory=list)

    async def come(self, gateway: Gateway, until: float, seed: int) -> None:
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.expovariate(self.per_second))
                if loop.time() >= until:
                    return
                body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], **self.fields}
                ask = chat_ask(body, self.headers)
                call = Stopwatch(next(gateway.ids), self.key, ask, loop.time())
                self.calls.append(call)
                group.create_task(self.run_call(call, gateway))

    @staticmethod
    async def run_call(call: Stopwatch, gateway: Gateway) -> None:
        try:
            await serve(call, gateway)
        except ExpectedError as error:
            call.refused = error
        call.over_at = asyncio.get_running_loop().time()

    def served(self, since: float, until: float) -> int:
        return sum(1 for call in self.calls if call.first_at is not None and since <= call.first_at < until)

    def ttft_s(self, quantile: float, since: float = 0.0) -> float:
        seen = sorted(call.ttft_s for call in self.calls if call.first_at is not None and call.came_at >= since)
        return seen[min(len(seen) - 1, int(quantile * len(seen)))]


def a_backend(name: str, pool: str = "own") -> FakeBackend:
    """One that runs SLOTS requests at once, each for about ANSWER_S; its first piece comes after a quarter of that."""
    rng = random.Random(name)

    def script(*_: object) -> Answer:
        return Answer(("a", "b", "c"), delay_s=ANSWER_S / 4 * rng.uniform(0.8, 1.2))

    return FakeBackend(name, pool, script, reported=Load(max_requests=SLOTS))


@asynccontextmanager
async def a_router(text: str, backends: Sequence[FakeBackend]) -> AsyncIterator[Gateway]:
    """A router for the SLA file `text` in front of `backends`, all well."""
    loop = asyncio.get_running_loop()
    models = {backend.pool: min(backend.models) for backend in backends}
    pools = "".join(f"  {name}: {{kind: fake, at: ['{name}:1'], model: {model}}}\n" for name, model in models.items())
    environment = {name: name for name in ("BIG", "SMALL", "ACME")}
    config = parse(f"{text}\npools:\n{pools}", environment=environment)
    gateway = built(config, backends=lambda _: backends, clock=loop.time, rng=random.Random(7)).gateway
    for backend in backends:
        assert await gateway.cluster.probe(backend.name)
    try:
        yield gateway
    finally:
        await gateway.tokenizers.close()
    gateway.check()


def jain(*shares: float) -> float:
    """Jain's fairness index (1984): 1 where all are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


TWO_TENANTS = """
tenants:
  big:   {{keys: ["${{env:BIG}}"], weight: {big}}}
  small: {{keys: ["${{env:SMALL}}"]}}
"""


def served_side_by_side(weight: int, *crowds: Crowd, until: float = 30.0, backends: int = 1) -> list[int]:
    """How many requests of each crowd were served by backends that all want, after the first ten seconds."""

    async def run() -> None:
        fleet = [a_backend(f"own-{number}") for number in range(backends)]
        async with a_router(TWO_TENANTS.format(big=weight), fleet) as gateway:
            work = asyncio.gather(*(crowd.come(gateway, until, seed) for seed, crowd in enumerate(crowds)))
            await asyncio.sleep(until)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    run_virtually(run())
    return [crowd.served(10.0, until) for crowd in crowds]


def test_two_tenants_that_offer_ten_to_one_are_served_alike() -> None:
    shares = served_side_by_side(1, Crowd("BIG", 30.0), Crowd("SMALL", 3.0))
    assert jain(*shares) >= 0.98


def test_weights_of_four_to_one_give_shares_of_four_to_one() -> None:
    big, small = served_side_by_side(4, Crowd("BIG", 20.0), Crowd("SMALL", 2.0))
    assert big / (big + small) == pytest.approx(0.8, abs=0.04)


def test_a_small_tenant_beside_a_flood_is_answered_about_as_soon_as_alone() -> None:
    alone, beside = Crowd("SMALL", 4.0), Crowd("SMALL", 4.0)
    served_side_by_side(1, alone, until=16.0, backends=8)
    served_side_by_side(1, Crowd("BIG", 40.0), beside, until=16.0, backends=8)
    assert beside.ttft_s(0.95, since=6.0) <= 1.2 * alone.ttft_s(0.95, since=6.0)


CLASSES = """
classes:
  interactive: {ttft_p95: 800ms}
  batch:       {floor: 10%, preemptible: true}
tenants:
  acme: {keys: ["${env:ACME}"]}
rules:
  - {when: {priority: batch}, class: batch}
  - {class: interactive}
"""


OVERLOAD_S = 25.0
"""How long more is sent than there is room for, with a queue that becomes longer all the time."""


def two_classes(
    interactive: float, batch: float, *, text: str = CLASSES, until: float = OVERLOAD_S, backends: int = 4
) -> tuple[Crowd, Crowd]:
    """Clients of both classes send more than the backends can do: each backend does four requests a second."""
    quick = Crowd("ACME", interactive)
    slow = Crowd("ACME", batch, headers={"x-pointsman-priority": "batch"})

    async def run() -> None:
        async with a_router(text, [a_backend(f"own-{number}") for number in range(backends)]) as gateway:
            work = asyncio.gather(quick.come(gateway, until, 1), slow.come(gateway, until, 2))
            await asyncio.sleep(until)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    run_virtually(run())
    return quick, slow


def test_interactive_keeps_its_target_beside_batch_at_half_as_much_again_as_there_is_room_for() -> None:
    quick, slow = two_classes(interactive=12.0, batch=24.0, backends=6)
    # in the first seconds the length of answers is unknown; requests of the last one may not be answered yet
    calls = [call for call in quick.calls if 5.0 <= call.came_at < OVERLOAD_S - 1.0]
    misses = [call for call in calls if call.first_at is None or call.ttft_s > 0.8]
    assert len(misses) < 0.01 * len(calls)
    assert slow.served(10.0, OVERLOAD_S) >= 0.1 * 24 * (OVERLOAD_S - 10.0)


def test_batch_moves_at_its_floor_when_interactive_would_take_everything() -> None:
    quick, slow = two_classes(interactive=22.0, batch=4.0)
    served = [crowd.served(10.0, OVERLOAD_S) for crowd in (slow, quick)]
    share = served[0] / sum(served)
    assert share == pytest.approx(0.1, abs=0.03)


def test_what_would_miss_its_target_is_shed_early_and_the_rest_is_in_time() -> None:
    shedding = CLASSES + "on_miss: {interactive: [shed]}\n"
    quick, _ = two_classes(interactive=30.0, batch=0.1, text=shedding)
    shed = [call for call in quick.calls if call.refused is not None]
    in_time = [call for call in quick.calls if call.first_at is not None and call.ttft_s <= 0.8]
    late = [call for call in quick.calls if call.first_at is not None and call.ttft_s > 0.8 and call.came_at > 5.0]
    assert {call.refused.code for call in shed if call.refused} == {"overloaded"}
    assert all(call.refused.retry_after_s for call in shed if call.refused)
    delays = {re.search(r"would come ([^ ]+) (ms|s) later", str(call.refused)) for call in shed}
    assert all(match and float(match[1]) > 0 for match in delays)
    assert len(late) < 0.05 * len(in_time)
    # what there is room for is served all the same
    assert quick.served(10.0, OVERLOAD_S) >= 0.8 * 16 * (OVERLOAD_S - 10.0)


TWO_POOLS = """
classes: {interactive: {ttft_p95: 800ms}}
tenants: {acme: {keys: ["${env:ACME}"]}}
rules: [{class: interactive, pools: [own]}]
"""


def at_two_pools(text: str, other: FakeBackend, per_second: float = 12.0, *, explained: bool = False) -> Crowd:
    """Clients send three times as much as the one backend of their pool can do; `other` is in another pool."""
    crowd = Crowd("ACME", per_second, headers={"x-pointsman-explain": "1"} if explained else {})

    async def run() -> None:
        async with a_router(text, [a_backend("own-0"), other]) as gateway:
            work = asyncio.create_task(crowd.come(gateway, 30.0, 1))
            await asyncio.sleep(30.0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    run_virtually(run())
    return crowd


def test_a_miss_spills_to_the_pool_that_the_file_names() -> None:
    far = a_backend("far-0", "far")
    crowd = at_two_pools(TWO_POOLS + "on_miss: {interactive: [{spill: far}, {shed: 503}]}\n", far)
    assert far.finished > 60
    assert {call.refused.code for call in crowd.calls if call.refused} == {"overloaded"}
    assert crowd.served(0.0, 30.0) > 1.6 * 4 * 30


def test_without_a_spill_the_other_pool_gets_nothing() -> None:
    far = a_backend("far-0", "far")
    at_two_pools(TWO_POOLS + "on_miss: {interactive: [shed]}\n", far)
    assert not far.received


def test_a_miss_is_answered_by_a_smaller_model_where_the_file_says_so() -> None:
    small = a_backend("far-0", "far")
    small.models = frozenset({"small"})
    text = TWO_POOLS.replace("[own]", "any") + "on_miss: {interactive: [{degrade: small}, shed]}\n"
    crowd = at_two_pools(text, small)
    answered = [call.model for call in crowd.calls if call.first_at is not None]
    assert set(answered) == {"fake", "small"}
    assert answered.count("small") > 60


def test_the_smaller_model_may_be_in_a_pool_that_the_rule_does_not_name() -> None:
    small = a_backend("far-0", "far")
    small.models = frozenset({"small"})
    crowd = at_two_pools(TWO_POOLS + "on_miss: {interactive: [{degrade: small}, shed]}\n", small)
    assert [call.model for call in crowd.calls if call.first_at is not None].count("small") > 60
    assert {call.refused.code for call in crowd.calls if call.refused} == {"overloaded"}


def test_the_error_of_a_shed_request_says_that_every_backend_would_be_late() -> None:
    crowd = at_two_pools(TWO_POOLS + "on_miss: {interactive: [shed]}\n", a_backend("far-0", "far"), explained=True)
    shed = [call.why for call in crowd.calls if call.refused]
    assert shed
    for why in shed:
        assert why is not None
        assert why.chosen is None
        assert dict(why.dropped)["own-0"] in {"late", *ROOM}
    assert {why.chosen for call in crowd.calls if (why := call.why) and not call.refused} == {"own-0"}


def test_a_miss_may_wait_as_long_as_the_file_says_and_is_shed_then() -> None:
    text = TWO_POOLS + "on_miss: {interactive: [{queue: 3s}, shed]}\n"
    crowd = at_two_pools(text, a_backend("far-0", "far"))
    waited = [call.ttft_s for call in crowd.calls if call.first_at is not None]
    assert max(waited) <= 3.5
    assert sum(1 for seconds in waited if seconds > 0.8) > 30
    assert any(call.refused for call in crowd.calls)


def through_an_outage(
    steps: str, *, seconds: float, far: FakeBackend | None = None, target: str = "800ms"
) -> Stopwatch:
    """One request that comes when the only backend of its pool is just away, for so many seconds."""
    text = TWO_POOLS.replace("800ms", target) + (f"on_miss: {{interactive: {steps}}}\n" if steps else "")
    crowd = Crowd("ACME", 1.0)

    async def run() -> None:
        async with a_router(text, [a_backend("own-0"), far or a_backend("far-0", "far")]) as gateway:
            gateway.cluster.drain("own-0")
            asyncio.get_running_loop().call_later(seconds, lambda: gateway.cluster.drain("own-0", False))
            ask = chat_ask({"model": "fake", "messages": [{"role": "user", "content": "hello"}]}, {})
            crowd.calls.append(Stopwatch(next(gateway.ids), "ACME", ask, asyncio.get_running_loop().time()))
            await crowd.run_call(crowd.calls[0], gateway)
            await asyncio.sleep(seconds)

    run_virtually(run())
    return crowd.calls[0]


@pytest.mark.parametrize(
    ("steps", "target", "seconds", "refused_after_s"),
    [
        ("", "800ms", 9.0, None),
        ("", "800ms", 11.0, 10.0),
        ("[shed]", "12s", 8.0, None),
        ("[shed]", "800ms", 8.0, 0.8),
        ("[{queue: 20s}, {shed: 503}]", "800ms", 15.0, None),
        ("[{queue: 2s}, {shed: 429}]", "800ms", 5.0, 2.0),
    ],
)
def test_a_request_waits_for_its_backends_to_be_well_as_long_as_its_class_lets_it_wait(
    steps: str, target: str, seconds: float, refused_after_s: float | None
) -> None:
    call = through_an_outage(steps, seconds=seconds, target=target)
    if refused_after_s is None:
        assert call.refused is None
        assert call.ttft_s < seconds + 0.5
        return
    assert call.refused is not None
    assert (call.refused.code, call.refused.retry_after_s) == ("no_backend", 1.0)
    assert "own-0: draining" in str(call.refused)
    # what the prefill takes is kept free
    assert call.over_at - call.came_at == pytest.approx(refused_after_s, abs=0.3)


def test_what_a_pool_that_is_away_would_take_spills_at_once() -> None:
    far = a_backend("far-0", "far")
    call = through_an_outage("[{spill: far}]", seconds=30.0, far=far)
    assert call.ttft_s < 0.5
    assert far.finished == 1


def test_a_breaker_that_opens_for_a_second_costs_no_answer() -> None:
    async def run() -> None:
        backend, crowd = a_backend("own-0"), Crowd("ACME", 3.0)
        async with a_router(TWO_POOLS, [backend, a_backend("far-0", "far")]) as gateway:
            loop = asyncio.get_running_loop()
            health = gateway.cluster._members["own-0"].health
            work = asyncio.create_task(crowd.come(gateway, 10.0, 1))
            await asyncio.sleep(3.0)
            for _ in range(3):
                health.request_failed(loop.time(), "it resets connections")
            assert not health.may_serve
            await asyncio.sleep(1.5)
            assert await gateway.cluster.probe("own-0")
            await work
        assert len(crowd.calls) > 20
        assert [call.refused for call in crowd.calls if call.refused] == []

    run_virtually(run())
