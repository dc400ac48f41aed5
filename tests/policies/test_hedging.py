"""How many second requests a tenant may send in a class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.hedging import _MOST_SAVERS, MOST_SAVED, HedgeBudget
from policies.nouns import ServiceClass

CHAT = ServiceClass("chat", 0, hedge_quantile=0.95, hedge_budget=0.05)
OTHER = ServiceClass("other", 1, hedge_quantile=0.95, hedge_budget=0.05)


def earned(budget: HedgeBudget, requests: int, service_class: ServiceClass = CHAT, tenant: str = "acme") -> HedgeBudget:
    for _ in range(requests):
        budget.earn(tenant, service_class)
    return budget


def test_twenty_requests_earn_one_second_request_at_five_percent() -> None:
    budget = earned(HedgeBudget(), 19)
    assert not budget.allows("acme", CHAT)
    assert earned(budget, 1).allows("acme", CHAT)
    budget.spend("acme", CHAT)
    assert not budget.allows("acme", CHAT)


def test_tenants_and_classes_have_budgets_of_their_own() -> None:
    budget = earned(HedgeBudget(), 20)
    assert not budget.allows("acme", OTHER)
    assert not budget.allows("labs", CHAT)


def test_little_is_saved() -> None:
    budget = earned(HedgeBudget(), 10_000)
    for _ in range(int(MOST_SAVED)):
        budget.spend("acme", CHAT)
    assert not budget.allows("acme", CHAT)


def test_what_is_not_allowed_cannot_be_spent() -> None:
    with pytest.raises(AssertionError, match="acme has none in chat"):
        HedgeBudget().spend("acme", CHAT)


def test_tenants_without_requests_are_forgotten() -> None:
    budget = earned(HedgeBudget(), 20)
    for number in range(_MOST_SAVERS):
        budget.earn(f"t{number}", CHAT)
    assert not budget.allows("acme", CHAT)
    budget.check()


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]))
def test_second_requests_are_never_more_than_their_share(wishes: list[bool], share: float) -> None:
    budget, service_class = HedgeBudget(), ServiceClass("chat", 0, hedge_quantile=0.5, hedge_budget=share)
    spent = 0
    for requests, wishes_one in enumerate(wishes, start=1):
        budget.earn("acme", service_class)
        if wishes_one and budget.allows("acme", service_class):
            budget.spend("acme", service_class)
            spent += 1
        assert spent <= share * requests + 1e-6
        budget.check()
