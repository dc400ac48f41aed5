"""10,000 random requests on budgets at four routers while Redis is killed: the ledger balances to the last unit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from policies.nouns import FixedBudget, Limits, Organization, Outcome, Team, Tenant, Usage
from policies.quota.budget import COST_UNIT, Charge, Descriptor, Reservation, descriptors, meters, of_key
from router.call.observer import Spent
from router.operate.usage.database import UsageDatabase
from router.operate.usage.recorder import UsageRecorder
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.redis import RedisStore
from tests.router.operate.usage.parts import HAS_POSTGRES, NOON, a_postgres, an_account
from tests.router.shared.store.parts import HandClock, RedisServer, a_redis

OPERATIONS, ROUTERS, KILLS, AT_ONCE = 10_000, 4, 4, 8
MOST_COST = 4_000
"""Most that one request costs, in thousandths of a unit."""

TODAY = int(HandClock()() // 86_400)
PROJECT = FixedBudget("project", 2_800, TODAY - 3, TODAY + 3)
OVER, LATER = FixedBudget("over", 1, 0, TODAY - 1), FixedBudget("later", 1, TODAY + 1)
EXAMPLE = Organization("example", Limits(cost_per_month=3_000, soft_cost_per_month=2_000, fixed=(PROJECT,)))
SEARCH = Team("search", Limits(cost_per_month=900), {"big": Limits(cost_per_month=300)})
KEY = Limits(cost_per_month=1_500)


def a_tenant(name: str, most: int, organization: Organization | None = EXAMPLE) -> Tenant:
    trial = FixedBudget("trial", 140, TODAY)
    limits, of_user = Limits(cost_per_month=most, fixed=(OVER, LATER)), Limits(cost_per_day=150, fixed=(trial,))
    return Tenant(
        name,
        name,
        limits=limits,
        model_limits={"big": Limits(cost_per_week=1_200)},
        teams={"search": SEARCH},
        user_limits=of_user,
        tag_limits={"eval": Limits(cost_per_day=700), "nightly": Limits(fixed=(FixedBudget("nights", 900),))},
        organization=organization,
    )


TENANTS = (a_tenant("shop", 2_000), a_tenant("labs", 2_500), a_tenant("alone", 2_200, None))


class Asked(NamedTuple):
    """One request: the limits that bind it, and the row of usage in which it counts."""

    bound: tuple[Descriptor, ...]
    tenant: str
    team: str | None
    user: str
    model: str
    tags: tuple[str, ...]


def asked(dice: random.Random) -> Asked:
    tenant, team = dice.choice(TENANTS), dice.choice([None, SEARCH])
    user, model = f"user {dice.randrange(20)}", dice.choice(["small", "big"])
    key = dice.choice([None, of_key(tenant, KEY, "0a1b2c3d4e5f")])
    tags = dice.choice([(), ("eval",), ("nightly",), ("eval", "nightly")])
    bound = descriptors(tenant, model, key, team=team, user=user, tags=tags)
    return Asked(bound, tenant.name, None if team is None else team.name, user, model, tags)


class Books:
    """What all routers granted and charged, by meter, as this test saw it."""

    def __init__(self) -> None:
        self.level: Counter[tuple[str, str]] = Counter()
        self.highest: Counter[tuple[str, str]] = Counter()
        self.answers: Counter[str] = Counter()
        self.limits: dict[tuple[str, str], int] = {}
        self.charged: Counter[tuple[str, str | None, str, str, str]] = Counter()

    def took(self, granted: Reservation) -> None:
        self._add(granted, granted.charge.cost)
        self.answers["by its own share" if granted.is_local else "by Redis"] += 1

    def settled(self, granted: Reservation, cost: int, row: Asked) -> None:
        self._add(granted, cost - granted.charge.cost)
        self.charged[row.tenant, row.team, row.user, row.model, ",".join(row.tags)] += cost

    def _add(self, granted: Reservation, cost: int) -> None:
        for meter in meters(granted.descriptors):
            if not meter.holds(TODAY * 86_400_000):
                continue
            self.level[meter.id] += cost
            self.highest[meter.id] = max(self.highest[meter.id], self.level[meter.id])
            if not meter.is_soft:
                self.limits[meter.id] = meter.capacity

    def overshoot(self) -> float:
        """The largest part by which a limit was exceeded at any time."""
        return max(self.highest[name] / limit - 1 for name, limit in self.limits.items())


async def work(
    store: GuardedStore, recorders: tuple[UsageRecorder, ...], number: int, left: Iterator[int], books: Books
) -> None:
    """One request after the other while there are some `left`, each with a random cost, end and duration."""
    dice = random.Random(number)
    for at in left:
        await asyncio.sleep(dice.choice([0.001, 0.005, 0.02]))
        row, cost = asked(dice), dice.randint(1, MOST_COST)
        answer = await store.reserve(Reservation(f"{number}-{at}", row.bound, Charge(1, 0, cost)))
        if not isinstance(answer, Reservation):
            books.answers["refused"] += 1
            continue
        books.took(answer)
        await asyncio.sleep(dice.choice([0, 0.001, 0.01]))
        # a request that was cancelled early costs nothing
        actual = 0 if dice.random() < 0.2 else dice.randint(1, cost)
        store.settle(answer, Charge(1, 0, actual))
        books.settled(answer, actual, row)
        account = an_account(Spent(row.model, "own", Usage(1, 1), actual), user=row.user)
        account.tenant, account.team, account.tags = row.tenant, row.team, row.tags
        for recorder in recorders:
            recorder.ended(account, Outcome.FINISHED, "", 0.0)


async def kill(server: RedisServer, times: int, is_over: asyncio.Event) -> int:
    """Kill and restart `server` now and then until `is_over`; how often."""
    killed = 0
    while not is_over.is_set() and killed < times:
        await asyncio.sleep(0.8)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(0.15)
        await asyncio.to_thread(server.start)
        killed += 1
    return killed


def a_recorder(place: str, folder: Path) -> UsageRecorder:
    recorder = UsageRecorder(
        UsageDatabase(place),
        folder,
        kind_of=lambda _: "vllm",
        currency=lambda: None,
        clock=lambda: 0.0,
        unix_time=lambda: float(NOON),
    )
    recorder.open()
    return recorder


@asynccontextmanager
async def routers(server: RedisServer, events: Counter[str]) -> AsyncIterator[list[GuardedStore]]:
    options = GuardOptions(replicas=ROUTERS, deadline_s=1.0, first_backoff_s=0.01, most_backoff_s=0.05)
    clock = HandClock()
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(ROUTERS):
            store = GuardedStore(
                RedisStore(server.url, clock=clock),
                clock=clock,
                options=options,
                on_event=lambda event: events.update([event]),
                routers=lambda: ROUTERS,
            )
            await store.start()
            stack.push_async_callback(store.close)
            stores.append(store)
        yield stores


def levels(server: RedisServer) -> Counter[tuple[str, str]]:
    """What Redis has of each meter, by its id."""
    found: Counter[tuple[str, str]] = Counter()
    with server.admin() as admin:
        for key in admin.scan_iter("pointsman:*:levels"):
            ledger = key.decode().split("{")[1].split("}")[0]
            for name, level in admin.hgetall(key).items():
                found[ledger, name.decode()] = int(level.split()[0])
    return found


@pytest.mark.skipif(not HAS_POSTGRES, reason="there is no PostgreSQL here")
async def test_ten_thousand_operations_balance_while_redis_is_killed(tmp_path: Path) -> None:
    books, events, is_over = Books(), Counter[str](), asyncio.Event()
    with a_redis(keeps=True) as server, a_postgres() as postgres:
        places = (str(tmp_path / "usage.sqlite"), postgres.url)
        # as four processes have them: a journal each, and the database in common
        recorders = [
            tuple(a_recorder(place, tmp_path / f"journal-{number}-{at}") for at, place in enumerate(places))
            for number in range(ROUTERS)
        ]
        async with routers(server, events) as stores:
            killing = asyncio.create_task(kill(server, KILLS, is_over))
            numbers, left = range(ROUTERS * AT_ONCE), iter(range(OPERATIONS))
            await asyncio.gather(*(work(stores[n % ROUTERS], recorders[n % ROUTERS], n, left, books) for n in numbers))
            is_over.set()
            killed = await killing
            async with asyncio.timeout(20):
                while any(store.owed or store.is_away for store in stores):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for store in stores:
                store.check()
        in_redis = levels(server)
        for recorder in (one for pair in recorders for one in pair):
            await asyncio.to_thread(recorder.close)
        rows = []
        for place in places:
            database = UsageDatabase(place)
            rows.append(database.sums())
            database.close()
    print(f"{books.answers}, {killed} kills, overshoot {books.overshoot():.1%}, events {dict(events)}")
    assert (killed, books.answers.total()) == (KILLS, OPERATIONS)
    assert events["quota_settlement_dropped"] == 0
    assert min(books.answers[what] for what in ("refused", "by Redis", "by its own share")) > 100, "all must be seen"
    # to the thousandth of a unit, and so of every tenant, team, key, user and model and of the organization
    assert in_redis == +books.level
    assert books.overshoot() < 0.1
    assert rows[0] == rows[1]
    names = ("tenant", "team", "user", "model", "tags")
    charged = Counter(
        {tuple(row[name] or (None if name == "team" else "") for name in names): row["cost"] for row in rows[0]}
    )
    assert charged == books.charged
    assert sum(books.charged.values()) > 3 * COST_UNIT * 1_000
