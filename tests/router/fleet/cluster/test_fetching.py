"""What a cluster knows of the exchange of KV between its backends."""

from __future__ import annotations

import pytest

from backends.base import Fetched, Load
from backends.fake import FakeBackend
from policies.learning.fetch import FIXED_S, TOKEN_S
from policies.nouns import Delta, Fetch, Link
from router.fleet.cluster.cluster import Cluster
from tests.policies.builders import a_request
from tests.router.fleet.cluster.test_cluster import Clock
from tests.router.lenders import Lending

ASKED = a_request(prompt_tokens=10_000)
FETCH = Fetch("b1", 8000, seconds=2.0, computing_s=8.0)
PRIOR = Link("8b", FIXED_S, TOKEN_S)


def a_pair(clock: Clock) -> tuple[Cluster, Lending, Lending]:
    pair = Lending("b0"), Lending("b1")
    return Cluster(pair, clock=clock), *pair


def links(cluster: Cluster, clock: Clock) -> list[Link | None]:
    return [backend.link for backend in cluster.view(clock.now).backends]


def test_only_backends_that_lend_have_a_link() -> None:
    clock = Clock()
    cluster = Cluster([FakeBackend("b0"), Lending("b1"), Lending("b2", kv_group=None)], clock=clock)
    assert cluster.lenders
    assert links(cluster, clock) == [None, PRIOR, None]
    assert not Cluster([FakeBackend("b0")], clock=clock).lenders


def test_what_is_lent_is_told_by_the_backend_that_lends_it() -> None:
    cluster, _, lender = a_pair(Clock())
    assert cluster.lend("b1", 640) == {"from": "b1", "tokens": 640}
    lender.lends = False
    assert cluster.lend("b1", 640) is None
    assert cluster.lend("gone", 640) is None
    assert Cluster([FakeBackend("b0")], clock=Clock()).lend("b0", 640) is None


async def test_a_backend_that_stops_hands_over_to_those_of_its_pool_and_group_with_most_room_first() -> None:
    names = [f"b{number}" for number in range(12)]
    leaver, *heirs = (Lending(name) for name in names)
    for number, heir in enumerate(heirs):
        heir.reported = Load(free_tokens=1000 * number)
    heirs[0].kv_group, heirs[1].pool, heirs[2].lends = "70b", "other", False
    heirs[9].reported = Load(draining=True, free_tokens=99_999)
    cluster = Cluster([leaver, FakeBackend("plain"), *heirs], clock=Clock())
    for name in names[:-1]:
        await cluster.probe(name)
    cluster.drain("b9")
    cluster.hand_over("b0")
    assert [[heir["from"] for heir in each] for each in leaver.heirs] == [["b8", "b7", "b6", "b5", "b4"]]
    cluster.hand_over("plain")
    cluster.hand_over("gone")


def test_links_are_busy_for_as_long_as_a_fetch_was_predicted_to_take() -> None:
    clock = Clock()
    cluster, _, _ = a_pair(clock)
    flight = cluster.begin("b0", ASKED, 2000, fetch=FETCH)
    fetches, lends = links(cluster, clock)
    assert fetches is not None
    assert lends is not None
    assert (fetches.fetches_s, fetches.lends_s) == (2.0, 0.0)
    assert (lends.fetches_s, lends.lends_s) == (0.0, 2.0)
    clock.now += 1.5
    later = links(cluster, clock)[1]
    assert later is not None
    assert later.lends_s == pytest.approx(0.5)
    clock.now += 1.5
    assert links(cluster, clock) == [PRIOR, PRIOR]
    cluster.end(flight)


def test_a_fetch_from_a_backend_that_has_left_counts_where_it_is_fetched() -> None:
    clock = Clock()
    cluster = Cluster([Lending("b0")], clock=clock)
    cluster.end(cluster.begin("b0", ASKED, 2000, fetch=FETCH))
    (link,) = links(cluster, clock)
    assert link is not None
    assert link.fetches_s == 2.0


def test_fetched_tokens_are_new_in_the_cache_and_are_not_computed() -> None:
    clock, fresh = Clock(), []
    for uncached, fetch in ((2000, FETCH), (10_000, None)):
        cluster, _, _ = a_pair(clock)
        cluster.end(cluster.begin("b0", ASKED, uncached, fetch=fetch))
        fresh.append(cluster.view(clock.now).backends[0].fresh_tokens)
    assert fresh[0] == fresh[1]
    with cluster.flying(cluster.begin("b0", ASKED, 2000, fetch=FETCH)):
        assert cluster.view(clock.now).backends[0].waiting_tokens == 2000


def test_the_first_token_is_expected_behind_the_fetch_or_the_queue() -> None:
    cluster, _, _ = a_pair(Clock())
    alone, fetching = cluster.begin("b1", ASKED, 2000), cluster.begin("b0", ASKED, 2000, fetch=FETCH)
    assert fetching.predicted_ttft_s == pytest.approx(alone.predicted_ttft_s + 2.0)
    # the prompts in front of it take longer than the fetch
    long = a_request(prompt_tokens=200_000)
    before = cluster.begin("b0", long, 200_000)
    soon = Fetch("b1", 8000, seconds=1e-6, computing_s=8.0)
    behind, behind_too = cluster.begin("b0", ASKED, 2000), cluster.begin("b0", ASKED, 2000, fetch=soon)
    assert behind_too.predicted_ttft_s >= behind.predicted_ttft_s
    for flight in (alone, fetching, before, behind, behind_too):
        cluster.end(flight)


def test_speed_is_not_learned_from_a_first_token_that_waited_for_a_fetch() -> None:
    clock = Clock()
    cluster, _, _ = a_pair(clock)
    before = cluster.view(clock.now).backends[0].latency
    flight = cluster.begin("b0", ASKED, 2000, fetch=FETCH)
    clock.now += 30.0
    flight.heard(Delta(text="x"), clock.now)
    cluster.end(flight)
    assert cluster.view(clock.now).backends[0].latency == before
    flight = cluster.begin("b0", ASKED, 2000)
    clock.now += 30.0
    flight.heard(Delta(text="x"), clock.now)
    cluster.end(flight)
    assert cluster.view(clock.now).backends[0].latency != before


def test_a_fetch_that_fails_may_take_the_time_of_computing_everything() -> None:
    """A backend that cannot fetch what it was told to computes it: that is not late yet."""
    cluster, _, _ = a_pair(Clock())
    fetching, computing = cluster.begin("b0", ASKED, 2000, fetch=FETCH), cluster.begin("b1", ASKED, 10_000)
    assert fetching.whole_work == computing.work
    assert fetching.work != computing.work
    cluster.end(fetching)
    cluster.end(computing)


def test_the_rate_is_learned_from_reports_together_with_the_pool() -> None:
    clock = Clock()
    cluster, backend, _ = a_pair(clock)
    for number in range(1, 41):
        backend.reported = Load(fetched=Fetched(number, 10_000 * number, 0, 0.1 * number))
        cluster.end(cluster.begin("b0", ASKED, 2000, fetch=FETCH))
    clock.now += 10.0
    for link in links(cluster, clock):
        assert link is not None
        assert link.fixed_s + 10_000 * link.token_s == pytest.approx(0.1, rel=0.05)


def test_sums_of_a_new_process_begin_at_zero() -> None:
    clock = Clock()
    cluster, backend, _ = a_pair(clock)
    for fetched in (Fetched(5, 50_000, 0, 1.0), Fetched(5, 50_000, 0, 1.0), Fetched(1, 10_000, 0, 0.2)):
        backend.reported = Load(fetched=fetched)
        cluster.end(cluster.begin("b0", ASKED, 2000))
    clock.now += 10.0
    (link, _) = links(cluster, clock)
    assert link is not None
    # two observations of 0.2 s each, and nothing negative
    assert link.fixed_s + 10_000 * link.token_s == pytest.approx(0.2, rel=0.15)


def test_a_backend_that_is_gone_lends_no_more() -> None:
    cluster, _, _ = a_pair(Clock())
    for name in ("b0", "b1"):
        cluster._forget(cluster._members[name])
    assert not cluster.lenders
    cluster.check()
