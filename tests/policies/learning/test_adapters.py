"""Which adapters a backend has ready, and what the others cost."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from policies.learning.adapters import PRIOR_S, AdapterSlots, Readiness


def seen(
    slots: AdapterSlots,
    adapter: str,
    *,
    known: bool = True,
    active: Collection[str] | None = None,
    most: int | None = 2,
    ready: Collection[str] | None = None,
) -> Readiness:
    return slots.readiness(adapter, is_known=known, active=active, slots=most, ready=ready)


def test_an_adapter_is_ready_after_its_first_request_until_others_have_taken_its_slot() -> None:
    slots = AdapterSlots()
    assert seen(slots, "a") is Readiness.KNOWN
    for name in ("a", "b"):
        slots.begin(name)
        slots.end(name)
    assert (seen(slots, "a"), seen(slots, "b")) == (Readiness.READY, Readiness.READY)
    slots.begin("c")
    slots.end("c")
    assert (seen(slots, "a"), seen(slots, "b")) == (Readiness.KNOWN, Readiness.READY)


def test_an_adapter_with_requests_at_the_backend_is_ready_whichever_router_sent_them() -> None:
    assert seen(AdapterSlots(), "a", active={"a", "b"}) is Readiness.READY


def test_an_adapter_waits_while_requests_of_others_use_all_slots() -> None:
    slots = AdapterSlots()
    slots.begin("a")
    assert seen(slots, "c", active={"a"}) is Readiness.KNOWN
    assert seen(slots, "c", active={"b"}) is Readiness.NO_SLOT
    assert seen(slots, "a", active={"b"}) is Readiness.READY
    slots.end("a")
    assert seen(slots, "c", active={"b"}) is Readiness.KNOWN


def test_one_slot_is_assumed_without_a_report() -> None:
    slots = AdapterSlots()
    slots.begin("a")
    assert seen(slots, "b", most=None) is Readiness.NO_SLOT


def test_an_adapter_that_the_backend_does_not_list_has_to_be_loaded_but_for_a_request_that_is_there() -> None:
    slots = AdapterSlots()
    assert seen(slots, "a", known=False) is Readiness.LOADS
    slots.begin("a")
    assert seen(slots, "a", known=False) is Readiness.READY
    slots.end("a")
    assert seen(slots, "a", known=False) is Readiness.LOADS, "it would list it, had it been loaded"


def test_a_backend_that_reports_its_memory_is_believed_before_what_was_sent_there() -> None:
    slots = AdapterSlots()
    slots.begin("a")
    slots.end("a")
    assert seen(slots, "a", ready={"b"}) is Readiness.LOADS
    assert seen(slots, "b", ready={"b"}) is Readiness.READY
    assert seen(slots, "a", ready={"b", "c"}, active={"b"}) is Readiness.LOADS, "c can be dropped"
    assert seen(slots, "a", ready={"b", "c"}, active={"b", "c"}) is Readiness.NO_SLOT
    slots.begin("a")
    assert seen(slots, "a", ready={"b"}) is Readiness.READY, "it is being loaded for another request"
    assert seen(slots, "d", ready={"b"}, active={"b"}) is Readiness.NO_SLOT, "the report is older than the request"


def test_a_backend_that_was_started_anew_has_nothing_in_its_slots() -> None:
    slots = AdapterSlots()
    slots.begin("a")
    slots.end("a")
    slots.forget()
    assert seen(slots, "a") is Readiness.KNOWN


def test_what_an_adapter_costs_is_learnt_within_bounds() -> None:
    slots = AdapterSlots()
    assert slots.seconds(Readiness.LOADS) == PRIOR_S[Readiness.LOADS]
    for _ in range(20):
        slots.observe(Readiness.LOADS, 4.0)
        slots.observe(Readiness.READY, 4.0)
        slots.observe(Readiness.KNOWN, -1.0)
    assert slots.seconds(Readiness.LOADS) == pytest.approx(4.0, rel=0.01)
    assert slots.seconds(Readiness.READY) == 0.0
    assert 0.0 <= slots.seconds(Readiness.KNOWN) < 0.001
    slots.observe(Readiness.LOADS, 1e9)
    assert slots.seconds(Readiness.LOADS) < 30.0


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_an_engine_that_gives_up_the_adapter_used_longest_ago(seed: int) -> None:
    rng, slots, most = random.Random(seed), AdapterSlots(), 3
    names, running, loaded = [f"a{number}" for number in range(6)], list[str](), list[str]()
    for _ in range(300):
        if running and rng.random() < 0.5:
            name = running.pop(rng.randrange(len(running)))
            slots.end(name)
        else:
            name = rng.choice(names)
            view = seen(slots, name, most=most)
            if view is Readiness.NO_SLOT:
                assert len({*running} - {name}) == most
                continue
            assert (view is Readiness.READY) == (name in loaded)
            slots.begin(name)
            running.append(name)
        # an engine uses a running adapter in each step, and evicts only those that nothing uses
        loaded = [*(adapter for adapter in loaded if adapter != name), name]
        while len(loaded) > most:
            loaded.remove(next(adapter for adapter in loaded if adapter not in running))
        slots.check()
