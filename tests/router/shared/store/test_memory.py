from __future__ import annotations

import pytest

from policies.quota.budget import Reservation
from router.shared.store.memory import MemoryStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import HandClock


async def test_nothing_lapses_in_memory_because_its_holder_ends_with_it() -> None:
    clock = HandClock()
    store = MemoryStore(clock)
    budget = a_descriptor(cost_per_day=10)
    assert isinstance(store.reserve(a_reservation("r", budget, cost=9_000)), Reservation)
    clock.pass_s(3600)
    assert (left := (await store.standing([budget])).cost) is not None
    assert left.remaining == 1
    assert repr(store).startswith("<MemoryStore <Ledger 1 open")
    store.check()


def test_a_store_with_an_unbalanced_ledger_is_found() -> None:
    store = MemoryStore(HandClock())
    store.reserve(a_reservation("r", a_descriptor(tokens_per_minute=10), tokens=1))
    store._ledger._open.clear()
    with pytest.raises(AssertionError):
        store.check()
