"""What a backend fetches of a prompt's KV from another one: the offer, and whether it is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.fetch import LEAST_TOKENS, MOST_HOLDERS, with_fetch, with_offers
from policies.learning.cost import Latency
from policies.nouns import BackendView, Capability, Decision, Fetch, Link
from policies.predict import FETCH_WORTH, FIRST, cost_of, least_cost, marginal_cost
from tests.policies.builders import a_backend, a_cluster, a_request

SPEED = Latency(fixed_s=0.1, token_s=1e-3, pair_s=0.0, step_s=0.02, sequence_s=1e-3, context_s=0.0)
LINK = Link("8b", fixed_s=0.02, token_s=1e-5)
ASKED = a_request(prompt_tokens=8000, expected_new_tokens=100, may_fetch=True)
EMPTY = a_backend("empty", latency=SPEED, held_tokens=0, link=LINK)
HOLDER = a_backend("holder", latency=SPEED, held_tokens=6400, link=LINK)


def offer_to(backend: BackendView, *others: BackendView, **request: object) -> Fetch | None:
    view = with_offers(replace(ASKED, **request), a_cluster(backend, *others))
    return next(each for each in view.backends if each.name == backend.name).offer


def test_a_backend_may_fetch_what_another_of_its_group_holds() -> None:
    offer = offer_to(EMPTY, HOLDER)
    assert offer is not None
    assert (offer.backend, offer.tokens) == ("holder", 6400)
    assert offer.seconds == pytest.approx(0.02 + 6400e-5)
    assert offer.computing_s == pytest.approx(6.4)


def test_only_what_it_does_not_hold_itself_is_fetched() -> None:
    offer = offer_to(replace(EMPTY, held_tokens=6000), HOLDER)
    assert offer is not None
    assert offer.tokens == 400
    assert offer_to(replace(EMPTY, held_tokens=6400 - LEAST_TOKENS + 1), HOLDER) is None
    assert offer_to(HOLDER, EMPTY) is None


def test_one_token_of_the_prompt_is_always_computed() -> None:
    offer = offer_to(EMPTY, replace(HOLDER, held_tokens=8000))
    assert offer is not None
    assert offer.tokens == 7999


@pytest.mark.parametrize(
    "why",
    [
        {"link": None},
        {"link": Link("70b", 0.02, 1e-5)},
        {"healthy": False},
        {"models": frozenset({"other"})},
        {"held_tokens": None},
    ],
    ids=lambda why: next(iter(why)),
)
def test_a_backend_that_cannot_lend_it_is_not_asked(why: dict[str, object]) -> None:
    assert offer_to(EMPTY, replace(HOLDER, **why)) is None


def test_a_backend_that_leaves_or_is_full_still_lends() -> None:
    assert offer_to(EMPTY, replace(HOLDER, draining=True, running=64, max_requests=64)) is not None


@pytest.mark.parametrize(
    "why", [{"may_fetch": False}, {"needs": frozenset({Capability.PROMPT_LOGPROBS})}, {"prompt_tokens": 20}], ids=str
)
def test_some_prompts_are_not_fetched(why: dict[str, object]) -> None:
    assert offer_to(EMPTY, HOLDER, **why) is None


def test_a_backend_without_a_link_gets_no_offer() -> None:
    assert offer_to(replace(EMPTY, link=None), HOLDER) is None


def test_a_view_without_holders_stays_the_same() -> None:
    view = a_cluster(EMPTY, replace(EMPTY, name="empty too"))
    assert with_offers(ASKED, view) is view


def test_the_holder_with_a_free_link_lends() -> None:
    busy = replace(HOLDER, name="busy", link=replace(LINK, lends_s=2.0))
    offer = offer_to(EMPTY, busy, HOLDER)
    assert offer is not None
    assert offer.backend == "holder"


def test_a_fetch_begins_when_both_links_are_free() -> None:
    lends, fetches = replace(LINK, lends_s=2.0), replace(LINK, fetches_s=3.0)
    for own, other, wait_s in ((LINK, lends, 2.0), (fetches, LINK, 3.0), (fetches, lends, 3.0)):
        offer = offer_to(replace(EMPTY, link=own), replace(HOLDER, link=other))
        assert offer is not None
        assert offer.seconds == pytest.approx(wait_s + 0.084)


def test_less_may_be_fetched_sooner() -> None:
    """The greatest holder is not asked where waiting for its link takes longer than computing the difference."""
    greater = replace(HOLDER, name="greater", held_tokens=6464, link=replace(LINK, lends_s=1.0))
    offer = offer_to(EMPTY, greater, HOLDER)
    assert offer is not None
    assert offer.backend == "holder"


def test_of_many_holders_those_with_most_are_compared() -> None:
    some = [replace(HOLDER, name=f"h{at}", held_tokens=6400 + 64 * at) for at in range(3 * MOST_HOLDERS)]
    offer = offer_to(EMPTY, *some)
    assert offer is not None
    assert offer.backend == some[-1].name


def test_the_fetch_is_worth_it_where_computing_takes_longer() -> None:
    view = with_offers(ASKED, a_cluster(EMPTY, HOLDER))
    decision = with_fetch(ASKED, view, Decision("empty", "default", predicted_ttft_s=8.1))
    assert decision.fetch is not None
    assert decision.fetch.backend == "holder"
    assert decision.fetch.saved == pytest.approx(FIRST * (6.4 - 0.084))
    assert decision.predicted_ttft_s == pytest.approx(0.084 + 0.1 + 1.6)


def test_it_is_computed_where_the_link_is_slower() -> None:
    slow = replace(LINK, token_s=2e-3)
    view = with_offers(ASKED, a_cluster(replace(EMPTY, link=slow), HOLDER))
    decision = Decision("empty", "default", predicted_ttft_s=8.1)
    assert with_fetch(ASKED, view, decision) is decision


def test_a_slow_link_is_used_where_computing_would_stall_many() -> None:
    """Fetching takes this request longer than computing, and the thirty that run there nothing."""
    slow = replace(LINK, token_s=2e-3)
    view = with_offers(ASKED, a_cluster(replace(EMPTY, link=slow, running=30), HOLDER))
    assert with_fetch(ASKED, view, Decision("empty", "default")).fetch is not None


def test_a_fetch_passes_while_the_request_waits_in_the_queue() -> None:
    queued = replace(EMPTY, queue_s=1.0, link=replace(LINK, token_s=1e-4))
    view = with_offers(ASKED, a_cluster(queued, HOLDER))
    decision = with_fetch(ASKED, view, Decision("empty", "default"))
    assert decision.predicted_ttft_s == pytest.approx(1.0 + 0.1 + 1.6)
    assert least_cost(ASKED, view.backends[0])[0].fetch == 0.0


def test_a_refusal_and_a_holder_fetch_nothing() -> None:
    view = with_offers(ASKED, a_cluster(EMPTY, HOLDER))
    for decision in (Decision(None, "default"), Decision("holder", "default")):
        assert with_fetch(ASKED, view, decision) is decision


def test_the_choice_is_between_computing_fetching_and_going_to_the_holder() -> None:
    """The holder while it is idle; a free backend that fetches when the holder is busy; and one that computes when the
    link is busy as well."""

    def best(*backends: BackendView) -> str:
        view = with_offers(ASKED, a_cluster(*backends))
        column = marginal_cost()(ASKED, view.backends)
        chosen = view.backends[max(range(len(column)), key=lambda at: column[at] or 0.0)]
        return f"{chosen.name} {'computes' if least_cost(ASKED, chosen)[1] is None else 'fetches'}"

    assert best(EMPTY, HOLDER) == "holder computes"
    busy = replace(HOLDER, running=8, queue_s=4.0)
    assert best(EMPTY, busy) == "empty fetches"
    assert best(replace(EMPTY, link=None), replace(busy, queue_s=0.1, running=1)) == "holder computes"
    stuck = replace(busy, queue_s=20.0, link=replace(LINK, lends_s=20.0))
    assert best(EMPTY, stuck) == "empty computes"


def test_fetched_kv_evicts_as_much_as_computed_kv() -> None:
    full = replace(EMPTY, cache_tokens=10_000, fresh_tokens=10_000.0)
    offer = offer_to(full, HOLDER)
    assert cost_of(ASKED, full, offer).eviction == pytest.approx(cost_of(ASKED, full).eviction)


def test_the_parts_of_a_fetch_are_its_own() -> None:
    busy = replace(EMPTY, running=4, waiting=2)
    offer = offer_to(busy, HOLDER)
    assert offer is not None
    computed, fetched = cost_of(ASKED, busy), cost_of(ASKED, busy, offer)
    assert (computed.fetch, fetched.fetch) == (0.0, pytest.approx(0.084))
    assert fetched.prefill == pytest.approx(0.1 + 1.6)
    # the others wait for the rest of the prompt alone
    assert fetched.slowdown == pytest.approx(4 * 1.6)
    assert fetched.delay == pytest.approx(2 * 1.6)
    assert fetched.decode == computed.decode


@given(
    own=st.integers(0, 20_000),
    held=st.integers(0, 20_000),
    token_s=st.floats(1e-9, 1e-1),
    lends_s=st.floats(0.0, 100.0),
    running=st.integers(0, 100),
    tokens=st.integers(1, 20_000),
)
def test_a_fetch_always_saves_what_it_says(
    own: int, held: int, token_s: float, lends_s: float, running: int, tokens: int
) -> None:
    request = replace(ASKED, prompt_tokens=tokens)
    link = replace(LINK, token_s=token_s, lends_s=lends_s)
    empty = replace(EMPTY, held_tokens=min(own, tokens), running=running, link=link)
    view = with_offers(request, a_cluster(empty, replace(HOLDER, held_tokens=min(held, tokens), link=link)))
    cost, fetch = least_cost(request, view.backends[0])
    alone = cost_of(request, empty)
    if fetch is None:
        assert cost == alone
    else:
        assert 0 < fetch.tokens < tokens - empty.held_tokens
        assert fetch.saved == pytest.approx(alone.total - cost.total)
        assert fetch.saved > FETCH_WORTH * alone.first * fetch.computing_s
