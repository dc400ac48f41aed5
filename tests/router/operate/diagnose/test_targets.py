"""Missed targets: the seconds of each cause, which together are the time that was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from policies.learning.cost import Latency
from router.operate.diagnose.logged import LoggedRequest
from router.operate.diagnose.nouns import Diagnosis, MissedTarget
from router.operate.diagnose.targets import missed_targets
from router.operate.diagnose.text import as_text
from tests.router.operate.diagnose.scene import a_request, a_visit

SPEED = Latency(fixed_s=0.0, token_s=1e-3, pair_s=0.0, step_s=0.01, sequence_s=0.001, context_s=0.0)
"""A thousand tokens of prompts a second; a step of decoding takes 10 ms and 1 ms for each sequence."""


def late(**fields: Any) -> LoggedRequest:
    """A request for 1,000 tokens that should have its first token in half a second."""
    return a_request(**{"at_s": 0.0, "prompt_tokens": 1000, "ttft_target_s": 0.5, **fields})


def causes(found: MissedTarget) -> dict[str, float]:
    """The causes that took any time."""
    return {cause.cause: pytest.approx(cause.seconds) for cause in found.causes if cause.seconds > 1e-6}


def test_a_target_that_is_met_has_no_causes() -> None:
    (found,) = missed_targets([late(visits=(a_visit(0.0),))])
    assert (found.target, found.requests, found.missed, found.seconds) == ("TTFT", 1, 0, 0.0)


def test_requests_without_a_target_have_none_to_miss() -> None:
    assert missed_targets([late(ttft_target_s=None, visits=(a_visit(0.0),))]) == ()


def test_a_first_token_waits_for_the_router_for_failed_backends_and_for_its_prefill() -> None:
    visits = (
        a_visit(2.0, "b0", first_s=None, last_s=None, speed=SPEED),
        a_visit(3.0, "b1", first_s=4.0, last_s=5.0, speed=SPEED),
    )
    (found,) = missed_targets([late(visits=visits, ttft_s=4.0, ended_s=5.0)])
    assert causes(found) == {"router_queue": 2.0, "retries": 1.0, "prefill": 1.0}
    (queue, *_) = found.causes
    assert [(example.request, example.backend, example.amount) for example in queue.examples] == [("r0", "b1", 2.0)]


def test_prompts_that_were_there_are_the_backends_queue_and_later_ones_interfere() -> None:
    before = a_request(0.0, prompt_tokens=1000, visits=(a_visit(0.0, first_s=1.0, speed=SPEED),))
    own = late(at_s=0.5, visits=(a_visit(0.5, first_s=2.5, last_s=3.0, speed=SPEED),), ended_s=3.0)
    after = a_request(1.5, prompt_tokens=500, visits=(a_visit(1.5, first_s=2.5, last_s=2.5, speed=SPEED),))
    (found,) = missed_targets([before, own, after])
    # half of the first prompt was computed when it came; one sequence decodes beside it for half a second
    parts = causes(found)
    assert parts["backend_queue"] == 0.5
    assert parts["prefill"] == 1.0
    assert parts["interference"] == 0.5
    assert found.seconds == pytest.approx(2.0)


def test_waiting_for_a_place_is_the_backends_queue_too() -> None:
    running = a_request(0.0, visits=(a_visit(0.0, first_s=0.0, last_s=3.0, max_requests=1, speed=SPEED),), ended_s=3.0)
    own = late(at_s=1.0, visits=(a_visit(1.0, first_s=4.0, max_requests=1, speed=SPEED),), ended_s=5.0)
    (found,) = missed_targets([running, own])
    assert causes(found) == {"backend_queue": 2.0, "prefill": 1.0}


def test_what_was_cached_in_fact_is_not_computed_again() -> None:
    slow = a_visit(0.0, first_s=1.0, speed=SPEED)
    (found,) = missed_targets([late(cached_tokens=600, visits=(slow,))])
    assert causes(found) == {"prefill": 0.4, "slow_backend": 0.6}


def test_tokens_that_a_cache_would_have_had_count_apart() -> None:
    visit = a_visit(0.0, first_s=1.0, speed=SPEED)
    (found,) = missed_targets([late(cached_tokens=100, visits=(visit,))], {"r0": 700})
    assert causes(found) == {"prefill": 0.3, "lost_tokens": 0.6, "slow_backend": 0.1}


def test_a_backend_that_is_known_to_be_slower_than_its_pool_is_a_slow_backend() -> None:
    slow = a_visit(0.0, first_s=1.0, speed=SPEED, pace=(4.0, 4.0))
    (found,) = missed_targets([late(visits=(slow,))])
    assert causes(found) == {"prefill": 0.25, "slow_backend": 0.75}


def test_tokens_come_late_by_decoding_alone_by_others_and_by_a_slow_backend() -> None:
    visit = a_visit(0.0, first_s=1.0, last_s=3.0, speed=SPEED)
    own = late(visits=(visit,), new_tokens=51, tpot_target_s=0.02, ttft_target_s=None, ended_s=3.0)
    # it decodes all the time beside it, and 300 tokens of a prompt are computed meanwhile
    beside = a_request(0.0, visits=(a_visit(0.0, first_s=1.0, last_s=3.0, speed=SPEED),), ended_s=3.0)
    prompt = a_request(2.0, prompt_tokens=300, visits=(a_visit(2.0, first_s=2.5, last_s=2.5, speed=SPEED),))
    (found,) = missed_targets([own, beside, prompt])
    assert found.target == "TPOT"
    # 50 steps of 11 ms, and 1 ms more for the other sequence
    assert causes(found) == {"decode": 0.55, "interference": 0.35, "slow_backend": 1.1}


def test_a_log_of_an_older_version_gives_what_the_prediction_gave() -> None:
    visit = a_visit(0.0, first_s=2.0, speed=None, predicted_ttft_s=1.5, queue_s=0.5)
    (found,) = missed_targets([late(visits=(visit,))])
    assert causes(found) == {"prefill": 1.0, "slow_backend": 1.0}


def test_a_request_without_any_backend_is_in_no_table() -> None:
    assert missed_targets([late(), late(at_s=1.0)]) == ()


SECONDS = some.floats(0, 5)


@given(
    rows=some.lists(
        some.tuples(
            SECONDS, SECONDS, SECONDS, SECONDS, some.integers(1, 5000), some.booleans(), some.floats(0.1, 4), SECONDS
        ),
        max_size=20,
    )
)
def test_the_causes_are_never_negative_and_sum_up_to_the_measured_seconds(rows: list[tuple[Any, ...]]) -> None:
    requests = [
        late(
            at_s=at_s,
            prompt_tokens=tokens,
            tpot_target_s=0.001,
            ttft_target_s=0.2,
            visits=(
                *((a_visit(at_s, "b1", first_s=None, last_s=None, speed=SPEED),) if has_failed else ()),
                a_visit(
                    at_s + queue_s,
                    first_s=at_s + queue_s + wait_s,
                    last_s=at_s + queue_s + wait_s + decode_s,
                    speed=SPEED if tokens % 3 else None,
                    pace=(pace, pace),
                ),
            ),
            ended_s=at_s + queue_s + wait_s + decode_s + end_s,
            ttft_s=queue_s + wait_s,
        )
        for at_s, queue_s, wait_s, decode_s, tokens, has_failed, pace, end_s in rows
    ]
    for found in missed_targets(requests):
        assert all(cause.seconds >= 0.0 for cause in found.causes)
        assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.seconds)
        assert sum(cause.requests for cause in found.causes) == found.missed
        whole = "TTFT" if found.target == "TTFT" else "TPOT"
        if whole == "TTFT":
            waited = [request.ttft_s or 0.0 for request in requests]
            assert found.seconds == pytest.approx(sum(seconds for seconds in waited if seconds > 0.2))


def test_each_target_counts_the_requests_that_it_cannot_judge_and_says_why() -> None:
    judged = late(ttft_s=2.0, ttft_target_s=1.0)
    silent, aimless = late(ttft_s=None, ttft_target_s=1.0), late(ttft_s=2.0, ttft_target_s=None)
    (found,) = missed_targets([judged, silent, aimless, aimless])
    assert found.requests + sum(found.unjudged.values()) == 4
    assert found.unjudged == {"have no target": 2, "have no first token": 1}
    diagnosis = Diagnosis(4, 0.0, 1.0, (), None, (found,))
    assert "3 more cannot be judged: 2 have no target, 1 have no first token" in as_text(diagnosis)
