"""Conversations that begin together: the default policy spreads them, however uneven those before them were."""

from __future__ import annotations

import random

import pytest

from backends.base import Load
from backends.fake import FakeBackend
from policies.catalogue import builtin_catalogue
from policies.nouns import Delta
from router.fleet.cluster.cluster import Cluster
from tests.policies.builders import a_request
from tests.router.parts import MODEL

CACHE, FIRST, LATER = 19_200, 400, 110
"""Tokens of a cache, of a conversation's first prompt, and of what each of its seven later prompts adds."""


def computed(cluster: Cluster, name: str, tokens: int) -> None:
    """A prompt of so many uncached tokens is computed and answered at once."""
    with cluster.flying(cluster.begin(name, a_request(prompt_tokens=tokens), tokens)) as flight:
        flight.heard(Delta(text="x"), 0.1)


def turns(cluster: Cluster, places: list[str]) -> None:
    """Every conversation goes on where it is."""
    for _ in range(7):
        for name in places:
            computed(cluster, name, LATER)


@pytest.mark.parametrize("uneven", range(8, 13))
async def test_a_wave_is_spread_though_the_one_before_it_was_not(uneven: int) -> None:
    caches = Load(running=0, waiting=0, total_tokens=CACHE)
    backends = [FakeBackend(name, "own", models=frozenset({MODEL}), reported=caches) for name in ("a", "b")]
    cluster = Cluster(backends, clock=lambda: 0.0)
    for backend in backends:
        await cluster.probe(backend.name)
    policy, rng = builtin_catalogue().policies["default"], random.Random(0)
    before = ["a"] * uneven + ["b"] * (20 - uneven)
    rng.shuffle(before)
    for name in before:
        computed(cluster, name, FIRST)
    turns(cluster, before)
    for _ in range(3):
        places = []
        for _ in range(20):
            view = cluster.view(0.0, {}, 0, float(FIRST))
            chosen = policy.decide(a_request(prompt_tokens=FIRST, model=MODEL), view, rng).chosen
            assert chosen is not None
            computed(cluster, chosen, FIRST)
            places.append(chosen)
        turns(cluster, places)
        # 15 of them would fill a cache
        assert 6 <= places.count("a") <= 14
