"""Other routers' requests at backends, and since when a backend computes them."""

from __future__ import annotations

import random

import pytest

from router.fleet.cluster.flights import Elsewhere, Traffic
from router.shared.replicas.peers import Peers


def waiting(*tokens: int, running: int = 0) -> dict[str, Traffic]:
    """A router has prompts of so many tokens at `a`."""
    return {"a": Traffic(running, len(tokens), sum(tokens), float(sum(tokens)))}


def traffic_of(changed: dict[str, Elsewhere]) -> dict[str, Traffic]:
    return {backend: there.traffic for backend, there in changed.items()}


@pytest.fixture
def peers() -> Peers:
    return Peers(silent_s=4.0)


def test_a_backend_is_busy_from_the_first_prompt_on(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.hear("x", waiting(500, 300), {}, 10.1)
    assert peers.changed()["a"] == Elsewhere(waiting(500, 300)["a"], 10.0)


@pytest.mark.parametrize("then", [waiting(300, running=1), waiting(300, 700, running=1), waiting(300, 100, running=1)])
def test_a_first_token_is_where_it_begins_the_next_prompt(peers: Peers, then: dict[str, Traffic]) -> None:
    peers.hear("x", waiting(500, 300), {}, 10.0)
    peers.hear("x", then, {}, 10.1)
    assert peers.changed()["a"] == Elsewhere(then["a"], 10.1)


def test_a_repeated_report_does_not_start_again(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.hear("x", waiting(500), {}, 11.0)
    peers.hear("x", None, {}, 12.0)
    peers.hear("x", waiting(500, running=1), {}, 13.0)
    assert peers.changed()["a"].busy_since == 10.0


def test_a_backend_that_had_nothing_begins_anew(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.hear("x", waiting(running=1), {}, 11.0)
    peers.hear("x", waiting(200, running=1), {}, 12.0)
    assert peers.changed()["a"].busy_since == 12.0
    peers.hear("x", {}, {}, 13.0)
    peers.hear("x", waiting(200), {}, 14.0)
    assert peers.changed()["a"].busy_since == 14.0


def test_of_several_routers_the_last_first_token_counts(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.hear("y", waiting(100, 200, running=1), {}, 11.0)
    assert peers.changed()["a"] == Elsewhere(Traffic(1, 3, 800, 800.0), 11.0)


def test_a_router_that_is_silent_has_nothing(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.forget_silent(13.9)
    assert len(peers) == 1
    assert "a" in peers.changed()
    peers.forget_silent(14.1)
    assert len(peers) == 0
    assert peers.changed() == {"a": Elsewhere()}


def test_a_router_that_is_heard_again_has_what_it_had_before(peers: Peers) -> None:
    peers.hear("x", {**waiting(500), "b": Traffic(2)}, {}, 10.0)
    peers.forget_silent(14.1)
    assert traffic_of(peers.changed()) == {"a": Traffic(), "b": Traffic()}
    peers.hear("x", None, {"b": Traffic(3)}, 15.0)
    assert traffic_of(peers.changed()) == {**waiting(500), "b": Traffic(3)}
    peers.check()


def test_a_router_that_has_gone_is_not_remembered_for_ever(peers: Peers) -> None:
    peers.hear("x", waiting(500), {}, 10.0)
    peers.forget_silent(14.1)
    peers.forget_silent(100.0)
    peers.changed()
    peers.hear("x", None, {"b": Traffic(3)}, 101.0)
    assert traffic_of(peers.changed()) == {"b": Traffic(3)}


def test_a_change_concerns_its_backends_only(peers: Peers) -> None:
    peers.hear("x", {**waiting(500), "b": Traffic(2)}, {}, 10.0)
    peers.hear("x", None, {"b": Traffic(3), "c": Traffic(1)}, 10.1)
    assert traffic_of(peers.changed()) == {**waiting(500), "b": Traffic(3), "c": Traffic(1)}
    peers.hear("x", None, {"b": Traffic()}, 10.2)
    assert traffic_of(peers.changed()) == {"b": Traffic()}


def test_a_whole_report_repairs_a_lost_change(peers: Peers) -> None:
    peers.hear("x", {**waiting(500), "b": Traffic(2)}, {}, 10.0)
    peers.hear("x", {"b": Traffic(2)}, {}, 11.0)
    assert traffic_of(peers.changed()) == {"a": Traffic(), "b": Traffic(2)}


@pytest.mark.parametrize("seed", range(20))
def test_changes_add_up_to_what_whole_reports_say(peers: Peers, seed: int) -> None:
    rng, now = random.Random(seed), 10.0
    has: dict[str, dict[str, Traffic]] = {name: {} for name in "xyz"}
    heard: dict[str, Traffic] = {}
    for _ in range(200):
        now, name, backend = now + 0.01, rng.choice("xyz"), rng.choice("abcd")
        there = Traffic(rng.randint(0, 2), rng.randint(0, 1), rng.randint(0, 9))
        has[name][backend] = there
        whole = {at: each for at, each in has[name].items() if each != Traffic()}
        if rng.random() < 0.2:
            peers.hear(name, whole, {}, now)
        else:
            peers.hear(name, None, {backend: there}, now)
        heard |= traffic_of(peers.changed())
        peers.check()
    for backend in "abcd":
        there = [theirs.get(backend, Traffic()) for theirs in has.values()]
        assert heard.get(backend, Traffic()) == tuple(map(sum, zip(*there, strict=True)))
