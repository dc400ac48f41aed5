"""Other routers' requests at backends, and since when a backend computes them."""

from __future__ import annotations

import pytest

from router.fleet.cluster.flights import Elsewhere, Traffic
from router.shared.replicas.peers import Peers


def waiting(*tokens: int, running: int = 0) -> dict[str, Traffic]:
    """A router has prompts of so many tokens at `a`."""
    return {"a": Traffic(running, len(tokens), sum(tokens), float(sum(tokens)))}


@pytest.fixture
def peers() -> Peers:
    return Peers(silent_s=4.0)


def test_a_backend_is_busy_from_the_first_prompt_on(peers: Peers) -> None:
    peers.hear("x", waiting(500), 10.0)
    peers.hear("x", waiting(500, 300), 10.1)
    assert peers.together(10.2)["a"] == Elsewhere(waiting(500, 300)["a"], 10.0)


@pytest.mark.parametrize("then", [waiting(300, running=1), waiting(300, 700, running=1), waiting(300, 100, running=1)])
def test_a_first_token_is_where_it_begins_the_next_prompt(peers: Peers, then: dict[str, Traffic]) -> None:
    peers.hear("x", waiting(500, 300), 10.0)
    peers.hear("x", then, 10.1)
    assert peers.together(10.2)["a"] == Elsewhere(then["a"], 10.1)


def test_a_repeated_report_does_not_start_again(peers: Peers) -> None:
    peers.hear("x", waiting(500), 10.0)
    peers.hear("x", waiting(500), 11.0)
    peers.hear("x", None, 12.0)
    peers.hear("x", waiting(500, running=1), 13.0)
    assert peers.together(13.0)["a"].busy_since == 10.0


def test_a_backend_that_had_nothing_begins_anew(peers: Peers) -> None:
    peers.hear("x", waiting(500), 10.0)
    peers.hear("x", waiting(running=1), 11.0)
    peers.hear("x", waiting(200, running=1), 12.0)
    assert peers.together(12.0)["a"].busy_since == 12.0
    peers.hear("x", {}, 13.0)
    peers.hear("x", waiting(200), 14.0)
    assert peers.together(14.0)["a"].busy_since == 14.0


def test_of_several_routers_the_last_first_token_counts(peers: Peers) -> None:
    peers.hear("x", waiting(500), 10.0)
    peers.hear("y", waiting(100, 200, running=1), 11.0)
    assert peers.together(11.0)["a"] == Elsewhere(Traffic(1, 3, 800, 800.0), 11.0)


def test_a_router_that_is_silent_has_nothing(peers: Peers) -> None:
    peers.hear("x", waiting(500), 10.0)
    assert "a" in peers.together(13.9)
    assert peers.together(14.1) == {}
    assert len(peers) == 0
