"""A request is to blame for what backends did if nothing else explains that; it is remembered for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.blame import Blame, FailedTry, Harm, Suspect


def serving(*backends: str) -> Callable[[str, float], bool]:
    """These backends serve other requests all the time."""
    return lambda name, _: name in backends


BOTH, NOTHING = serving("a", "b"), serving()
HARMS = [Harm.HUNG, Harm.DIED]


def suspect(digest: str, tenant: str = "acme", shape: str = "usual") -> Suspect:
    return Suspect(tenant, digest.encode(), shape, f"request {digest}")


def failure(
    digest: str, backend: str, at: float, harm: Harm, *, sent_s: float = 0.1, tenant: str = "acme", shape: str = "usual"
) -> FailedTry:
    return FailedTry(at - sent_s, at, backend, suspect(digest, tenant, shape), harm)


def told(
    blame: Blame, *failures: FailedTry, served: Callable[[str, float], bool] = NOTHING, serves_others: bool = False
) -> list[bool]:
    """Record `failures`; of which was the request to blame, once all of the same moment were recorded?"""
    verdicts = []
    for _, together in itertools.groupby(failures, key=lambda each: each.at):
        same = list(together)
        first = [bool(blame.failed(each, served)) for each in same]
        for each, is_to_blame in zip(same, first, strict=True):
            is_harm = each.harm is not Harm.ERRED
            verdicts.append(
                is_to_blame or (is_harm and bool(blame.judge(each.suspect, each.at, lambda *_: serves_others)))
            )
        blame.check()
    return verdicts


def erred(digest: str, *backends: str, at: float = 0.0, tenant: str = "acme") -> Iterable[FailedTry]:
    return [failure(digest, name, at + number, Harm.ERRED, tenant=tenant) for number, name in enumerate(backends)]


@pytest.mark.parametrize(
    ("backends", "served", "is_to_blame"),
    [
        ("a", "ab", False),
        ("aa", "ab", False),
        ("aaa", "ab", True),
        ("ab", "ab", True),
        ("ab", "a", True),
        ("ab", "b", False),
        ("ab", "", False),
        ("abc", "c", False),
        ("aaa", "", False),
    ],
)
def test_errors_of_two_backends_or_three_of_one_blame_the_request_if_a_backend_of_before_serves_others(
    backends: str, served: str, is_to_blame: bool
) -> None:
    blame = Blame()
    assert told(blame, *erred("1", *backends), served=serving(*served))[-1] is is_to_blame
    assert blame.refuses(suspect("1"), 3.0, NOTHING) is is_to_blame


@pytest.mark.parametrize("harm", Harm)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_equal_requests_that_a_backend_has_at_one_time_fail_for_one_reason(count: int, harm: Harm) -> None:
    blame = Blame()
    together = [failure("1", "a", 10.0 + 0.01 * number, harm, sent_s=5.0) for number in range(count)]
    assert told(blame, *together, served=BOTH) == [False] * count
    assert not blame.refuses(suspect("1"), 11.0, BOTH)


@pytest.mark.parametrize("harm", HARMS)
def test_equal_requests_at_two_backends_that_end_together_are_no_cause_of_it(harm: Harm) -> None:
    blame = Blame()
    ended = [failure("1", name, 10.0, harm, sent_s=5.0) for name in "aabb"]
    assert told(blame, *ended) == [False] * 4
    assert not blame.refuses(suspect("1"), 11.0, NOTHING)


def test_it_is_refused_later_once_a_backend_that_failed_serves_others() -> None:
    blame = Blame()
    told(blame, *erred("1", "a", "b"))
    assert not blame.refuses(suspect("1"), 3.0, NOTHING)
    assert blame.refuses(suspect("1"), 4.0, serving("a"))


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("backends", ["ab", "aa"])
def test_harm_done_twice_with_no_other_request_there_is_the_requests(harm: Harm, backends: str) -> None:
    blame = Blame()
    failures = [failure("1", name, float(at), harm) for at, name in enumerate(backends)]
    assert told(blame, *failures) == [False, True]
    assert blame.refuses(suspect("1"), 2.0, NOTHING)
    assert not blame.refuses(suspect("2"), 2.0, NOTHING)
    assert not blame.refuses(suspect("1", "other"), 2.0, NOTHING)


@pytest.mark.parametrize(
    ("backend", "later_s", "is_to_blame"), [("a", 0.01, False), ("a", 0.9, False), ("a", 1.1, True), ("b", 0.01, True)]
)
def test_one_that_was_lost_with_an_idle_connection_and_again_in_that_moment_was_there_at_one_death(
    backend: str, later_s: float, is_to_blame: bool
) -> None:
    first = failure("1", "a", 0.0, Harm.DIED)._replace(when_idle=True)
    again = failure("1", backend, later_s, Harm.DIED, sent_s=0.005)
    assert told(Blame(), first, again) == [False, is_to_blame]
    assert told(Blame(), first, again._replace(when_idle=True)) == [False, True], "each call meets idle connections"


@pytest.mark.parametrize("harm", HARMS)
def test_harm_once_says_nothing(harm: Harm) -> None:
    assert told(Blame(), failure("1", "a", 0.0, harm)) == [False]


def test_requests_that_were_at_both_deaths_are_not_told_apart_and_one_that_was_at_one_is_innocent() -> None:
    at_both = [failure(each, name, at, Harm.DIED) for name, at in (("a", 0.0), ("b", 1.0)) for each in "12"]
    assert not any(told(Blame(), *at_both))
    blame = Blame()
    beside = [
        failure(each, name, at, Harm.DIED) for name, at, some in (("a", 0.0, "123"), ("b", 1.0, "145")) for each in some
    ]
    assert told(blame, *beside) == [False, False, False, True, False, False]
    assert blame.refuses(suspect("1"), 2.0, NOTHING)
    assert not any(blame.refuses(suspect(each), 2.0, NOTHING) for each in "2345")


def test_a_backend_that_does_it_at_other_requests_at_other_times_is_broken() -> None:
    blame = Blame()
    failures = [
        failure("2", "b", 0.0, Harm.DIED),
        *(failure("1", name, at, Harm.DIED) for name, at in (("a", 9), ("b", 10))),
    ]
    assert not any(told(blame, *failures))


def test_those_that_are_to_blame_for_other_deaths_say_nothing_of_that() -> None:
    blame = Blame()
    assert told(blame, *(failure("1", name, at, Harm.DIED) for at, name in enumerate("ab"))) == [False, True]
    assert told(blame, *(failure("2", name, 10.0 + at, Harm.DIED) for at, name in enumerate("ab"))) == [False, True]


def test_the_failures_of_what_was_lost_together_are_returned_and_forgotten() -> None:
    blame = Blame()
    told(blame, failure("1", "a", 0.0, Harm.DIED), failure("2", "a", 0.0, Harm.DIED, tenant="other"))
    blame.failed(failure("1", "b", 5.0, Harm.DIED), NOTHING)
    blamed_for = blame.judge(suspect("1"), 5.0)
    assert sorted((each.backend, each.suspect.tenant) for each in blamed_for) == [
        ("a", "acme"),
        ("a", "other"),
        ("b", "acme"),
    ]
    assert "other" not in blame.by_tenant


@pytest.mark.parametrize("harm", HARMS)
def test_three_requests_of_one_shape_that_do_harm_in_turn_blame_the_shape_but_for_a_trial(harm: Harm) -> None:
    blame = Blame()
    assert told(blame, *(failure(f"{at}", "a", 10.0 * at, harm) for at in range(3))) == [False, False, True]
    assert not blame.refuses(suspect("4"), 20.0, NOTHING), "few of many may do harm: one may try at once"
    assert blame.refuses(suspect("5"), 20.0, NOTHING)
    assert not blame.refuses(suspect("5", shape="another"), 20.0, NOTHING)
    assert not blame.refuses(suspect("5", "other"), 20.0, NOTHING)
    assert told(blame, failure("4", "a", 21.0, harm)) == [True], "one is enough now"
    assert [blame.refuses(suspect("6"), at, NOTHING) for at in (25.9, 26.0, 27.0)] == [True, False, True]
    assert told(blame, failure("6", "a", 27.0, harm)) == [True]
    assert [blame.refuses(suspect("7"), at, NOTHING) for at in (36.9, 37.0)] == [True, False], "twice as long"
    blame.passed(suspect("7"))
    assert not blame.refuses(suspect("8"), 37.0, NOTHING)
    blame.check()


def test_many_of_a_shape_that_are_lost_at_once_or_beside_those_of_others_do_not_blame_it() -> None:
    outage = [
        failure(f"{number}", "abc"[number % 3], 0.1 * (number % 3), Harm.DIED, sent_s=5.0) for number in range(30)
    ]
    outage.sort(key=lambda each: each.at)
    assert not any(told(Blame(), *outage))
    both = [
        failure(f"{name} {at}", "a", 10.0 * at, Harm.DIED, tenant=name) for at in range(4) for name in ("acme", "other")
    ]
    assert not any(told(Blame(), *both))


def test_a_shape_of_which_one_was_answered_between_is_not_to_blame() -> None:
    blame = Blame()
    for at in range(20):
        assert told(blame, failure(f"{at}", "a", 2.0 * at, Harm.DIED)) == [False]
        if at % 2:
            blame.passed(suspect("good"))
    assert not blame.refuses(suspect("x"), 40.0, NOTHING)


def killers(
    count: int, *, answered_between: int = 0, tenant: str = "acme", harm: Harm = Harm.DIED
) -> Iterable[FailedTry | None]:
    """Requests of as many shapes that do harm, each at one backend; None: an answer."""
    for at in range(count):
        yield failure(f"{at}", "a", 5.0 * at, harm, tenant=tenant, shape=f"shape {at}")
        yield from [None] * answered_between


def lived(blame: Blame, events: Iterable[FailedTry | None], *, serves_others: bool = True) -> bool:
    """Is the tenant on probation after these?"""
    verdicts = [False]
    for each in events:
        if each is None:
            blame.passed(suspect("good"))
            blame.check()
        else:
            verdicts += told(blame, each, serves_others=serves_others)
    return any(verdicts)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    ("count", "answered_between", "serves_others", "is_on_probation"),
    [
        (3, 0, True, False),
        (4, 0, True, True),
        (4, 8, True, True),
        # a backend that fails by itself does so at one of many
        (12, 12, True, False),
        # there is no other tenant to protect
        (12, 0, False, False),
    ],
)
def test_a_tenant_of_which_requests_of_several_shapes_do_harm_in_turn_is_on_probation(
    count: int, answered_between: int, serves_others: bool, is_on_probation: bool, harm: Harm
) -> None:
    events = killers(count, answered_between=answered_between, harm=harm)
    assert lived(Blame(), events, serves_others=serves_others) is is_on_probation


def test_harm_at_errors_or_long_ago_or_all_at_once_puts_no_tenant_on_probation() -> None:
    assert not lived(Blame(), killers(12, harm=Harm.ERRED))
    slowly = (failure(f"{at}", "a", 25.0 * at, Harm.DIED, shape=f"{at}") for at in range(12))
    assert not lived(Blame(), slowly)
    at_once = (failure(f"{at}", "ab"[at % 2], 1.0, Harm.DIED, sent_s=0.9, shape=f"{at}") for at in range(12))
    assert not lived(Blame(), at_once)


def test_harm_that_another_tenant_suffers_too_puts_none_on_probation() -> None:
    both = [
        failure(f"{name} {at}", "a", 5.0 * at, Harm.DIED, tenant=name, shape=f"{at % 2}")
        for at in range(8)
        for name in ("acme", "other")
    ]
    assert not any(told(Blame(), *both, serves_others=True))


def test_on_probation_one_request_of_the_tenant_runs_at_a_time_and_one_that_does_harm_ends_that_for_a_while() -> None:
    blame = Blame()
    assert lived(blame, killers(4))
    now, first, second = 15.0, suspect("good", shape="good"), suspect("also", shape="good")
    assert blame.probation_s(suspect("good", "other"), now) == 0.0
    assert blame.probation_s(first, now) == 0.0, "at once: few of many may do harm"
    assert blame.probation_s(second, now + 1.0) == 9.0
    blame.passed(second)
    assert blame.probation_s(second, now + 1.0) == 9.0, "one that ran before says nothing of the trial"
    blame.passed(first)
    assert blame.probation_s(second, now + 1.0) == 0.0
    assert told(blame, failure("x", "a", now + 2.0, Harm.DIED, shape="x")) == [True], "one is enough now"
    assert [blame.probation_s(first, now + at) for at in (2.0, 7.0)] == [5.0, 0.0]
    assert told(blame, failure("y", "a", now + 8.0, Harm.HUNG, shape="y")) == [True]
    assert [blame.probation_s(first, now + at) for at in (8.0, 18.0)] == [10.0, 0.0], "twice as long"
    assert [blame.probation_s(each, now + 80.0) for each in (first, second)] == [0.0, 0.0], "a minute without harm"
    blame.check()


def blamed(tenant: str = "acme") -> Blame:
    blame = Blame()
    assert told(blame, *(failure("1", name, 0.0, Harm.ERRED, tenant=tenant) for name in "ab"), served=BOTH)[-1]
    return blame


def test_after_a_while_one_request_goes_on_trial_and_the_others_are_refused() -> None:
    blame = blamed()
    assert [blame.refuses(suspect("1"), 60.0, BOTH) for _ in range(2)] == [False, True]
    assert told(blame, failure("1", "a", 61.0, Harm.ERRED)) == [True], "one failure is enough now"
    assert [blame.refuses(suspect("1"), at, BOTH) for at in (120.9, 121.0)] == [True, False]


def test_a_trial_without_an_end_is_followed_by_another_one() -> None:
    blame = blamed()
    assert [blame.refuses(suspect("1"), at, BOTH) for at in (60.0, 119.9, 120.0)] == [False, True, False]


def test_a_request_that_is_answered_is_not_to_blame_any_more() -> None:
    blame = blamed()
    blame.passed(suspect("1"))
    assert not blame.refuses(suspect("1"), 1.0, BOTH)
    assert not blame.by_tenant
    blame.passed(suspect("1"))
    blame.check()


def test_it_is_forgotten_in_the_end() -> None:
    blame = blamed()
    assert not blame.refuses(suspect("1"), 600.0, BOTH)
    assert not blame.by_tenant
    assert told(blame, failure("1", "c", 600.0, Harm.ERRED), served=BOTH) == [False], "it counts anew"


def test_a_failure_long_ago_does_not_count_for_a_request_that_is_not_to_blame() -> None:
    blame = Blame()
    verdicts = told(
        blame, *(failure("1", name, at, Harm.ERRED) for name, at in (("a", 0), ("b", 60), ("a", 61))), served=BOTH
    )
    assert verdicts == [False, False, True]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("xyz"),
            st.integers(0, 9),
            st.sampled_from("ab"),
            st.floats(0.0, 40.0),
            st.sampled_from(Harm),
            st.sampled_from(["failed", "judged", "passed", "asked"]),
        )
    )
)
def test_memory_is_bounded_and_counts_agree_whatever_fails(
    steps: list[tuple[str, int, str, float, Harm, str]],
) -> None:
    blame, now = Blame(remembered_s=60.0, most=5), 0.0
    for tenant, number, backend, wait_s, harm, step in steps:
        now += wait_s
        failed = failure(f"{number}", backend, now, harm, tenant=tenant, shape=f"{number % 2}")
        if step in ("failed", "judged"):
            blame.failed(failed, BOTH if number % 2 else NOTHING)
        if step == "judged":
            for each in blame.judge(failed.suspect, now, lambda *_, others=bool(number % 3): others):
                assert each.at <= now
        elif step == "passed":
            blame.passed(failed.suspect)
            assert not blame.refuses(failed.suspect, now, NOTHING)
        elif step == "asked":
            blame.refuses(failed.suspect, now, NOTHING)
            assert 0.0 <= blame.probation_s(failed.suspect, now) <= 60.0
        blame.check()


@given(st.data())
def test_an_innocent_request_is_never_to_blame_for_the_deaths_of_a_killer_that_it_was_not_always_with(
    data: st.DataObject,
) -> None:
    """The killer is at each of several deaths, any other request at one."""
    blame, deaths = Blame(), data.draw(st.integers(2, 4))
    numbers = itertools.count()
    killed, innocent = False, set[str]()
    for death in range(deaths):
        others = [f"{next(numbers)}" for _ in range(data.draw(st.integers(0, 4)))]
        innocent.update(others)
        failures = [
            failure(
                digest,
                f"{death % 3}",
                5.0 * death,
                Harm.DIED,
                sent_s=1.0,
                tenant="other" if digest != "killer" else "acme",
            )
            for digest in data.draw(st.permutations(["killer", *others]))
        ]
        for each, is_to_blame in zip(failures, told(blame, *failures), strict=True):
            assert not is_to_blame or each.suspect.digest == b"killer"
            killed |= is_to_blame
    assert killed
    assert not any(blame.refuses(suspect(each, "other"), 20.0, NOTHING) for each in innocent)
