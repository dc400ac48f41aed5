"""A router with a Redis that is slow, gone, full, lying or started anew. Redis and the line to it are real."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from policies.errors import Overloaded
from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing
from policies.quota.ledger import Ledger
from router.shared.store.base import Fault
from router.shared.store.debts import Debt
from router.shared.store.guarded import PATIENCE_S, GuardedStore, GuardOptions
from router.shared.store.redis import LEASE_S, RedisStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import HandClock, Line, RedisServer, a_line, a_redis
from tests.shards.attached import eventually
from tests.virtual_time import run_virtually

LIMITED = a_descriptor(tokens_per_minute=1000)
BUDGET = a_descriptor(cost_per_day=1000)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.clean()


@dataclass
class Replica:
    store: GuardedStore
    clock: HandClock
    events: Counter[str]

    async def reserve(self, name: str, tokens: int = 1) -> Reservation | Refused:
        return await self.store.reserve(a_reservation(name, LIMITED, tokens=tokens))

    async def is_back(self) -> None:
        await eventually(lambda: not self.store.is_away and self.store.owed == 0)

    async def left(self) -> int:
        allowance = (await self.store.standing([LIMITED])).tokens
        assert allowance is not None
        return allowance.remaining


@asynccontextmanager
async def a_replica(url: str, clock: HandClock | None = None, **options: Any) -> AsyncIterator[Replica]:
    clock, events, routers = clock or HandClock(), Counter[str](), options.pop("routers", lambda: 1)
    patience: dict[str, Any] = {"deadline_s": 2.0, "first_backoff_s": 0.005, "most_backoff_s": 0.02, **options}
    shared = RedisStore(url, clock=clock)
    store = GuardedStore(
        shared,
        clock=clock,
        options=GuardOptions(**patience),
        on_event=lambda event: events.update([event]),
        routers=routers,
    )
    await store.start()
    try:
        yield Replica(store, clock, events)
    finally:
        await store.close()
        store.check()


def full(server: RedisServer, line: Line) -> None:
    with server.admin() as admin:
        admin.config_set("maxmemory", 1)


def slow(server: RedisServer, line: Line) -> None:
    line.delay_s = 10.0


def gone(server: RedisServer, line: Line) -> None:
    line.cut()


def lying(server: RedisServer, line: Line) -> None:
    line.instead = b"*3\r\n:1\r\n:2\r\n:-3\r\n"


def dead(server: RedisServer, line: Line) -> None:
    server.stop()


def heal(server: RedisServer, line: Line) -> None:
    server.start()
    with server.admin() as admin:
        admin.config_set("maxmemory", 0)
    line.mend()


FAULTS: dict[str, tuple[Callable[[RedisServer, Line], None], Fault]] = {
    "full": (full, Fault.FULL),
    "slow": (slow, Fault.SLOW),
    "gone": (gone, Fault.GONE),
    "lying": (lying, Fault.NONSENSE),
    "dead": (dead, Fault.GONE),
}


@pytest.mark.parametrize("what", FAULTS)
async def test_no_request_fails_for_it_and_each_router_keeps_to_its_share(server: RedisServer, what: str) -> None:
    spoil, fault = FAULTS[what]
    patience_s = 0.2 if what == "slow" else 2.0
    async with a_line(server) as line, a_replica(line.url, replicas=4, deadline_s=patience_s) as replica:
        before = await replica.reserve("before")
        assert isinstance(before, Reservation)
        assert not before.is_local
        spoil(server, line)
        answers = [await replica.reserve(str(number), tokens=50) for number in range(6)]
        granted = [answer for answer in answers if isinstance(answer, Reservation)]
        # the share is 250, and 1 of it was used before
        assert len(granted) == 4
        assert all(answer.is_local for answer in answers)
        assert replica.store.is_away
        assert await replica.left() == 49
        assert replica.events[f"quota_store_{fault}"] > 0
        heal(server, line)
        await replica.is_back()
        assert replica.events["quota_store_back"]
        after = await replica.reserve("after")
        assert isinstance(after, Reservation)
        assert not after.is_local
        for reservation in granted:
            replica.store.settle(reservation, Charge(tokens=50))
        await replica.is_back()
        # what was let in meanwhile is charged to all; a server that died has forgotten what was before
        assert await replica.left() == 1000 - 200 - 1 - (what != "dead")


async def test_while_it_is_away_no_request_asks_it(server: RedisServer) -> None:
    async with a_line(server) as line, a_replica(line.url, first_backoff_s=60.0) as replica:
        lying(server, line)
        await replica.reserve("first")
        assert replica.store.is_away
        asked = line.asked
        for number in range(100):
            await replica.reserve(str(number))
        assert line.asked == asked
        assert "local share" in repr(replica.store)


async def test_a_settlement_counts_once_even_if_its_answer_was_lost(server: RedisServer) -> None:
    async with a_line(server) as line, a_replica(line.url) as replica:
        reservation = await replica.reserve("r", tokens=100)
        assert isinstance(reservation, Reservation)
        line.instead = b"+nonsense\r\n"
        replica.store.settle(reservation, Charge(tokens=30))
        await eventually(lambda: replica.events["quota_store_nonsense"] >= 3)
        line.mend()
        await replica.is_back()
        assert await replica.left() == 970


async def test_a_settlement_counts_once_even_if_its_answer_was_lost_and_redis_has_forgotten_its_id(
    server: RedisServer,
) -> None:
    async with a_line(server) as line, a_replica(line.url) as replica:
        reservation = await replica.store.reserve(a_reservation("r", BUDGET, cost=100_000))
        assert isinstance(reservation, Reservation)
        line.instead = b"+nonsense\r\n"
        replica.store.settle(reservation, Charge(cost=30_000))
        await eventually(lambda: replica.events["quota_store_nonsense"] >= 3)
        replica.clock.pass_s(3600)
        async with a_replica(server.url, replica.clock) as other:
            # a call long after makes Redis forget ids
            await other.store.standing([BUDGET])
        line.mend()
        await replica.is_back()
        allowance = (await replica.store.standing([BUDGET])).cost
        assert allowance is not None
        assert allowance.remaining == 970


async def test_what_is_owed_is_bounded_and_what_is_dropped_is_counted(server: RedisServer) -> None:
    async with a_replica(server.url + "-nowhere", most_owed=10, first_backoff_s=60.0) as replica:
        for number in range(25):
            reservation = await replica.reserve(str(number))
            assert isinstance(reservation, Reservation)
            replica.store.settle(reservation, Charge(tokens=1))
        replica.store.check()
        assert replica.store.owed == 10
        assert replica.events["quota_settlement_dropped"] == 15


async def test_a_request_that_is_cancelled_while_it_asks_leaves_nothing_reserved(server: RedisServer) -> None:
    async with a_line(server) as line, a_replica(line.url, deadline_s=5.0) as replica:
        await replica.left()
        line.delay_s, asked = 0.1, line.asked
        asking = asyncio.create_task(replica.reserve("r", tokens=600))
        await eventually(lambda: line.asked > asked)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        line.mend()
        await replica.is_back()
        assert await replica.left() == 1000


async def test_what_runs_long_keeps_its_reservation(server: RedisServer) -> None:
    async with a_replica(server.url, renew_every_s=0.01) as replica:
        await replica.store.reserve(a_reservation("r", BUDGET, cost=600_000))
        for _ in range(4):
            replica.clock.pass_s(LEASE_S - 1)
            until = (replica.clock() + LEASE_S) * 1000
            with server.admin() as admin:
                await eventually(lambda admin=admin, until=until: admin.zscore("pointsman:{acme}:due", "r") == until)
        assert list(await replica.store.levels([BUDGET])) == [600_000]


async def test_what_a_crashed_router_had_reserved_is_given_back(server: RedisServer) -> None:
    async with a_replica(server.url) as crashes, a_replica(server.url, crashes.clock) as lives:
        await crashes.store.reserve(a_reservation("r", BUDGET, cost=600_000))
        assert isinstance(await lives.store.reserve(a_reservation("s", BUDGET, cost=600_000)), Refused)
        crashes.clock.pass_s(LEASE_S)
        assert isinstance(await lives.store.reserve(a_reservation("s", BUDGET, cost=600_000)), Reservation)


async def test_four_routers_together_let_in_exactly_the_limit(server: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        clock = HandClock()
        replicas = [await stack.enter_async_context(a_replica(server.url, clock, replicas=4)) for _ in range(4)]
        rng = random.Random(4)

        async def reserve_one(name: str) -> int:
            reservation = await rng.choice(replicas).reserve(name, tokens=10)
            await asyncio.sleep(0)
            return 10 if isinstance(reservation, Reservation) else 0

        granted = await asyncio.gather(*(reserve_one(str(number)) for number in range(300)))
        assert not any(replica.store.is_away for replica in replicas)
        assert sum(granted) == 1000


async def test_four_routers_alone_let_in_no_more_than_the_limit_even_if_they_were_together_before(
    server: RedisServer,
) -> None:
    async with AsyncExitStack() as stack:
        line, clock = await stack.enter_async_context(a_line(server)), HandClock()
        replicas = [await stack.enter_async_context(a_replica(line.url, clock, replicas=4)) for _ in range(4)]
        granted = 0
        for number in range(400):
            if number == 40:
                line.cut()
            answer = await replicas[number % 4].reserve(str(number), tokens=10)
            granted += 10 * isinstance(answer, Reservation)
        assert 960 <= granted <= 1000


async def test_a_router_that_is_left_alone_shares_what_was_left_not_what_there_is(server: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        line, clock = await stack.enter_async_context(a_line(server)), HandClock()
        greedy, modest = [await stack.enter_async_context(a_replica(line.url, clock, replicas=4)) for _ in range(2)]
        await greedy.reserve("greedy", tokens=590)
        await modest.reserve("modest", tokens=10)
        line.cut()
        # 600 of 1000 are gone: a quarter of what is left is 100
        assert isinstance(await modest.reserve("too much", tokens=101), Refused)
        assert isinstance(await modest.reserve("its share", tokens=100), Reservation)
        # a router that has had more than its share gets nothing more
        assert isinstance(await greedy.reserve("more", tokens=1), Refused)


async def test_routers_that_know_of_each_other_let_in_no_more_than_the_limit_while_redis_is_frozen(
    server: RedisServer,
) -> None:
    async with AsyncExitStack() as stack:
        clock, known = HandClock(), 3
        options: dict[str, Any] = {"replicas": 1, "routers": lambda: known, "deadline_s": 0.1}
        replicas = [await stack.enter_async_context(a_replica(server.url, clock, **options)) for _ in range(3)]
        granted = 0
        for number in range(30):
            granted += 10 * isinstance(await replicas[number % 3].reserve(f"r{number}", tokens=10), Reservation)
        assert granted == 300
        with server.frozen():
            # a router that hears nothing of the others does not take them for gone
            known = 1
            for number in range(300):
                granted += 10 * isinstance(await replicas[number % 3].reserve(f"f{number}", tokens=10), Reservation)
            assert all(replica.store.is_away for replica in replicas)
        assert 950 <= granted <= 1000
        for replica in replicas:
            await replica.is_back()
        for number in range(300):
            granted += 10 * isinstance(await replicas[number % 3].reserve(f"t{number}", tokens=10), Reservation)
        assert granted == 1000


async def test_requests_that_began_while_it_was_away_and_still_run_are_counted_when_it_is_back(
    server: RedisServer,
) -> None:
    async with a_line(server) as line, a_replica(line.url) as replica:
        await replica.left()
        gone(server, line)
        running = await replica.reserve("running", tokens=600)
        assert isinstance(running, Reservation)
        assert running.is_local
        line.mend()
        await replica.is_back()
        assert await replica.left() == 400
        assert isinstance(await replica.reserve("too much", tokens=401), Refused)
        replica.store.settle(running, Charge(tokens=100))
        await replica.is_back()
        assert await replica.left() == 900


async def test_a_strict_router_refuses_rather_than_guess_and_reserves_nothing(server: RedisServer) -> None:
    async with a_line(server) as line, a_replica(line.url, strict=True) as replica:
        await replica.left()
        line.instead = b"+nonsense\r\n"
        for name in ("while it fails", "while it is away"):
            with pytest.raises(Overloaded) as refused:
                await replica.reserve(name, tokens=600)
            assert refused.value.retry_after_s
        line.mend()
        await replica.is_back()
        assert await replica.left() == 1000


async def test_what_was_reserved_before_redis_forgot_everything_is_charged_all_the_same(server: RedisServer) -> None:
    async with a_replica(server.url) as replica:
        reservation = await replica.reserve("r", tokens=500)
        assert isinstance(reservation, Reservation)
        with server.admin() as admin:
            admin.flushall()
        replica.store.settle(reservation, Charge(tokens=300))
        await replica.is_back()
        assert await replica.left() == 700


async def test_closing_sends_outstanding_settlements_if_redis_answers(server: RedisServer) -> None:
    async with a_replica(server.url) as replica:
        reservation = await replica.reserve("r", tokens=500)
        assert isinstance(reservation, Reservation)
        replica.store.settle(reservation, Charge(tokens=300))
    async with a_replica(server.url) as replica:
        assert await replica.left() == 700
    async with a_replica(server.url + "-nowhere", first_backoff_s=60.0) as replica:
        reservation = await replica.reserve("r", tokens=500)
        assert isinstance(reservation, Reservation)
        replica.store.settle(reservation, Charge(tokens=300))
    assert replica.store.owed == 1


async def test_without_limits_the_store_is_not_asked(server: RedisServer) -> None:
    async with a_replica(server.url + "-nowhere") as replica:
        free = a_reservation("r", a_descriptor(), tokens=10**9)
        assert await replica.store.reserve(free) == free
        replica.store.settle(free, Charge(tokens=10**9))
        assert replica.store.owed == 0


class Steady:
    """A shared store that answers each call in time, and no more than so many a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._ledger = clock, Ledger()

    async def reserve(self, asked: Reservation) -> Reservation | Refused:
        await asyncio.sleep(0.08)
        return self._ledger.reserve(asked, now=self._clock())

    async def settle_all(self, debts: Sequence[Debt]) -> None:
        pass

    async def grant(self, reservation: Reservation) -> None:
        self._ledger.grant(reservation, now=self._clock())

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        self._ledger.renew([reservation.id for reservation in reservations], now=self._clock())

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        return self._ledger.standing(descriptors, now=self._clock())

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        return self._ledger.levels(descriptors, now=self._clock())

    async def hang_up(self) -> None:
        pass

    async def close(self) -> None:
        pass


def test_a_store_with_more_calls_than_answers_keeps_no_request_waiting_for_long() -> None:
    async def run() -> None:
        loop, events, waits = asyncio.get_running_loop(), Counter[str](), list[float]()
        store = GuardedStore(Steady(loop.time), clock=loop.time, on_event=lambda event: events.update([event]))
        await store.start()

        async def reserve_one(name: str) -> None:
            began_at = loop.time()
            assert isinstance(await store.reserve(a_reservation(name, LIMITED, tokens=1)), Reservation)
            waits.append(loop.time() - began_at)

        async with asyncio.TaskGroup() as group:
            for number in range(400):
                group.create_task(reserve_one(f"r{number}"))
                await asyncio.sleep(0.01)
        assert len(waits) == 400
        assert max(waits) <= PATIENCE_S + 0.1
        assert events["quota_store_slow"] >= 1
        await store.close()
        store.check()

    run_virtually(run())
