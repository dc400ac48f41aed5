import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.health import Health, HealthRules

RULES = HealthRules(failures=3, retry_s=1.0, longest_retry_s=8.0, slow_start_s=10.0, window_s=10.0, least_requests=10)


def a_health(rules: HealthRules = RULES, *, is_cold: bool = False) -> Health:
    return Health(rules, random.Random(7), is_cold=is_cold)


def a_well_one(rules: HealthRules = RULES) -> Health:
    health = a_health(rules)
    health.probe_passed(0.0)
    return health


def test_no_backend_is_well_before_its_first_probe() -> None:
    health = a_health()
    assert not health.may_serve
    health.probe_passed(0.0)
    assert (health.is_well, health.share(0.0)) == (True, 1.0)


def test_one_that_joins_warm_ones_begins_slowly() -> None:
    health = a_health(is_cold=True)
    health.probe_passed(5.0)
    assert [health.share(5.0 + past) for past in (0.0, 5.0, 9.0, 10.0)] == [0.1, 0.5, 0.9, 1.0]


def test_without_a_slow_start_the_share_is_whole_at_once() -> None:
    health = a_health(replace(RULES, slow_start_s=0.0), is_cold=True)
    health.probe_passed(5.0)
    assert health.share(5.0) == 1.0


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    health = a_well_one()
    for _ in range(2):
        health.request_failed(1.0, "x")
        health.request_failed(1.0, "x")
        health.request_ended(1.0)
    assert health.is_well
    for _ in range(3):
        health.request_failed(1.0, "refused")
    assert not health.may_serve
    assert health.reason == "refused"


def test_a_success_that_is_counted_later_still_lies_between_the_failures_around_it() -> None:
    health = a_well_one()
    for _ in range(2):
        health.request_failed(1.0, "x")
        health.request_failed(1.0, "x")
        health.ended.append((1.0, "acme"))
    assert health.is_well
    assert health.served_since(0.5)
    assert not health.ended, "it was counted before anything was read"
    for _ in range(3):
        health.request_failed(1.0, "refused")
    assert not health.is_well


def test_successes_of_before_an_outage_say_nothing_after_it() -> None:
    health = a_well_one()
    health.ended.append((1.0, "acme"))
    for _ in range(3):
        health.probe_failed(2.0, "no answer")
    assert not health.served_since(0.0)
    health.check()


def test_probes_that_pass_do_not_excuse_requests_that_fail() -> None:
    health = a_well_one()
    for now in (1.0, 2.0, 3.0):
        health.request_failed(now, "x")
        health.probe_passed(now)
    assert not health.may_serve


def test_a_high_share_of_failures_opens_it_although_they_are_never_in_a_row() -> None:
    health = a_well_one()
    for number in range(RULES.least_requests - 1):
        if number % 2:
            health.request_ended(1.0)
        else:
            health.request_failed(1.0, "x")
    assert health.is_well, "so few say nothing"
    health.request_failed(1.0, "x")
    assert not health.may_serve


def test_failures_are_forgotten_with_the_window() -> None:
    health = a_well_one()
    for _ in range(4):
        health.request_failed(0.5, "x")
        health.request_ended(0.5)
    for _ in range(10):
        health.request_ended(12.0)
        health.request_failed(12.0, "x") if _ < 4 else health.request_ended(12.0)
    assert health.is_well
    health.check()


def test_requests_that_failed_have_to_be_waited_out_and_then_one_is_on_trial() -> None:
    health = a_well_one()
    for _ in range(3):
        health.request_failed(1.0, "x")
    health.probe_passed(1.2)
    assert not health.may_serve, "half of retry_s at the least"
    health.probe_passed(2.0)
    assert (health.is_on_trial, health.is_well) == (True, False)
    health.answered(2.5)
    assert (health.is_on_trial, health.is_well) == (False, True)
    assert health.share(2.5) == 0.1


def test_time_alone_brings_no_backend_back() -> None:
    health = a_well_one()
    for _ in range(3):
        health.request_failed(1.0, "x")
    health.probe_failed(50.0, "away")
    assert not health.may_serve


def test_probes_that_failed_need_no_more_than_one_that_passes() -> None:
    health = a_well_one()
    for now in (1.0, 2.0, 3.0):
        health.probe_failed(now, "away")
    assert not health.may_serve
    health.probe_passed(3.0)
    assert health.is_on_trial


def test_each_trial_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    health, now, pauses = a_well_one(), 0.0, []
    for _ in range(3):
        health.request_failed(now, "x")
    for _ in range(7):
        opened_at = now
        while not health.is_on_trial:
            now += 0.01
            health.probe_passed(now)
        pauses.append(now - opened_at)
        health.request_failed(now, "x")
    steps = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert all(step / 2 <= pause <= step + 0.02 for step, pause in zip(steps, pauses, strict=True)), pauses
    assert len(set(pauses)) == 7, "routers do not come back in step"


def test_after_a_trial_that_succeeds_the_pause_is_short_again() -> None:
    health = a_well_one()
    for now in (0.0, 10.0, 20.0):
        for _ in range(3):
            health.request_failed(now, "x")
        health.probe_passed(now + 1.0)
        assert health.is_on_trial
        health.request_ended(now + 1.0)
        assert health.is_well


@pytest.mark.parametrize("event", ["probe_failed", "request_failed"])
def test_what_happens_to_one_that_is_ill_changes_nothing(event: str) -> None:
    health = a_health()
    for _ in range(10):
        getattr(health, event)(0.0, "x")
    health.probe_passed(0.0)
    assert health.is_well


def test_errors_that_a_request_may_have_caused_say_nothing_while_other_tenants_are_served() -> None:
    health = a_well_one()
    health.request_ended(1.0, "good")
    for _ in range(50):
        health.request_failed(2.0, "answered 500", "bad", may_be_request=True)
    assert health.is_well
    for _ in range(2):
        health.request_failed(2.0, "answered 500", "good", may_be_request=True)
    assert health.is_well
    health.request_failed(2.0, "answered 500", "good", may_be_request=True)
    assert not health.is_well, "two tenants are hardly to blame at once"


def test_errors_of_the_only_tenant_say_nothing_by_themselves_and_those_without_a_doubt_always_count() -> None:
    only, gone = a_well_one(), a_well_one()
    gone.request_ended(1.0, "good")
    for number in range(50):
        only.request_failed(2.0, "answered 500", "acme", f"r{number}", may_be_request=True)
    for _ in range(3):
        gone.request_failed(2.0, "it cannot be reached", "bad")
    assert only.is_well
    assert not gone.is_well


def test_errors_at_requests_that_another_backend_answers_count_unless_other_tenants_are_served_here() -> None:
    alone, beside = a_well_one(), a_well_one()
    beside.request_ended(1.9, "good")
    for number in range(3):
        assert alone.is_well
        for health in (alone, beside):
            health.request_failed(2.0, "answered 500", "acme", f"r{number}", may_be_request=True)
            health.answered_elsewhere(2.1, "acme", f"r{number}")
            health.answered_elsewhere(2.1, "acme", f"r{number}")
            health.check()
    assert not alone.is_well
    assert beside.is_well
    long_after = 2.0 + RULES.window_s
    for number in range(3):
        beside.request_failed(long_after, "answered 500", "acme", f"s{number}", may_be_request=True)
        beside.answered_elsewhere(long_after, "acme", f"s{number}")
    assert not beside.is_well, "what was served before the window is no sign of health"


def on_trial() -> Health:
    health = a_well_one()
    for now in (1.0, 2.0, 3.0):
        health.probe_failed(now, "away")
    health.probe_passed(3.0)
    assert health.is_on_trial
    return health


def test_errors_of_one_tenant_end_no_trial_and_those_of_two_do() -> None:
    health = on_trial()
    for number in range(50):
        health.request_failed(4.0, "answered 500", "bad", f"r{number}", may_be_request=True)
    assert health.is_on_trial, "the next request may be another tenant's"
    health.request_failed(4.0, "answered 500", "good", "g", may_be_request=True)
    assert not health.may_serve


def test_a_trial_request_that_another_backend_answers_ends_the_trial() -> None:
    health = on_trial()
    health.request_failed(4.0, "answered 500", "acme", "r", may_be_request=True)
    health.answered_elsewhere(4.1, "acme", "r")
    assert not health.may_serve


def test_of_the_tenants_that_were_served_the_last_64_are_known() -> None:
    health = a_well_one()
    for number in range(200):
        health.request_ended(0.01 * number, f"tenant {number}")
    health.request_ended(3.0, "tenant 150")
    assert list(health._served) == [f"tenant {number}" for number in (*range(136, 150), *range(151, 200), 150)]


def test_a_failure_that_was_its_requests_fault_is_taken_back() -> None:
    health = a_well_one()
    for number in range(20):
        health.request_failed(1.0, "answered 500", "acme", f"r{number}", may_be_request=True)
        health.acquit("acme", f"r{number}")
        health.check()
    assert health.is_well
    health.acquit("acme", "r0")
    for _ in range(2):
        health.request_failed(1.0, "x")
    assert health.is_well
    health.request_failed(1.0, "x")
    assert not health.is_well


def test_only_what_the_request_itself_added_is_taken_back() -> None:
    health = a_well_one()
    health.request_ended(1.0, "good")
    for _ in range(2):
        health.request_failed(1.0, "the connection was reset", "good", "lost")
    health.request_failed(1.0, "answered 500", "bad", "poison", may_be_request=True)
    health.acquit("bad", "poison")
    health.acquit("bad", "lost")
    assert health.is_well, "the error of the bad request was not counted"
    health.request_failed(1.0, "the connection was reset", "good", "lost")
    assert not health.is_well, "three requests were lost, and none of them was taken back"


def test_a_failure_is_taken_back_from_the_slice_of_the_window_that_counted_it() -> None:
    rules = replace(RULES, failures=100)
    health = a_well_one(rules)
    health.request_failed(1.0, "answered 500", "acme", "r", may_be_request=True)
    for _ in range(5):
        health.request_ended(6.0, "acme")
    for number in range(3):
        health.request_failed(6.0, "answered 500", "acme", f"s{number}")
    health.acquit("acme", "r")
    health.check()
    for number in (3, 4):
        assert health.is_well
        health.request_failed(11.5, "answered 500", "acme", f"s{number}")
    assert not health.is_well, "five of the ten requests of the last ten seconds failed"


events = st.sampled_from(["probe_passed", "probe_failed", "answered", "request_ended", "request_failed"])


@given(st.lists(st.tuples(events, st.floats(0.0, 5.0)), max_size=80))
def test_it_is_always_in_one_state_and_its_share_never_shrinks_while_it_is_well(steps: list[tuple[str, float]]) -> None:
    health, now, share = a_health(is_cold=True), 0.0, 0.0
    for event, after_s in steps:
        was_well = health.is_well
        now += after_s
        getattr(health, event)(now, *(["x"] if event.endswith("failed") else []))
        health.check()
        assert health.may_serve or health.reason
        share = share if was_well and health.is_well else 0.0
        assert 0.1 <= health.share(now) <= 1.0
        assert not health.is_well or health.share(now) >= share
        share = health.share(now)


def test_many_errors_of_requests_of_two_tenants_are_the_backends_own() -> None:
    health = a_well_one()
    health.request_ended(1.0, "a")
    health.request_ended(1.0, "b")
    for number in range(3):
        assert health.is_well
        health.request_failed(2.0, "lost", "a", f"a{number}", may_be_request=True)
        health.request_failed(2.0, "lost", "b", f"b{number}", may_be_request=True)
    assert not health.is_well


def test_what_ends_well_between_them_shows_that_it_is_not() -> None:
    health = a_well_one()
    health.request_ended(1.0, "a")
    health.request_ended(1.0, "b")
    for _ in range(20):
        for tenant in "aabb":
            health.request_failed(2.0, "lost", tenant, may_be_request=True)
        health.request_ended(2.0, "c")
        health.request_ended(2.0, "d")
    assert health.is_well
