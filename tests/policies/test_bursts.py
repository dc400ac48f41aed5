"""A request waits while a backend computes the beginning of its prompt for another one, unless it is sooner alone."""

from __future__ import annotations

import random
from typing import Any

from policies.bursts import LEAST_TOKENS, Underway, held_back
from policies.catalogue import builtin_catalogue
from policies.nouns import BackendView, Capability, Decision, Fetch, Link, PrefillLeg, Request, ServiceClass
from policies.waiting import AWAITS_BLOCKS, is_outage, is_worth_waiting
from tests.policies.builders import a_backend, a_cluster, a_request

DEFAULT = builtin_catalogue().policies["default"]
LONG = a_request(prompt_tokens=8200)
HERE = Underway("a", 8000, 0.3)


def decided(
    request: Request, *backends: BackendView, underway: tuple[Underway, ...] = (HERE,), **more: Any
) -> Decision:
    view = a_cluster(*backends)
    return held_back(request, view, DEFAULT.decide(request, view, random.Random(1)), underway, **more)


A, B = a_backend("a", queue_s=0.3, running=1), a_backend("b")


def test_it_waits_for_the_backend_that_computes_the_beginning_of_its_prompt() -> None:
    found = decided(LONG, A, B)
    assert (found.chosen, found.awaits, found.wait_s) == (None, "a", 0.3)
    assert dict(found.dropped) == {"a": AWAITS_BLOCKS, "b": AWAITS_BLOCKS}
    assert is_worth_waiting(found)
    assert not is_outage(found)


def test_it_waits_as_well_if_it_would_go_there() -> None:
    found = decided(LONG, a_backend("a", held_tokens=7000), B)
    assert (found.chosen, found.awaits) == (None, "a")


def test_it_does_not_wait_where_there_is_one_candidate() -> None:
    assert decided(LONG, a_backend("a", held_tokens=7000)).chosen == "a"


def test_it_does_not_wait_for_a_beginning_that_is_short_or_held_elsewhere() -> None:
    assert decided(LONG, A, B, underway=(Underway("a", LEAST_TOKENS - 1, 0.1),)).chosen == "b"
    assert decided(LONG, A, a_backend("b", held_tokens=7500)).chosen == "b"


def test_it_does_not_wait_for_what_it_has_much_sooner_by_itself() -> None:
    alone_s = B.latency.prefill_s(LONG.prompt_tokens, 0)
    assert decided(LONG, A, B, underway=(Underway("a", 8000, 2 * alone_s),)).chosen == "b"
    assert decided(LONG, A, B, underway=(Underway("a", 8000, alone_s),)).chosen is None


def test_it_does_not_wait_if_it_keeps_its_target_only_alone() -> None:
    alone_s = B.latency.prefill_s(LONG.prompt_tokens, 0)
    request = a_request(prompt_tokens=8200, promised=ServiceClass("chat", 0, ttft_s=1.1 * alone_s))
    slow = (Underway("a", 8000, 1.2 * alone_s),)
    assert decided(request, A, B, underway=slow).chosen == "b"
    # too late in either way
    assert decided(request, A, B, underway=slow, waited_s=0.2 * alone_s).chosen is None
    assert decided(request, A, B, underway=(Underway("a", 8000, 0.5 * alone_s),)).chosen is None


def test_it_waits_for_the_soonest_that_may_take_it() -> None:
    underway = (Underway("a", 8000, 0.3), Underway("b", 8000, 0.2), Underway("c", 8000, 0.1))
    backends = (A, a_backend("b"), a_backend("c", pool="others"), a_backend("d"))
    request = a_request(prompt_tokens=8200, pools=("own",))
    assert decided(request, *backends, underway=underway).awaits == "b"
    assert decided(request, *backends, underway=underway[2:]).chosen is not None


def test_one_that_is_not_patient_any_more_waits_only_for_two() -> None:
    assert decided(LONG, A, B, is_patient=False).chosen == "b"
    assert decided(LONG, A, B, underway=(HERE, Underway("b", 8000, 0.4)), is_patient=False).awaits == "a"


def test_what_is_not_computed_yet_cannot_be_fetched() -> None:
    link = Link("own", 0.0, 1e-6)
    backend = a_backend("b", link=link)
    view = a_cluster(A, backend)
    fetch = Fetch("a", 8000, 0.01, 1.0)
    choice = Decision("b", "default", scores=(("a", 0.5), ("b", 1.0)), predicted_ttft_s=0.02, fetch=fetch)
    found = held_back(LONG, view, choice, (HERE,))
    assert (found.chosen, found.awaits, found.fetch) == (None, "a", None)
    elsewhere = Decision("b", "default", scores=choice.scores, predicted_ttft_s=0.02, fetch=Fetch("c", 8000, 0.01, 1.0))
    assert held_back(LONG, view, elsewhere, (HERE,)) is elsewhere


def test_prompts_that_are_read_whole_or_in_two_legs_do_not_wait() -> None:
    assert decided(a_request(prompt_tokens=8200, needs=frozenset({Capability.PROMPT_LOGPROBS})), *(A, B)).awaits is None
    choice = Decision("b", "default", scores=(("a", 0.5), ("b", 1.0)), prefill=PrefillLeg("p", 0.1, 0.2))
    assert held_back(LONG, a_cluster(A, B), choice, (HERE,)) is choice
