"""A request waits while two backends compute the beginning of its prompt for others, unless it is sooner alone."""

from __future__ import annotations

import random
from typing import Any

from policies.bursts import LEAST_SHARE, LEAST_TOKENS, Underway, held_back
from policies.catalogue import builtin_catalogue
from policies.nouns import BackendView, Capability, Decision, Fetch, Link, PrefillLeg, Request, ServiceClass
from policies.waiting import AWAITS_BLOCKS, is_outage, is_worth_waiting
from tests.policies.builders import a_backend, a_cluster, a_request

DEFAULT = builtin_catalogue().policies["default"]
LONG = a_request(prompt_tokens=8200)
HERE, THERE = Underway("a", 8000, 0.3), Underway("c", 8000, 0.4)


def decided(
    request: Request, *backends: BackendView, underway: tuple[Underway, ...] = (HERE, THERE), **more: Any
) -> Decision:
    view = a_cluster(*backends)
    return held_back(request, view, DEFAULT.decide(request, view, random.Random(1)), underway, **more)


A, B = a_backend("a", queue_s=0.3, running=1), a_backend("b")
C = a_backend("c", queue_s=0.4, running=1)


def test_it_waits_for_the_soonest_backend_that_computes_the_beginning_of_its_prompt() -> None:
    found = decided(LONG, A, B, C)
    assert (found.chosen, found.awaits, found.wait_s) == (None, "a", 0.3)
    assert dict(found.dropped) == dict.fromkeys("abc", AWAITS_BLOCKS)
    assert is_worth_waiting(found)
    assert not is_outage(found)


def test_a_second_backend_computes_the_same_before_any_request_waits() -> None:
    assert decided(LONG, A, B, C, underway=(HERE,)).chosen == "b"


def test_it_does_not_wait_to_go_to_a_backend_that_computes_the_same() -> None:
    assert decided(LONG, a_backend("a", held_tokens=7000), B, C).chosen == "a"


def test_it_does_not_wait_where_there_is_one_candidate() -> None:
    assert decided(LONG, a_backend("a", held_tokens=7000)).chosen == "a"


def test_it_does_not_wait_for_a_beginning_that_is_short_or_held_elsewhere() -> None:
    for tokens in (LEAST_TOKENS - 1, int(LEAST_SHARE * LONG.prompt_tokens) - 1):
        assert decided(LONG, A, B, C, underway=(Underway("a", tokens, 0.1), Underway("c", tokens, 0.1))).chosen == "b"
    assert decided(LONG, A, a_backend("b", held_tokens=7500), C).chosen == "b"


def test_it_does_not_wait_for_what_it_has_much_sooner_by_itself() -> None:
    alone_s, late_s = B.latency.prefill_s(LONG.prompt_tokens, 0), 9.0
    for seconds, chosen in ((2 * alone_s, "b"), (alone_s, None)):
        underway = (Underway("a", 8000, seconds), Underway("c", 8000, late_s))
        assert decided(LONG, A, B, C, underway=underway).chosen == chosen


def test_it_does_not_wait_if_it_keeps_its_target_only_alone() -> None:
    alone_s = B.latency.prefill_s(LONG.prompt_tokens, 0)
    request = a_request(prompt_tokens=8200, promised=ServiceClass("chat", 0, ttft_s=1.1 * alone_s))
    slow = (Underway("a", 8000, 1.2 * alone_s), Underway("c", 8000, 1.3 * alone_s))
    assert decided(request, A, B, C, underway=slow).chosen == "b"
    # too late in either way
    assert decided(request, A, B, C, underway=slow, waited_s=0.2 * alone_s).chosen is None
    soon = (Underway("a", 8000, 0.5 * alone_s), Underway("c", 8000, alone_s))
    assert decided(request, A, B, C, underway=soon).chosen is None


def test_only_backends_that_may_take_it_count() -> None:
    underway = (Underway("a", 8000, 0.3), Underway("b", 8000, 0.2), Underway("c", 8000, 0.1))
    backends = (A, a_backend("b", queue_s=0.3, running=1), a_backend("c", pool="others"), a_backend("d"))
    request = a_request(prompt_tokens=8200, pools=("own",))
    assert decided(request, *backends, underway=underway).awaits == "b"
    assert decided(request, *backends, underway=underway[1:]).chosen == "d"


def test_what_is_not_computed_yet_cannot_be_fetched() -> None:
    link = Link("own", 0.0, 1e-6)
    backend = a_backend("b", link=link)
    view = a_cluster(A, backend, C)
    fetch = Fetch("a", 8000, 0.01, 1.0)
    choice = Decision("b", "default", scores=(("a", 0.5), ("b", 1.0)), predicted_ttft_s=0.02, fetch=fetch)
    found = held_back(LONG, view, choice, (HERE, THERE))
    assert (found.chosen, found.awaits, found.fetch) == (None, "a", None)
    elsewhere = Decision("b", "default", scores=choice.scores, predicted_ttft_s=0.02, fetch=Fetch("d", 8000, 0.01, 1.0))
    assert held_back(LONG, view, elsewhere, (HERE, THERE)) is elsewhere


def test_prompts_that_are_read_whole_or_in_two_legs_do_not_wait() -> None:
    assert (
        decided(a_request(prompt_tokens=8200, needs=frozenset({Capability.PROMPT_LOGPROBS})), *(A, B, C)).awaits is None
    )
    choice = Decision("b", "default", scores=(("a", 0.5), ("b", 1.0)), prefill=PrefillLeg("p", 0.1, 0.2))
    assert held_back(LONG, a_cluster(A, B, C), choice, (HERE, THERE)) is choice
