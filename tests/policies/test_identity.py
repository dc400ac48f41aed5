"""Rules from claims to tenants and roles."""

from __future__ import annotations

from typing import Any

import pytest

from policies.identity import ClaimRule, FromClaim, grant_of, role_of, values_of
from policies.roles import OperatorRole


@pytest.mark.parametrize(
    ("claims", "name", "values"),
    [
        ({"groups": ["a", "b"]}, "groups", {"a", "b"}),
        ({"group": "a b"}, "group", {"a b"}),
        ({"scope": "openid ml"}, "scope", {"openid", "ml"}),
        ({"realm_access": {"roles": ["a"]}}, "realm_access.roles", {"a"}),
        ({"https://example.com/roles": ["a"]}, "https://example.com/roles", {"a"}),
        ({"realm_access.roles": "first", "realm_access": {"roles": "second"}}, "realm_access.roles", {"first"}),
        ({"email_verified": True}, "email_verified", {"true"}),
        ({"number": 7}, "number", {"7"}),
        ({"groups": ["a", {"b": 1}, ["c"], None, 2]}, "groups", {"a", "2"}),
        ({"groups": {"a": 1}}, "groups", set()),
        ({"groups": None}, "groups", set()),
        ({"a": "x"}, "a.b", set()),
        ({}, "groups", set()),
    ],
)
def test_a_claim_has_texts(claims: dict[str, Any], name: str, values: set[str]) -> None:
    assert values_of(claims, name) == values


def test_the_first_rule_that_matches_wins() -> None:
    rules = (
        ClaimRule(claims={"groups": frozenset({"a"})}, tenant="one"),
        ClaimRule(claims={"groups": frozenset({"a", "b"})}, tenant="two"),
        ClaimRule(issuers=frozenset({"other"}), tenant="three"),
    )
    grants = [
        grant_of(rules, issuer, {"groups": [group]}) for issuer, group in (("i", "a"), ("i", "b"), ("other", "c"))
    ]
    assert [grant and grant.tenant for grant in grants] == ["one", "two", "three"]
    assert grant_of(rules, "i", {"groups": ["c"]}) is None


def test_every_claim_of_a_condition_must_match() -> None:
    rule = ClaimRule(claims={"groups": frozenset({"a"}), "email_verified": frozenset({"true"})}, tenant="one")
    assert rule.matches("i", {"groups": "a", "email_verified": True})
    assert not rule.matches("i", {"groups": "a", "email_verified": False})
    assert not rule.matches("i", {"groups": "a"})


@pytest.mark.parametrize("value", [None, "", "  ", ["a", "b"], [], {"a": "b"}])
def test_a_rule_that_takes_a_value_needs_a_single_one(value: Any) -> None:
    rules = (ClaimRule(tenant="one", user=FromClaim("sub")), ClaimRule(tenant="two"))
    found = grant_of(rules, "i", {"sub": value})
    assert found is not None
    assert (found.tenant, found.user) == ("two", None)


def test_values_come_from_claims() -> None:
    rule = ClaimRule(tenant=FromClaim("org.id"), team=FromClaim("team"), user=FromClaim("sub"))
    found = grant_of((rule,), "i", {"org": {"id": 7}, "team": ["search"], "sub": "ann"})
    assert found is not None
    assert (found.tenant, found.team, found.user) == ("7", "search", "ann")


def test_roles_and_tenants_are_looked_for_apart() -> None:
    rules = (ClaimRule(tenant="one"), ClaimRule(claims={"groups": frozenset({"ops"})}, role=OperatorRole.OPERATOR))
    assert role_of(rules, "i", {"groups": "ops"}) is OperatorRole.OPERATOR
    assert role_of(rules, "i", {}) is None
    grant = grant_of(rules, "i", {"groups": "ops"})
    assert grant is not None
    assert grant.tenant == "one"
