from __future__ import annotations

import pytest

from policies.nouns import Limits, Tenant
from policies.quota.end_users import OTHERS, EndUsers
from tests.router.shared.store.parts import HandClock

ACME = Tenant("acme", "acme", user_limits=Limits(requests_per_minute=1))


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_users_are_counted_by_name_where_users_have_limits(clock: HandClock) -> None:
    users = EndUsers(clock)
    assert users.counted(ACME, "ann") == "ann"
    assert users.counted(ACME, None) is None
    assert users.counted(Tenant("labs", "labs"), "ann") is None


def test_users_beyond_the_most_are_counted_together_until_the_next_day(clock: HandClock) -> None:
    users = EndUsers(clock, most=2)
    assert [users.counted(ACME, name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]
    clock.pass_s(86_400)
    assert users.counted(ACME, "c") == "c"


def test_tenants_do_not_take_each_others_places(clock: HandClock) -> None:
    users = EndUsers(clock, most=1)
    other = Tenant("labs", "labs", user_limits=ACME.user_limits)
    assert (users.counted(ACME, "a"), users.counted(other, "b")) == ("a", "b")


def test_long_names_are_cut_and_stay_apart(clock: HandClock) -> None:
    users = EndUsers(clock)
    first, second = (users.counted(ACME, "x" * 5000 + end) for end in "ab")
    assert first is not None
    assert second is not None
    assert first != second
    assert len(first) == len(second) == 128
    assert users.counted(ACME, "x" * 200 + "\ud800")
