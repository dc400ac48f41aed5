from __future__ import annotations

import errno
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.quota.budget import Charge, Descriptor, Refused, Reservation
from policies.quota.ledger import Ledger
from router.shared.store.levels_file import LevelsFile
from router.shared.store.memory import MemoryStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import HandClock


async def test_nothing_lapses_in_memory_because_its_holder_ends_with_it() -> None:
    clock = HandClock()
    store = MemoryStore(clock)
    budget = a_descriptor(cost_per_day=10)
    assert isinstance(store.reserve(a_reservation("r", budget, cost=9_000)), Reservation)
    clock.pass_s(3600)
    assert list(await store.levels([budget])) == [9_000]
    assert repr(store).startswith("<MemoryStore <Ledger 1 open")
    store.check()


def test_a_store_with_an_unbalanced_ledger_is_found() -> None:
    store = MemoryStore(HandClock())
    store.reserve(a_reservation("r", a_descriptor(tokens_per_minute=10), tokens=1))
    store._ledger._open.clear()
    with pytest.raises(AssertionError):
        store.check()


async def a_life(path: Path, clock: HandClock, *work: Callable[[MemoryStore], object], ends: bool = True) -> None:
    """A store that goes on from the file at `path`, does `work`, and ends."""
    store = MemoryStore(clock, file := LevelsFile(path))
    await store.start()
    for each in work:
        each(store)
    if ends:
        await store.close()
    else:
        # killed: nothing is kept any more
        assert store.keeper is not None
        assert store.keeper._task is not None
        store.keeper._task.cancel()
        file.close()


def used(name: str, *descriptors: Descriptor, **charge: int) -> Callable[[MemoryStore], object]:
    def use(store: MemoryStore) -> None:
        asked = store.reserve(a_reservation(name, *descriptors, **charge))
        assert isinstance(asked, Reservation), asked
        store.settle(asked, asked.charge)

    return use


def refused(name: str, *descriptors: Descriptor, **charge: int) -> Callable[[MemoryStore], object]:
    def be_refused(store: MemoryStore) -> None:
        assert isinstance(store.reserve(a_reservation(name, *descriptors, **charge)), Refused)

    return be_refused


LIMITS = a_descriptor(requests_per_minute=3, cost_per_day=10, cost_per_month=100)


@pytest.mark.parametrize("ends", [True, False])
async def test_limits_and_budgets_go_on_in_the_next_store(tmp_path: Path, ends: bool) -> None:
    clock, path = HandClock(), tmp_path / "budgets"
    await a_life(path, clock, used("a", LIMITS, requests=2, cost=6_000), ends=ends)
    clock.pass_s(1)
    await a_life(path, clock, refused("b", LIMITS, requests=2), used("c", LIMITS, requests=1, cost=3_000))
    clock.pass_s(60)
    await a_life(path, clock, refused("d", LIMITS, requests=1, cost=1_001), used("e", LIMITS, requests=3, cost=1_000))
    clock.pass_s(86_400)
    await a_life(path, clock, used("f", LIMITS, requests=1, cost=10_000))


async def test_what_a_killed_store_had_reserved_is_given_back(tmp_path: Path) -> None:
    clock, path = HandClock(), tmp_path / "budgets"
    asked = a_reservation("open", LIMITS, requests=1, cost=9_000)
    await a_life(path, clock, lambda store: store.reserve(asked), ends=False)
    await a_life(path, clock, used("next", LIMITS, requests=3, cost=10_000))


async def test_a_second_store_counts_alone_and_takes_the_file_over_when_the_first_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path, events = HandClock(), tmp_path / "budgets", list[str]()
    first, second = (MemoryStore(clock, LevelsFile(path), on_event=events.append) for _ in range(2))
    await first.start()
    await second.start()
    assert second.keeper is not None
    assert not events, "nothing was counted yet, so nothing is lost"
    used("a", LIMITS, cost=4_000)(first)
    used("b", LIMITS, cost=3_000)(second)
    await second.keeper.keep()
    assert events == ["budgets_unkept"]
    assert "in use by another router" in caplog.text
    await first.close()
    await second.keeper.keep()
    assert events == ["budgets_unkept", "budgets_kept"]
    refused("c", LIMITS, cost=3_001)(second)
    used("d", LIMITS, cost=3_000)(second)
    second.check()
    await second.close()
    await a_life(path, clock, refused("e", LIMITS, cost=1))


@pytest.mark.parametrize("seed", range(4))
async def test_a_store_that_is_killed_at_any_moment_forgets_nothing(tmp_path: Path, seed: int) -> None:
    rng, clock, path, spent = random.Random(seed), HandClock(), tmp_path / "budgets", 0
    budget = a_descriptor(cost_per_month=1_000_000)
    for life in range(15):
        store = MemoryStore(clock, file := LevelsFile(path))
        await store.start()
        assert await store.levels([budget]) == [spent]
        keeper = store.keeper
        assert keeper is not None
        for number in range(rng.randrange(20)):
            open_name, name = f"open {life} {number}", f"{life} {number}"
            # what is reserved and not settled is given back
            assert isinstance(store.reserve(a_reservation(open_name, budget, cost=7)), Reservation)
            answer = store.reserve(a_reservation(name, budget, cost=5))
            assert isinstance(answer, Reservation)
            store.settle(answer, Charge(1, 0, cost := rng.randrange(10)))
            spent += cost
            what = rng.randrange(6)
            if what == 0:
                await keeper.keep()
            elif what == 1:
                # killed when the levels are written, and what was settled before is not forgotten yet
                store._journal.turn()
                file.save(list(store._ledger.settled_levels()))
        assert keeper._task is not None
        keeper._task.cancel()
        file.close()
    assert {stat.S_IMODE(journal.stat().st_mode) for journal in journals(tmp_path)} <= {0o600}


async def test_the_journal_of_budgets_is_forgotten_once_they_are_kept(tmp_path: Path) -> None:
    store = MemoryStore(HandClock(), LevelsFile(tmp_path / "budgets"))
    await store.start()
    for number in range(3):
        used(str(number), LIMITS, requests=1)(store)
        assert len(journals(tmp_path)) == 1
        assert store.keeper is not None
        await store.keeper.keep()
        assert journals(tmp_path) == []
    await store.close()


async def test_a_journal_that_broke_off_is_read_up_to_there(tmp_path: Path) -> None:
    clock, path = HandClock(), tmp_path / "budgets"
    await a_life(path, clock, used("a", LIMITS, cost=4_000), used("b", LIMITS, cost=2_000), ends=False)
    (journal,) = journals(tmp_path)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"nonsense\n" + lines[1][:-4])
    await a_life(path, clock, refused("c", LIMITS, cost=6_001), used("d", LIMITS, cost=6_000))


async def test_a_disk_without_room_for_the_journal_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock, path = HandClock(), tmp_path / "budgets"
    monkeypatch.setattr("router.shared.store.levels_journal.os.write", full)
    await a_life(path, clock, used("a", LIMITS, cost=4_000), used("b", LIMITS, cost=2_000))
    assert caplog.text.count("cannot be written") == 1
    await a_life(path, clock, refused("c", LIMITS, cost=4_001))


async def test_the_journal_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.shared.store.levels_journal._MOST_BYTES", 1000)
    uses = (used(str(number), a_descriptor(cost_per_day=100), cost=1) for number in range(100))
    await a_life(tmp_path / "budgets", HandClock(), *uses, ends=False)
    (journal,) = journals(tmp_path)
    assert journal.stat().st_size < 1200


def journals(folder: Path) -> list[Path]:
    return list(folder.glob("budgets.since-*"))


@given(
    st.lists(st.tuples(st.sampled_from(["use", "end", "kill"]), st.integers(0, 3), st.integers(0, 90_000)), max_size=30)
)
def test_a_ledger_that_goes_on_admits_what_one_that_never_ended_admits(steps: list[tuple[str, int, int]]) -> None:
    own, others = (
        a_descriptor(requests_per_minute=2, cost_per_hour=5, cost_per_day=9),
        a_descriptor("b", cost_per_day=7),
    )
    clock, whole, now = HandClock(), Ledger(), Ledger()
    for number, (step, amount, pause_s) in enumerate(steps):
        clock.pass_s(pause_s % 7 if number % 3 else pause_s)
        if step != "use":
            levels = list(now.settled_levels())
            now = Ledger()
            now.resume(levels, now=clock.now_s)
            continue
        for descriptor in (own, others):
            asked = a_reservation(f"r{number}{descriptor.tenant}", descriptor, requests=1, cost=amount * 1_000)
            answers = [ledger.reserve(asked, now=clock.now_s) for ledger in (whole, now)]
            assert len({isinstance(answer, Refused) for answer in answers}) == 1
            assert whole.levels([descriptor], now=clock.now_s) == now.levels([descriptor], now=clock.now_s)
            for ledger, answer in zip((whole, now), answers, strict=True):
                if isinstance(answer, Reservation):
                    ledger.settle(answer, answer.charge, now=clock.now_s)
                ledger.check()
