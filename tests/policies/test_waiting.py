"""The events that a request without a backend may wait for."""

from __future__ import annotations

import random

import pytest

from policies.catalogue import builtin_catalogue
from policies.compose import Policy, best, has_room, healthy, serves_model
from policies.nouns import Decision
from policies.waiting import is_outage, is_worth_waiting, would_take
from tests.policies.builders import a_backend, a_cluster, a_request

DEFAULT = builtin_catalogue().policies["default"]
FULL = {"free_tokens": 10, "running": 1}
ROOM_FIRST = Policy("own", (("has_room", has_room()), ("serves_model", serves_model())), (), best())


def dropped(**reasons: str) -> Decision:
    return Decision(None, "default", dropped=tuple(reasons.items()))


@pytest.mark.parametrize(
    ("decision", "waits", "outage"),
    [
        (dropped(a="healthy", b="has_room"), True, False),
        (dropped(a="healthy", b="fits_context"), True, True),
        (dropped(a="warming"), True, False),
        (dropped(a="fits_context"), False, False),
        (dropped(a="avoided", b="in_pools"), False, False),
        (dropped(), False, False),
        (Decision("b", "default", dropped=(("a", "has_room"),)), False, False),
    ],
)
def test_want_of_room_or_health_is_worth_waiting_and_only_the_latter_is_an_outage(
    decision: Decision, waits: bool, outage: bool
) -> None:
    assert (is_worth_waiting(decision), is_outage(decision)) == (waits, outage)


def test_a_backend_that_was_never_reached_is_waited_for_only_if_no_other_serves_the_model() -> None:
    assert is_outage(dropped(a="unreached", b="in_pools", c="serves_model"))
    assert not is_worth_waiting(dropped(a="unreached", b="incapable"))
    assert not is_worth_waiting(dropped(a="unreached", b="avoided"))


def test_an_ill_backend_that_could_not_take_it_when_well_is_not_waited_for() -> None:
    view = a_cluster(a_backend("a", healthy=False, models=frozenset({"other"})))
    decision = DEFAULT.decide(a_request(), view, random.Random(1))
    assert decision.dropped == (("a", "serves_model"),)
    assert not is_worth_waiting(decision)


def test_a_permanent_objection_is_reported_before_a_passing_one_in_any_order_of_the_file() -> None:
    view = a_cluster(a_backend("a", models=frozenset({"other"}), **FULL), a_backend("b", **FULL))
    decision = ROOM_FIRST.decide(a_request(), view, random.Random(1))
    assert decision.dropped == (("a", "serves_model"), ("b", "has_room"))


def test_of_two_passing_objections_the_first_is_reported() -> None:
    policy = Policy("own", (("healthy", healthy()), ("has_room", has_room())), (), best())
    view = a_cluster(a_backend("a", healthy=False, **FULL), a_backend("b", **FULL))
    assert policy.decide(a_request(), view, random.Random(1)).dropped == (("a", "healthy"), ("b", "has_room"))


def test_a_backend_of_unknown_models_gets_nothing_whatever_the_policy() -> None:
    policy = Policy("own", (), (), best())
    decision = policy.decide(a_request(), a_cluster(a_backend("a", models=frozenset())), random.Random(1))
    assert decision.dropped == (("a", "unreached"),)


def test_backends_that_only_lack_room_would_take_it_and_where_there_are_none_those_that_lack_health() -> None:
    view = a_cluster(a_backend("a"), a_backend("b"), a_backend("c"))
    roomless = dropped(a="has_room", b="healthy", c="under_limit")
    assert [backend.name for backend in would_take(view, roomless)] == ["a", "c"]
    chosen = Decision("a", "default", dropped=(("b", "healthy"),))
    assert [backend.name for backend in would_take(view, chosen)] == ["a", "c"]
    assert [backend.name for backend in would_take(view, dropped(a="healthy", b="avoided", c="healthy"))] == ["a", "c"]
    assert would_take(view, dropped(a="avoided", b="in_pools", c="serves_model")) == []
