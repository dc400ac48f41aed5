"""A request is to blame once two backends failed at it of which one serves others; that is remembered for a while."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from policies.poison import PoisonRequests


def serving(*backends: str) -> Callable[[str, float], bool]:
    """These backends serve other requests all the time."""
    return lambda name, _: name in backends


BOTH = serving("a", "b")


def test_one_backend_that_fails_shows_nothing_and_two_blame_the_request() -> None:
    poison = PoisonRequests()
    assert "acme" not in poison.by_tenant
    assert not poison.failed("acme", b"1", "r", "a", 0.0, BOTH)
    assert not poison.failed("acme", b"1", "r", "a", 1.0, BOTH), "the same backend again"
    assert "acme" in poison.by_tenant
    assert not poison.refuses("acme", b"1", 1.0, BOTH)
    assert poison.failed("acme", b"1", "r2", "b", 2.0, BOTH) == {"a": "r", "b": "r2"}
    assert poison.refuses("acme", b"1", 61.9, BOTH)
    poison.check()


def test_backends_that_have_served_nothing_since_may_be_broken() -> None:
    poison = PoisonRequests()
    poison.failed("acme", b"1", "r", "a", 0.0, serving())
    assert not poison.failed("acme", b"1", "r", "b", 1.0, serving())
    third = poison.failed("acme", b"1", "r", "c", 1.0, serving("c"))
    assert not third, "the first ones may be broken, and the third too"
    assert not poison.refuses("acme", b"1", 2.0, serving())
    assert poison.refuses("acme", b"1", 2.0, serving("a")), "it served others since it failed at this one"
    assert poison.refuses("acme", b"1", 60.9, serving())
    assert not poison.refuses("acme", b"1", 61.0, serving()), "this one may try"


def blamed(now: float = 0.0, tenant: str = "acme") -> PoisonRequests:
    poison = PoisonRequests()
    for backend in ("a", "b"):
        poison.failed(tenant, b"1", "r", backend, now, BOTH)
    return poison


def test_other_requests_and_those_of_other_tenants_are_not_blamed() -> None:
    poison = blamed()
    assert not poison.refuses("acme", b"2", 0.0, BOTH)
    assert not poison.refuses("other", b"1", 0.0, BOTH)
    assert "other" not in poison.by_tenant


def test_after_a_while_one_request_goes_on_trial_and_the_others_are_refused() -> None:
    poison = blamed()
    assert not poison.refuses("acme", b"1", 60.0, BOTH), "this one may try"
    assert poison.refuses("acme", b"1", 60.0, BOTH)
    assert poison.failed("acme", b"1", "r3", "a", 61.0, BOTH), "one failure is enough now"
    assert poison.refuses("acme", b"1", 120.9, BOTH)
    assert not poison.refuses("acme", b"1", 121.0, BOTH)


def test_a_trial_without_an_end_is_followed_by_another_one() -> None:
    poison = blamed()
    assert [poison.refuses("acme", b"1", at, BOTH) for at in (60.0, 119.9, 120.0)] == [False, True, False]


def test_a_request_that_is_answered_is_not_to_blame_any_more() -> None:
    poison = blamed()
    poison.passed("acme", b"1")
    assert not poison.refuses("acme", b"1", 1.0, BOTH)
    assert "acme" not in poison.by_tenant
    poison.passed("acme", b"1")
    poison.check()


def test_it_is_forgotten_in_the_end() -> None:
    poison = blamed()
    assert not poison.refuses("acme", b"1", 600.0, BOTH)
    assert "acme" not in poison.by_tenant
    assert not poison.failed("acme", b"1", "r", "c", 600.0, BOTH), "it counts anew"


def test_a_failure_long_ago_does_not_count_for_a_request_that_is_not_to_blame() -> None:
    poison = PoisonRequests()
    poison.failed("acme", b"1", "r", "a", 0.0, BOTH)
    assert not poison.failed("acme", b"1", "r", "b", 60.0, BOTH)
    assert not poison.refuses("acme", b"1", 60.0, BOTH)
    assert poison.failed("acme", b"1", "r", "a", 61.0, BOTH)


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9), st.sampled_from("ab"), st.floats(0.0, 40.0))))
def test_memory_is_bounded_and_counts_agree_whatever_fails(failures: list[tuple[str, int, str, float]]) -> None:
    poison, now = PoisonRequests(remembered_s=60.0, most=5), 0.0
    for tenant, number, backend, wait_s in failures:
        now += wait_s
        poison.failed(tenant, bytes([number]), "r", backend, now, BOTH)
        poison.check()


def lost(poison: PoisonRequests, digest: bytes, *backends: str, at: float = 0.0) -> None:
    for backend in backends:
        poison.failed("acme", digest, f"r{digest.decode()}", backend, at, serving(), is_lost=True)


def test_a_request_at_which_two_backends_were_lost_and_no_other_request_was_lost_at_both_killed_them() -> None:
    poison = PoisonRequests()
    lost(poison, b"1", "a")
    assert not poison.is_suspect("acme", b"1"), "one may fall by itself"
    lost(poison, b"2", "a")
    lost(poison, b"1", "b")
    lost(poison, b"3", "b")
    assert [poison.is_suspect("acme", digest) for digest in (b"1", b"2", b"3", b"4")] == [True, False, False, False]
    assert poison.killed("acme", b"1", 1.0) == {"a": "r1", "b": "r1"}
    assert poison.refuses("acme", b"1", 2.0, serving())
    assert not poison.refuses("acme", b"2", 2.0, serving())
    assert not poison.killed("acme", b"4", 2.0)
    poison.check()


def test_requests_that_were_lost_together_at_both_are_not_blamed() -> None:
    poison = PoisonRequests()
    lost(poison, b"1", "a", "b")
    lost(poison, b"2", "a", "b")
    assert not poison.killed("acme", b"1", 0.0)
    assert not poison.killed("acme", b"2", 0.0)
    assert not poison.refuses("acme", b"1", 0.0, serving())


def test_an_only_backend_has_to_be_lost_three_times() -> None:
    poison = PoisonRequests()
    lost(poison, b"1", "a", "a")
    assert not poison.is_suspect("acme", b"1")
    lost(poison, b"1", "a")
    assert poison.is_suspect("acme", b"1")
    assert poison.killed("acme", b"1", 0.0) == {"a": "r1"}


def test_a_backend_that_failed_otherwise_was_not_lost() -> None:
    poison = PoisonRequests()
    lost(poison, b"1", "a")
    poison.failed("acme", b"1", "r", "b", 0.0, serving())
    assert not poison.is_suspect("acme", b"1")


def test_backends_that_are_lost_at_others_at_other_times_are_broken() -> None:
    poison = PoisonRequests()
    lost(poison, b"2", "b", at=0.0)
    lost(poison, b"1", "a", "b", at=10.0)
    assert not poison.killed("acme", b"1", 10.0)
    assert poison.is_suspect("acme", b"1")


def test_others_that_killed_them_before_say_nothing_of_that() -> None:
    poison = PoisonRequests()
    lost(poison, b"1", "a", "b", at=0.0)
    assert poison.killed("acme", b"1", 0.0)
    lost(poison, b"2", "a", "b", at=10.0)
    assert poison.killed("acme", b"2", 10.0)
