"""Reservations in advance: exact limits of several routers with fewer questions than requests, on a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policies.nouns import Limits
from policies.quota.budget import Charge, Descriptor, Refused, Reservation
from router.shared.store import advances, guarded
from router.shared.store.advances import LEAST, AdvanceStore
from router.shared.store.debts import DebtFile
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.redis import ADVANCE_S, LEASE_S, ROOM, RedisStore
from tests.policies.builders import a_descriptor
from tests.router.shared.store.parts import NOON_S, HandClock, RedisServer, a_redis, reserved
from tests.shards.attached import eventually

WIDE = a_descriptor(requests_per_minute=100_000, tokens_per_minute=10_000_000, cost_per_day=1_000_000)
NOTHING = Charge()
_names = itertools.count()


class Counting(RedisStore):
    """Counts what it is asked."""

    asked = advanced = settled = 0

    async def reserve(self, asked: Reservation) -> Reservation | Refused:
        self.asked += 1
        self.advanced += bool(asked.advance.requests)
        return await super().reserve(asked)

    async def settle_all(self, debts: Sequence[Any]) -> None:
        self.settled += len(debts)
        await super().settle_all(debts)


@dataclass
class Router:
    shared: Counting
    guarded: GuardedStore
    store: AdvanceStore
    clock: HandClock
    events: Counter[str] = field(default_factory=Counter)
    admitted: int = 0
    charged: Charge = NOTHING

    async def request(self, name: str, *bound: Descriptor, charge: Charge, used: Charge, lasts_s: float = 0.0) -> bool:
        """Whether a request was admitted; it is charged what it `used` then."""
        answer = await reserved(self.store, Reservation(name, bound, charge))
        if isinstance(answer, Refused):
            return False
        self.admitted += 1
        await asyncio.sleep(lasts_s)
        self.store.settle(answer, used)
        self.charged = self.charged.and_(used)
        return True

    async def warmed(self, *bound: Descriptor, count: int = 8) -> list[Reservation]:
        """Open reservations of so many requests at once, after which there is an advance."""
        asked = [Reservation(f"warm {next(_names)}", bound, Charge(1, 10, 10)) for _ in range(count)]
        answers = await asyncio.gather(*(reserved(self.store, each) for each in asked))
        return [answer for answer in answers if isinstance(answer, Reservation)]


@asynccontextmanager
async def a_router(
    server: RedisServer, clock: HandClock, now: Callable[[], float] = time.monotonic, **options: Any
) -> AsyncIterator[Router]:
    shared = Counting(server.url, clock=clock)
    events, file = Counter[str](), options.pop("file", None)
    patience: dict[str, Any] = {"deadline_s": 30.0, "first_backoff_s": 0.005, "most_backoff_s": 0.02, **options}
    guards = GuardedStore(
        shared, clock=clock, options=GuardOptions(**patience), on_event=lambda event: events.update([event]), file=file
    )
    store = AdvanceStore(guards, now=now)
    await store.start()
    try:
        yield Router(shared, guards, store, clock, events)
    finally:
        await store.close()
        store.check()


@asynccontextmanager
async def routers(server: RedisServer, count: int, **options: Any) -> AsyncIterator[list[Router]]:
    async with AsyncExitStack() as stack:
        clock = HandClock()
        yield [await stack.enter_async_context(a_router(server, clock, **options)) for _ in range(count)]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.clean()
    # a machine that does other work is no slow store
    monkeypatch.setattr(guarded, "PATIENCE_S", 30.0)


async def levels(router: Router, *bound: Descriptor) -> list[int]:
    """What the shared store has counted, once it has heard of everything."""
    await eventually(lambda: router.guarded.owed == 0 and not router.guarded.is_away)
    return list(await router.shared.levels(bound))


async def crowd(router: Router, bound: Descriptor, count: int, seed: int, *, at_once: int = 20) -> None:
    """Requests one after the other in `at_once` tasks, each with its own charge and use."""
    rng, left = random.Random(seed), iter(range(count))

    async def ask() -> None:
        for number in left:
            reserves = Charge(1, rng.randint(1, 100), rng.randint(1, 1000))
            uses = Charge(1, rng.randint(0, 120), rng.randint(0, 1200))
            await router.request(f"{seed} {number}", bound, charge=reserves, used=uses, lasts_s=rng.random() * 0.01)

    await asyncio.gather(*(ask() for _ in range(at_once)))


async def test_busy_requests_are_admitted_at_once_and_few_questions_reach_the_store(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        await crowd(router, WIDE, 2000, seed=1)
        assert router.admitted == 2000
        assert router.shared.asked < 400
        assert router.shared.settled < 400


async def test_few_requests_are_asked_for_one_by_one(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        for number in range(LEAST - 1):
            await router.request(str(number), WIDE, charge=Charge(1, 10, 10), used=Charge(1, 10, 10))
        assert (router.shared.asked, router.shared.advanced) == (LEAST - 1, 0)


@pytest.mark.parametrize("limit", [1, 10, 100, 600, 2000])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_routers_that_ask_in_advance_admit_exactly_the_limit(server: RedisServer, limit: int, count: int) -> None:
    bound = a_descriptor(requests_per_minute=limit)
    async with routers(server, count) as some:
        each = min(3 * limit, limit + 300) // count + 1
        await asyncio.gather(*(crowd(router, bound, each, seed) for seed, router in enumerate(some)))
        assert not any(router.events for router in some), "the store was taken for slow"
        assert sum(router.admitted for router in some) == min(limit, each * count)


async def test_limits_of_a_tenant_and_of_a_model_are_exact_together(server: RedisServer) -> None:
    tenant, model = a_descriptor(requests_per_minute=900), a_descriptor(model="m", requests_per_minute=500)
    other = a_descriptor(model="n", requests_per_minute=5000)
    async with routers(server, 2) as some:
        for number in range(4):
            asked = [(tenant, model), (tenant, other)]
            names = [f"{number} {each}" for each in range(300)]
            free = Charge(1)
            await asyncio.gather(
                *(
                    some[at % 2].request(name, *asked[at // 2 % 2], charge=free, used=free)
                    for at, name in enumerate(names)
                )
            )
        assert sum(router.admitted for router in some) == 900
        assert (await levels(some[0], model))[0] <= 500 * 60_000


async def test_what_is_held_while_the_limit_refills_lets_in_no_more_than_refills_meanwhile(server: RedisServer) -> None:
    limit = 6000
    bound = a_descriptor(requests_per_minute=limit)
    async with routers(server, 2) as some:
        admitted = 0
        for _ in range(8):
            answers = await asyncio.gather(*(router.warmed(bound, count=2 * limit // 10) for router in some))
            admitted += sum(map(len, answers))
            some[0].clock.pass_s(0.05)
        assert admitted <= limit + limit * (8 * 0.05 + ADVANCE_S) / 60


@pytest.mark.parametrize("seed", range(3))
async def test_what_was_used_is_counted_to_the_unit_whatever_was_reserved(server: RedisServer, seed: int) -> None:
    async with routers(server, 3) as some:
        await asyncio.gather(*(crowd(router, WIDE, 400, 10 * seed + n) for n, router in enumerate(some)))
        charged = Charge()
        for router in some:
            charged = charged.and_(router.charged)
            await router.store.close()
        assert await levels(some[0], WIDE) == charged.amounts(WIDE.meters)
        assert sum(router.shared.advanced for router in some) > 0


async def test_a_store_that_is_killed_and_comes_back_has_counted_all_to_the_unit() -> None:
    with a_redis(keeps=True) as server:
        async with routers(server, 2) as some:
            working = [asyncio.create_task(crowd(router, WIDE, 1500, n)) for n, router in enumerate(some)]
            for _ in range(3):
                await asyncio.sleep(0.1)
                server.stop()
                await asyncio.sleep(0.05)
                server.start()
            await asyncio.gather(*working)
            charged = some[0].charged.and_(some[1].charged)
            await eventually(lambda: not any(router.guarded.is_away or router.guarded.owed for router in some))
            for router in some:
                await router.store.close()
            assert some[0].admitted + some[1].admitted == 3000
            assert await levels(some[0], WIDE) == charged.amounts(WIDE.meters)


async def test_what_a_killed_router_held_is_taken_until_its_lease_ends_and_then_given_back(server: RedisServer) -> None:
    bound = a_descriptor(cost_per_day=1000)
    async with routers(server, 1) as (lives,):
        # it is never closed: its reservations stay as a killed process leaves them
        shared = Counting(server.url, clock=lives.clock)
        dies = Router(
            shared,
            GuardedStore(shared, clock=lives.clock),
            AdvanceStore(GuardedStore(shared, clock=lives.clock)),
            lives.clock,
        )
        assert len(await dies.warmed(bound)) == 8
        assert dies.shared.advanced == 1
        held = (await shared.levels([bound]))[0]
        assert held >= 8 * 10
        rest = Charge(1, 0, 1_000_000 - held + 1)
        assert not await lives.request("beyond", bound, charge=rest, used=rest)
        lives.clock.pass_s(LEASE_S)
        assert await lives.request("after its lease", bound, charge=rest, used=rest)
        await asyncio.sleep(2 * ADVANCE_S)
        await shared.close()


KILLED = """
import asyncio, os, sys, time
from pathlib import Path
from policies.quota.budget import Charge, Reservation
from router.shared.store.advances import AdvanceStore
from router.shared.store.debts import DebtFile
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.redis import RedisStore
from tests.policies.builders import a_descriptor
from tests.router.shared.store.parts import reserved

async def main(url, folder, seed):
    wide = a_descriptor(requests_per_minute=100_000, tokens_per_minute=10_000_000, cost_per_day=1_000_000)
    guarded = GuardedStore(
        RedisStore(url), clock=time.time, options=GuardOptions(deadline_s=30), file=DebtFile(Path(folder), "here")
    )
    store, total = AdvanceStore(guarded), 0
    await store.start()

    async def ask(worker):
        nonlocal total
        for number in range(10_000):
            reservation = await reserved(store, Reservation(f"{seed} {worker} {number}", (wide,), Charge(1, 50, 500)))
            await asyncio.sleep(0.002)
            store.settle(reservation, Charge(1, 7, 1000 + worker))
            total += 1000 + worker
            print(total, flush=True)
            if total > 400_000 + 37_000 * seed:
                os._exit(9)

    await asyncio.gather(*map(ask, range(10)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.parametrize("seed", range(3))
async def test_a_killed_router_has_left_what_its_requests_used_to_the_next_one_to_the_unit(
    tmp_path: Path, seed: int
) -> None:
    with a_redis() as server:
        command = (sys.executable, "-P", "-c", KILLED, server.url, str(tmp_path), str(seed))
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
        )
        said, _ = await process.communicate()
        assert process.returncode == 9
        used = int(said.split()[-1])
        # the lease of what it held has ended: by Redis' own clock, which nothing here sets
        clock = HandClock(time.time() + LEASE_S + 1)
        async with a_router(server, clock, file=DebtFile(tmp_path, "here")) as next_one:
            bound = a_descriptor(cost_per_day=1_000_000)

            async def is_paid() -> bool:
                return (await next_one.shared.levels([bound]))[0] == used

            while not await is_paid():  # noqa: ASYNC110 - the store tells no one
                await asyncio.sleep(0.02)


async def test_what_others_hold_in_advance_is_waited_for_before_a_request_is_refused(server: RedisServer) -> None:
    bound = a_descriptor(tokens_per_minute=100_000)
    async with routers(server, 2) as (holds, asks):
        opened = await holds.warmed(bound)
        level = (await holds.shared.levels([bound]))[0]
        taken = 60_000 * sum(each.charge.tokens for each in opened)
        assert level > taken, "nothing is held in advance"
        # exactly what is left once the advance is given back
        fits = Charge(1, 100_000 - taken // 60_000)
        assert await asks.request("large", bound, charge=fits, used=fits)
        assert not await asks.request("one more", bound, charge=Charge(1, 1), used=Charge(1, 1))
        for each in opened:
            holds.store.settle(each, each.charge)


async def test_an_advance_leaves_far_more_room_than_it_takes(server: RedisServer) -> None:
    bound = a_descriptor(requests_per_minute=4 * ROOM)
    async with routers(server, 1) as (router,):
        await router.warmed(bound)
        assert await levels(router, bound) == [8 * 60_000]


async def test_requests_that_run_long_hold_no_more_than_is_theirs(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advances, "_TOLD_S", 0.01)
    async with routers(server, 1) as (router,):
        opened = await router.warmed(WIDE, count=40)
        for each in opened[:30]:
            router.store.settle(each, Charge(1, 1, 7))
        expected = Charge(40, 30 * 1 + 10 * 10, 30 * 7 + 10 * 10).amounts(WIDE.meters)

        async def is_told() -> bool:
            return list(await router.shared.levels([WIDE])) == expected

        while not await is_told():  # noqa: ASYNC110 - the store tells no one
            await asyncio.sleep(0.01)
        for each in opened[30:]:
            router.store.settle(each, Charge(1, 2, 3))
        await router.store.close()
        assert await levels(router, WIDE) == Charge(40, 30 + 20, 210 + 30).amounts(WIDE.meters)


async def test_requests_belong_to_the_hour_in_which_they_began(server: RedisServer) -> None:
    bound = a_descriptor(cost_per_hour=1_000_000)
    async with routers(server, 1) as (router,):
        router.clock.now_s = NOON_S + 3600 - 0.5
        before = await router.warmed(bound, count=20)
        router.clock.now_s = NOON_S + 3600
        await asyncio.sleep(2 * ADVANCE_S)
        after = await router.warmed(bound, count=20)
        assert await levels(router, bound) >= [20 * 10]
        for each in before:
            router.store.settle(each, Charge(1, 1, 500_000))
        for each in after:
            router.store.settle(each, Charge(1, 1, 3))
        await router.store.close()
        assert await levels(router, bound) == [20 * 3]


async def test_what_is_told_of_a_budget_is_what_is_settled_and_of_a_rate_what_is_taken(server: RedisServer) -> None:
    bound = a_descriptor(requests_per_minute=10_000, cost_per_day=100_000)
    async with routers(server, 1, now=lambda: 1000.0) as (router,):
        warm = await router.warmed(bound)
        asked = [Reservation(f"told {number}", (bound,), Charge(1, 10, 10)) for number in range(12)]
        opened = [await reserved(router.store, each) for each in asked]
        standing = opened[-1].standing
        assert standing.requests is not None
        assert standing.cost is not None
        # as time passes at Redis, more of a rate is left
        assert 10_000 - 8 - 12 <= standing.requests.remaining < 10_000
        assert standing.cost.remaining == 100_000
        for each in opened:
            assert isinstance(each, Reservation)
            router.store.settle(each, Charge(1, 0, 5_000))
        last = await reserved(router.store, Reservation("last", (bound,), Charge(1, 0, 10)))
        assert last.standing.cost is not None
        assert last.standing.cost.remaining == 100_000 - 12 * 5
        for each in (*warm, last):
            assert isinstance(each, Reservation)
            router.store.settle(each, Charge(1))


async def test_other_limits_in_the_file_count_for_the_next_request(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        for each in await router.warmed(WIDE):
            router.store.settle(each, Charge(1))
        none = a_descriptor(requests_per_minute=1)
        assert not await router.request("beyond", none, charge=Charge(1), used=Charge(1))


async def test_while_the_store_is_away_each_router_keeps_to_its_share(server: RedisServer) -> None:
    bound = a_descriptor(requests_per_minute=1000)
    async with routers(server, 2, replicas=2, deadline_s=1.0) as some:
        for router in some:
            for each in await router.warmed(bound):
                router.store.settle(each, Charge(1))
            router.admitted += 8
        with server.frozen():
            await asyncio.gather(*(crowd(router, bound, 1000, n) for n, router in enumerate(some)))
            assert all(router.guarded.is_away for router in some)
            assert sum(router.admitted for router in some) <= 1000
        await eventually(lambda: not any(router.guarded.is_away for router in some))


async def test_a_million_end_users_are_not_watched_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advances, "_MOST_LINES", 10)
    async with routers(server, 1) as (router,):
        for number in range(30):
            user = Descriptor("acme", Limits(requests_per_minute=100), user=f"u{number}")
            assert await router.request(f"r{number}", user, charge=Charge(1), used=Charge(1))
        assert len(router.store._lines) <= 10
