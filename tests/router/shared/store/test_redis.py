from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from policies.nouns import FixedBudget, Limits, Tenant
from policies.quota.budget import COST_UNIT, Charge, Descriptor, Refused, Reservation, descriptors
from policies.quota.ledger import KEPT_S, Ledger
from router.shared.redis.faults import faults
from router.shared.store.base import Fault, StoreFailed
from router.shared.store.redis import CONNECTIONS, RedisStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import HandClock, RedisServer, a_line, a_redis, owed
from tests.shards.attached import eventually

LIMITED = (
    a_descriptor("a", requests_per_minute=50, tokens_per_minute=7_000, cost_per_day=4_000),
    a_descriptor("a", model="m", tokens_per_minute=4_321),
    a_descriptor("b", tokens_per_minute=60_000, cost_per_day=10_000_000),
)
TODAY = int(HandClock()() // 86_400)
FIXED = a_descriptor(
    "c",
    fixed=(
        FixedBudget("ends", 4_000, 0, TODAY),
        FixedBudget("begins", 9_000, TODAY + 1),
        FixedBudget("told", 1_000, TODAY, TODAY + 1, is_soft=True),
    ),
)
ASKED_OF = (LIMITED[:1], LIMITED[:2], LIMITED[2:], (FIXED,))
LEASE_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.clean()


@asynccontextmanager
async def a_store(url: str, clock: HandClock | None = None, lease_s: float = LEASE_S) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, clock=clock, lease_s=lease_s)
    yield store
    await store.close()


def timeless(answer: Reservation | Refused) -> Reservation | Refused:
    """The answer as the ledger gives it, which is asked by its own clock and takes nothing in advance."""
    return replace(answer, began_ms=0, open=()) if isinstance(answer, Reservation) else answer


async def test_redis_and_the_ledger_agree_operation_by_operation(server: RedisServer) -> None:
    rng, clock, ledger = random.Random(7), HandClock(), Ledger(lease_s=LEASE_S)
    clock.pass_s(43_200 - 30)  # midnight is near
    asked: list[Reservation] = []
    granted = refused = 0
    async with a_store(server.url, clock) as store:
        for number in range(2_000):
            clock.pass_s(rng.choice((0, 0, 0.001, 0.007, 0.3, 0.9)))
            now, before = clock(), rng.choice(asked[-12:]) if asked else None
            match rng.choice(("reserve", "reserve", "retry", "settle", "cancel", "again", "renew")):
                case "reserve":
                    charge = Charge(1, rng.choice((0, 1, 200, 1500, 9000)), rng.choice((0, 7, 40_001, 5_000_000)))
                    reservation = Reservation(f"{number}", rng.choice(ASKED_OF), charge)
                    asked.append(reservation)
                    here, there = ledger.reserve(reservation, now=now), await store.reserve(reservation)
                    assert timeless(there) == here
                    granted += isinstance(here, Reservation)
                    refused += isinstance(here, Refused)
                case "retry" if before:
                    assert timeless(await store.reserve(before)) == ledger.reserve(before, now=now)
                case "settle" | "cancel" | "again" if before:
                    used = Charge(1, int(before.charge.tokens * rng.random() * 2), before.charge.cost // 2)
                    ledger.settle(before, used, now=now)
                    await store.settle_all([owed(before, used)])
                case "renew" if before:
                    ledger.renew([before.id], now=now)
                    await store.renew([before])
            if number % 10 == 0:
                for descriptors in ASKED_OF:
                    assert await store.standing(descriptors) == ledger.standing(descriptors, now=clock())
                ledger.check()
    assert min(granted, refused) > 100, "the run must see everything"


async def test_the_servers_own_clock_counts_unless_another_is_given(server: RedisServer) -> None:
    limited = a_descriptor(tokens_per_minute=60_000_000)  # a thousand a millisecond
    async with a_store(server.url) as store:
        before_s = server.time_s()
        await store.reserve(a_reservation("r", limited, tokens=60_000_000))
        refused = await store.reserve(a_reservation("s", limited, tokens=60_000_000))
        assert isinstance(refused, Refused)
        assert refused.retry_after_s is not None
        assert before_s + 60 <= server.time_s() + refused.retry_after_s
        assert refused.retry_after_s <= 60


async def test_after_a_failover_to_a_server_with_a_slower_clock_limits_refill_from_then_on(
    server: RedisServer,
) -> None:
    limited, clock = a_descriptor(tokens_per_minute=600), HandClock()
    async with a_store(server.url, clock) as store:
        await store.reserve(a_reservation("r", limited, tokens=600))
        clock.pass_s(-59)
        assert isinstance(await store.reserve(a_reservation("s", limited, tokens=1)), Refused)
        clock.pass_s(-3600)
        assert isinstance(await store.reserve(a_reservation("t", limited, tokens=600)), Refused)
        clock.pass_s(61)
        assert isinstance(await store.reserve(a_reservation("v", limited, tokens=600)), Reservation)


async def test_scripts_that_the_server_forgot_are_loaded_again(server: RedisServer) -> None:
    async with a_store(server.url) as store:
        await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
        with server.admin() as admin:
            admin.script_flush()
        assert isinstance(await store.reserve(a_reservation("s", LIMITED[2], tokens=1)), Reservation)


async def test_one_tenants_keys_live_in_one_slot_and_do_not_stay_for_ever(server: RedisServer) -> None:
    async with a_store(server.url) as store:
        await store.reserve(a_reservation("r", *LIMITED[:2], requests=1, tokens=1, cost=1))
    with server.admin() as admin:
        keys = [key.decode() for key in admin.scan_iter()]
        assert sorted(keys) == ["pointsman:{a}:due", "pointsman:{a}:held", "pointsman:{a}:levels"]
        assert all(0 < admin.ttl(key) <= 40 * 86_400 for key in keys)


async def test_what_a_fixed_budget_has_counted_stays_until_it_is_over(server: RedisServer) -> None:
    day_s, now = 86_400, time.time()
    last_day = int(now // day_s) + 99
    ends, endless = (a_descriptor("a", fixed=(FixedBudget("project", 10, 0, day),)) for day in (last_day, None))
    async with a_store(server.url) as store:
        with server.admin() as admin:

            async def kept_s(limited: Descriptor) -> int:
                held = a_reservation(str(limited.limits), limited, requests=1, tokens=1, cost=1)
                await store.reserve(held)
                await store.settle_all([owed(held, Charge(1))])
                await store.renew([held])
                return int(admin.ttl("pointsman:{a}:levels"))

            assert 39 * day_s < await kept_s(LIMITED[0]) <= 40 * day_s
            assert 138 * day_s < await kept_s(ends) <= 141 * day_s
            assert 138 * day_s < await kept_s(LIMITED[0]), "requests that it does not bind do not shorten it"
            assert await kept_s(endless) == -1
            assert await kept_s(ends) == -1
            assert 0 < admin.ttl("pointsman:{a}:held") <= 40 * day_s


async def test_end_users_without_use_are_forgotten(server: RedisServer) -> None:
    clock = HandClock()
    tenant = Tenant("a", "a", limits=Limits(cost_per_month=10**9), user_limits=Limits(requests_per_minute=1))
    async with a_store(server.url, clock) as store:
        for number in range(300):
            bound = descriptors(tenant, "m", user=f"user {number}")
            reservation = a_reservation(str(number), *bound, requests=1, cost=1)
            assert isinstance(await store.reserve(reservation), Reservation)
            await store.settle_all([owed(reservation, Charge(1, 0, 1))])
            clock.pass_s(1)
        with server.admin() as admin:
            # those of the last minute are in use; what is stale beside them is found by chance
            assert 61 <= admin.hlen("pointsman:{a}:levels") < 150
            assert int(admin.hget("pointsman:{a}:levels", "cost/month").split()[0]) == 300
        refused = a_reservation("late", *bound, requests=1, cost=1)
        assert isinstance(await store.reserve(refused), Refused)


async def test_what_is_over_is_forgotten(server: RedisServer) -> None:
    clock = HandClock()
    async with a_store(server.url, clock) as store:
        for number in range(100):
            reservation = a_reservation(str(number), LIMITED[2], tokens=1)
            await store.reserve(reservation)
            if number % 2:
                await store.settle_all([owed(reservation, Charge(tokens=1))])
        clock.pass_s(max(KEPT_S, LEASE_S))
        for _ in range(4):  # 32 at a time
            await store.standing(LIMITED[2:])
    with server.admin() as admin:
        assert admin.hlen("pointsman:{b}:held") == 0
        assert admin.zcard("pointsman:{b}:due") == 0


async def test_numbers_near_the_largest_are_exact(server: RedisServer) -> None:
    clock = HandClock()
    limited = a_descriptor(tokens_per_minute=10**11)  # a level of 6 * 10**15, just below 2**53
    async with a_store(server.url, clock) as store:
        answer = await store.reserve(a_reservation("r", limited, tokens=10**11 - 1))
        assert isinstance(answer, Reservation)
        assert answer.standing.tokens is not None
        assert answer.standing.tokens.remaining == 1
        clock.pass_s(0.001)
        later = (await store.standing([limited])).tokens
        assert later is not None
        assert later.remaining == 1 + 10**11 // 60_000


async def test_a_server_that_is_full_says_so(server: RedisServer) -> None:
    async with a_store(server.url) as store:
        await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
        with server.admin() as admin:
            admin.config_set("maxmemory", 1)
        with pytest.raises(StoreFailed) as failed:
            await store.reserve(a_reservation("s", LIMITED[2], tokens=1))
    assert failed.value.fault is Fault.FULL


async def test_a_server_that_is_not_there_is_gone(server: RedisServer) -> None:
    async with a_store(server.url + "-nowhere") as store:
        with pytest.raises(StoreFailed) as failed:
            await store.renew([])
    assert failed.value.fault is Fault.GONE


@pytest.mark.parametrize("operation", ["reserve", "settle_all", "renew", "standing"])
async def test_a_line_that_is_cut_in_the_middle_fails_and_the_next_call_works(
    server: RedisServer, operation: str
) -> None:
    reservation = a_reservation("r", LIMITED[2], tokens=1)
    async with a_line(server) as line, a_store(line.url) as store:
        calls = {
            "reserve": lambda: store.reserve(reservation),
            "settle_all": lambda: store.settle_all([owed(reservation, Charge())]),
            "renew": lambda: store.renew([reservation]),
            "standing": lambda: store.standing(LIMITED[2:]),
        }
        await store.renew([])
        line.cut()
        with pytest.raises(StoreFailed) as failed:
            await calls[operation]()
        assert failed.value.fault is Fault.GONE
        line.mend()
        await calls[operation]()


def test_a_write_to_a_connection_that_uvloop_has_closed_means_that_the_server_is_gone() -> None:
    async def write_to_it() -> None:
        async with asyncio.timeout(5):
            listener = await asyncio.start_server(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0)
            async with listener:
                reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
                await reader.read()
                writer.transport.abort()
                await asyncio.sleep(0)
                with faults():
                    writer.writelines([b"PING"])

    with pytest.raises(StoreFailed) as failed:
        uvloop.run(write_to_it())
    assert failed.value.fault is Fault.GONE


WRONG = {
    "not the protocol": b"!!\r\n\x00nonsense\r\n",
    "another type": b"+OK\r\n",
    "too short": b"*1\r\n:1\r\n",
    "not numbers": b"*4\r\n:1\r\n:2\r\n:3\r\n$1\r\nx\r\n",
    "negative": b"*4\r\n:1\r\n:2\r\n:-3\r\n:4\r\n",
    "a refusal of what fits": b"*4\r\n:0\r\n:1700000000000\r\n:0\r\n:0\r\n",
}


@pytest.mark.parametrize("answer", WRONG)
async def test_an_answer_that_cannot_be_is_not_believed(server: RedisServer, answer: str) -> None:
    async with a_line(server) as line, a_store(line.url) as store:
        await store.renew([])
        line.instead = WRONG[answer]
        with pytest.raises(StoreFailed) as failed:
            await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
        assert failed.value.fault is Fault.NONSENSE
        if answer == "another type":
            with pytest.raises(StoreFailed):
                await store.settle_all([owed(a_reservation("r", LIMITED[2], tokens=1), Charge())])


async def test_foreign_values_under_our_keys_are_a_fault(server: RedisServer) -> None:
    with server.admin() as admin:
        admin.hset("pointsman:{b}:levels", "tokens", "rubbish")
    async with a_store(server.url) as store:
        with pytest.raises(StoreFailed) as failed:
            await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
    assert failed.value.fault is Fault.REFUSING


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_a_redis_that_asks_for_another_password_refuses_and_is_not_gone(
    server: RedisServer, password: str
) -> None:
    with server.admin() as admin:
        admin.config_set("requirepass", "secret")
        try:
            async with a_store(server.url.replace("unix://", f"unix://{password}")) as store:
                with pytest.raises(StoreFailed) as failed:
                    await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
            async with a_store(server.url.replace("unix://", "unix://:secret@")) as store:
                await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
        finally:
            admin.config_set("requirepass", "")
    assert failed.value.fault is Fault.REFUSING


async def test_a_replica_that_only_reads_refuses(server: RedisServer) -> None:
    with server.admin() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            async with a_store(server.url) as store:
                with pytest.raises(StoreFailed) as failed:
                    await store.reserve(a_reservation("r", LIMITED[2], tokens=1))
        finally:
            admin.execute_command("REPLICAOF", "NO", "ONE")
    assert failed.value.fault is Fault.REFUSING


async def test_an_answer_that_came_too_late_is_never_taken_for_the_next_one(server: RedisServer) -> None:
    limited = a_descriptor("c", tokens_per_minute=1000)
    async with a_line(server) as line, a_store(line.url, HandClock()) as store:
        line.delay_s = 0.05
        late = [asyncio.create_task(store.reserve(a_reservation(str(n), limited, tokens=7))) for n in range(40)]
        await eventually(lambda: line.asked > CONNECTIONS)  # at least one on each connection
        for task in late:
            task.cancel()
        results = await asyncio.gather(*late, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 20
        line.mend()
        for number in range(40):  # more than there are connections, so none was lost
            answer = await store.reserve(a_reservation(f"next-{number}", LIMITED[2], tokens=10))
            assert isinstance(answer, Reservation)
            assert answer.standing.tokens is not None
            assert answer.standing.tokens.remaining == 60_000 - 10 * (number + 1)


@pytest.mark.parametrize("routers", [2, 3])
@pytest.mark.parametrize("seed", range(3))
async def test_what_a_budget_tells_several_routers_is_what_is_settled_and_its_limit_counts_what_is_reserved_too(
    server: RedisServer, routers: int, seed: int
) -> None:
    rng, clock, limited = random.Random(seed), HandClock(), a_descriptor(cost_per_day=1000)
    running, used, was_refused, was_near = list[Reservation](), 0, False, False
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(a_store(server.url, clock, lease_s=600.0)) for _ in range(routers)]
        for number in range(200):
            store = rng.choice(stores)
            if running and rng.random() < 0.5:
                done, cost = running.pop(rng.randrange(len(running))), rng.choice((0, 5, 20, 40)) * COST_UNIT
                await store.settle_all([owed(done, Charge(1, 0, cost))])
                used += cost
                answer: Any = await store.standing([limited])
            else:
                answer = await store.reserve(a_reservation(f"{number}", limited, cost=rng.choice((5, 50)) * COST_UNIT))
                taken = used + sum(each.charge.cost for each in running)
                if isinstance(answer, Reservation):
                    running.append(answer)
                    assert taken + answer.charge.cost <= 1000 * COST_UNIT
                else:
                    was_refused = True
                    assert taken + answer.charge.cost > 1000 * COST_UNIT
                answer = answer.standing
            assert answer.cost is not None
            assert answer.cost.remaining == max(0, 1000 - used // COST_UNIT)
            assert [near.level for near in answer.near] == ([used] if used >= 800 * COST_UNIT else [])
            was_near = was_near or bool(answer.near)
    assert was_refused
    assert was_near


async def test_what_a_router_that_died_had_reserved_is_reserved_no_more(server: RedisServer) -> None:
    clock, limited = HandClock(), a_descriptor(cost_per_day=1000)
    async with a_store(server.url, clock) as dies, a_store(server.url, clock) as stays:
        for number in range(9):
            await dies.reserve(a_reservation(f"{number}", limited, cost=100 * COST_UNIT))
        settled = a_reservation("settled", limited, cost=100 * COST_UNIT)
        await stays.reserve(settled)
        await stays.settle_all([owed(settled, Charge(1, 0, 50 * COST_UNIT))])
        for _ in range(2):
            standing = await stays.standing([limited])
            assert standing.cost is not None
            assert standing.cost.remaining == 950
            clock.pass_s(LEASE_S + 1)
        assert isinstance(await stays.reserve(a_reservation("last", limited, cost=940 * COST_UNIT)), Reservation)
