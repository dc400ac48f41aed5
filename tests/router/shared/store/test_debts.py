"""What is owed to the shared store outlives a killed router, and counts exactly once. Redis and its line are real."""

from __future__ import annotations

import asyncio
import random
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from policies.quota.budget import Charge, Reservation
from router.shared.store.debts import Debt, DebtFile
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.redis import RedisStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import NOON_S, HandClock, RedisServer, a_line, a_redis
from tests.shards.attached import eventually

BUDGET = a_descriptor(cost_per_day=1000)
HOURLY = a_descriptor("other", cost_per_hour=1000)
PER_MINUTE = a_descriptor("third", requests_per_minute=60)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.clean()


class Router:
    """The quotas of one router, which can be killed: nothing of it runs any more, and its file is unlocked."""

    def __init__(self, url: str, folder: Path, clock: HandClock, **options: Any) -> None:
        patience: dict[str, Any] = {"deadline_s": 2.0, "first_backoff_s": 0.005, "most_backoff_s": 0.02, **options}
        self.shared, self.file, self.events = RedisStore(url, clock=clock), DebtFile(folder, "here"), list[str]()
        self.store = GuardedStore(
            self.shared, clock=clock, options=GuardOptions(**patience), on_event=self.events.append, file=self.file
        )

    async def use(self, name: str, units: int, bound: Any = BUDGET) -> None:
        answer = await self.store.reserve(a_reservation(name, bound, requests=1, cost=1))
        assert isinstance(answer, Reservation)
        self.store.settle(answer, Charge(1, 0, 1000 * units))

    async def kill(self) -> None:
        task = self.store._task
        assert task is not None
        task.cancel()
        await asyncio.wait({task})
        await self.store._calls.end(within_s=0.0)
        # as the end of a process does it: nothing is tidied up
        if self.file._file is not None:
            self.file._file.close()
        await self.shared.close()

    async def is_even(self) -> None:
        await eventually(lambda: not self.store.is_away and self.store.owed == 0 and not self.store._must_take_over)

    async def used(self, bound: Any = BUDGET) -> int:
        (level,) = await self.shared.levels([bound])
        return level // 1000 if bound is not PER_MINUTE else level // 60_000


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@asynccontextmanager
async def a_router(url: str, folder: Path, clock: HandClock, **options: Any) -> AsyncIterator[Router]:
    router = Router(url, folder, clock, **options)
    await router.store.start()
    try:
        yield router
    finally:
        await router.store.close()
        router.store.check()


async def test_use_of_an_outage_is_paid_by_the_next_router_though_the_first_was_killed(
    server: RedisServer, tmp_path: Path
) -> None:
    clock, folder = HandClock(), tmp_path / "owed"
    async with a_line(server) as line:
        first = Router(line.url, folder, clock)
        await first.store.start()
        await first.use("before", 5)
        await first.is_even()
        line.cut()
        for number in range(20):
            await first.use(f"r{number}", 10)
        (left,) = folder.glob("*.owed")
        assert stat.S_IMODE(left.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await first.kill()
        line.mend()
        for _ in range(2):
            async with a_router(line.url, folder, clock) as second:
                await second.is_even()
                assert await second.used() == 205
        assert list(folder.iterdir()) == []


async def test_without_an_outage_nothing_is_left(server: RedisServer, tmp_path: Path) -> None:
    async with a_router(server.url, tmp_path, HandClock()) as router:
        for number in range(50):
            await router.use(str(number), 1)
        await router.is_even()
        assert router.file.count == 0
    assert files(tmp_path) == []


async def test_a_settlement_is_written_before_it_is_confirmed(server: RedisServer, tmp_path: Path) -> None:
    async with a_router(server.url, tmp_path, HandClock(), deadline_s=5.0) as router:
        await router.use("first", 1)
        with server.frozen():
            router.store.settle(a_reservation("late", BUDGET, cost=1), Charge(cost=1000))
            assert any(b'"late"' in path.read_bytes() for path in files(tmp_path))
        await router.is_even()
        assert not any(b'"late"' in path.read_bytes() for path in files(tmp_path))


# a router that is killed closes nothing: the kernel does
@pytest.mark.filterwarnings("ignore:Exception ignored in.*owed:pytest.PytestUnraisableExceptionWarning")
async def test_routers_that_are_killed_at_any_moment_forget_nothing(server: RedisServer, tmp_path: Path) -> None:
    clock, used, rng = HandClock(), 0, random.Random(5)
    for life in range(12):
        router = Router(server.url, tmp_path, clock)
        await router.store.start()
        for number in range(rng.randrange(12)):
            await router.use(f"{life} {number}", 1)
            used += 1
        # Redis has a part of it, which depends on how far the background task came
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        await router.kill()
    async with a_router(server.url, tmp_path, clock) as last:
        await last.is_even()
        assert await last.used() == used
    assert files(tmp_path) == []


async def test_the_file_does_not_grow_where_some_are_owed_at_each_moment(server: RedisServer, tmp_path: Path) -> None:
    async with a_router(server.url, tmp_path, HandClock(), deadline_s=5.0) as router:
        most = 0
        for number in range(3000):
            router.store.settle(a_reservation(str(number), BUDGET, cost=1), Charge(cost=1))
            most = max(most, router.file.count - 2 * router.store.owed)
            if not number % 40:
                await asyncio.sleep(0.001)
        assert most <= 2000, "of 6,000 lines, those of Redis' answers among them"
        await router.is_even()
    assert files(tmp_path) == []


async def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / "owed", HandClock()
    folder.write_text("no folder")
    monkeypatch.setattr("router.shared.store.guarded._WRITE_AGAIN_S", 0.0)
    async with a_line(server) as line:
        first = Router(line.url, folder, clock)
        await first.store.start()
        line.cut()
        await first.use("unwritten", 1)
        folder.unlink()
        await first.use("written", 2)
        await first.kill()
        line.mend()
        async with a_router(line.url, folder, clock) as second:
            await second.is_even()
            assert await second.used() == 3


async def test_what_is_left_at_the_end_of_a_router_is_kept_too(server: RedisServer, tmp_path: Path) -> None:
    clock = HandClock()
    async with a_router(server.url + "-nowhere", tmp_path, clock, first_backoff_s=60.0) as router:
        await router.use("r", 7)
    async with a_router(server.url, tmp_path, clock) as next_one:
        await next_one.is_even()
        assert await next_one.used() == 7


async def test_the_file_of_a_router_that_lives_and_of_another_store_is_left_alone(tmp_path: Path) -> None:
    debt = Debt("acme", "r", "w", 1, 0, [("cost", 0, 5)])
    lives, elsewhere = DebtFile(tmp_path, "here"), DebtFile(tmp_path, "there")
    lives.add([debt])
    elsewhere.add([debt])
    elsewhere.close()
    assert list(DebtFile(tmp_path, "here").left_behind()) == []
    lives.close()
    (orphan,) = DebtFile(tmp_path, "here").left_behind()
    assert orphan.debts == [debt]
    assert list(DebtFile(tmp_path, "here").left_behind()) == [], "another router has it"
    orphan.release()


@given(cut=some.integers(0, 400), count=some.integers(0, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_line_that_broke_off_costs_no_other_one(tmp_path: Path, cut: int, count: int) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    debts = [Debt("acme", f"r{number}", "w", number + 1, 0, [("cost", 0, number)]) for number in range(count)]
    file = DebtFile(tmp_path, "here")
    file.add(debts)
    file.close()
    if not count:
        assert list(tmp_path.iterdir()) == []
        return
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    left = whole[: max(0, len(whole) - cut)]
    path.write_bytes(left)
    found = []
    for orphan in DebtFile(tmp_path, "here").left_behind():
        found += orphan.debts
        orphan.release()
    assert found == debts[: max(0, left.count(b"\n") - 1)]


def test_a_folder_in_which_others_can_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write there"):
        DebtFile(tmp_path, "here").add([])
    with pytest.raises(PermissionError):
        list(DebtFile(tmp_path, "here").left_behind())


async def test_a_disk_that_is_full_fails_no_request_and_is_reported(server: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "owed"
    folder.write_text("no folder")
    async with a_line(server) as line, a_router(line.url, folder, HandClock()) as router:
        line.cut()
        for number in range(3):
            await router.use(str(number), 1)
        assert "quota_debts_unwritten" in router.events
        line.mend()
        await router.is_even()
        assert await router.used() == 3


async def test_a_long_outage_of_many_requests_is_added_up_and_none_is_dropped(
    server: RedisServer, tmp_path: Path
) -> None:
    clock = HandClock()
    async with a_line(server) as line:
        first = Router(line.url, tmp_path, clock, most_owed=100)
        await first.store.start()
        line.cut()
        for number in range(1000):
            await first.use(str(number), 1, BUDGET if number % 2 else HOURLY)
        assert first.store.owed <= 100
        assert "quota_settlement_dropped" not in first.events
        await first.kill()
        line.mend()
        async with a_router(line.url, tmp_path, clock) as second:
            await second.is_even()
            assert (await second.used(), await second.used(HOURLY)) == (500, 500)


async def test_what_was_used_counts_in_the_period_in_which_it_began(server: RedisServer, tmp_path: Path) -> None:
    clock = HandClock(NOON_S + 59 * 60)
    async with a_line(server) as line, a_router(line.url, tmp_path, clock) as router:
        line.cut()
        for bound in (BUDGET, HOURLY, PER_MINUTE):
            await router.use(f"r {bound.tenant}", 10, bound)
        clock.pass_s(120)
        await router.use("later", 1, HOURLY)
        line.mend()
        await router.is_even()
        # the hour is over, the day is not, and a minute's limit is full again
        assert [await router.used(bound) for bound in (BUDGET, HOURLY, PER_MINUTE)] == [10, 1, 0]


async def test_debts_count_once_in_any_order_and_however_often_and_late_they_come(server: RedisServer) -> None:
    rng, clock = random.Random(8), HandClock()
    store = RedisStore(server.url, clock=clock)
    debts = [Debt("acme", f"{writer} {n}", writer, n, 0, [("cost", 0, 1000)]) for writer in "ab" for n in range(1, 201)]
    # in the order in which one round trip may be repeated in part
    sent = [debts[at : at + 20] for at in range(0, len(debts), 20)]
    for batch in sent:
        for _ in range(3):
            await store.settle_all(rng.sample(batch, len(batch)))
    clock.pass_s(3600)
    for batch in sent:
        await store.settle_all(batch)
    (level,) = await store.levels([BUDGET])
    assert level == 400 * 1000
    with server.admin() as admin:
        seen = f"{int(NOON_S // 86_400)} 200".encode()
        assert admin.hgetall("pointsman:{acme}:writers") == {b"a": seen, b"b": seen}
    await store.close()


async def test_writers_that_are_long_gone_are_forgotten(server: RedisServer) -> None:
    clock = HandClock()
    store = RedisStore(server.url, clock=clock)
    for number in range(200):
        await store.settle_all([Debt("acme", str(number), f"w{number}", 1, 0, [("cost", 0, 1)])])
        clock.pass_s(86_400)
    with server.admin() as admin:
        assert admin.hlen("pointsman:{acme}:writers") < 40
    await store.close()
