"""The section `identity`, and the operators' keys with roles."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.identity import FromClaim, Issuer
from policies.roles import Operator, OperatorRole
from policies.sla.changes import fixed_changes
from policies.sla.parse import parse
from tls.settings import TlsSettings

CORP = "corp: {issuer: 'https://login.example.com', audience: pointsman}"
TENANTS = """
tenants: {acme: {teams: {search: {}}, models: [m], classes: [chat]}}
classes: {chat: {}, batch: {}}
rules: [{class: chat}]
"""
HASH = "sha256:" + "a" * 64


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return "\n".join(caught.value.problems)


def with_rule(rule: str, issuer: str = CORP) -> str:
    return f"{TENANTS}identity:\n  issuers: {{{issuer}}}\n  rules: [{rule}]\n"


def test_a_file_without_the_section_trusts_no_issuer() -> None:
    assert parse("").identity is None


def test_an_issuer_has_sound_defaults() -> None:
    identity = parse(with_rule("{tenant: acme}")).identity
    assert identity is not None
    assert identity.issuers["corp"] == Issuer("corp", "https://login.example.com", frozenset({"pointsman"}))
    assert (identity.issuers["corp"].skew_s, identity.issuers["corp"].keep_s) == (60.0, 86400.0)
    assert identity.issuers["corp"].algorithms == {"RS256", "PS256", "ES256", "EdDSA"}
    assert not identity.gives_roles


def test_an_issuer_can_be_set_up_in_full() -> None:
    issuer = (
        "corp: {issuer: 'http://127.0.0.1:9000/realms/x', audience: [a, b], jwks: keys.json, algorithms: ES384,"
        " skew: 5s, keep: 1h, tls: {ca: ca.crt}}"
    )
    identity = parse(with_rule("{tenant: acme}", issuer)).identity
    assert identity is not None
    assert identity.issuers["corp"] == Issuer(
        "corp",
        "http://127.0.0.1:9000/realms/x",
        frozenset({"a", "b"}),
        jwks="keys.json",
        algorithms=frozenset({"ES384"}),
        skew_s=5.0,
        keep_s=3600.0,
        tls=TlsSettings(ca="ca.crt"),
    )


def test_a_rule_gives_tenant_team_user_classes_models_and_role() -> None:
    rule = (
        "{when: {issuer: corp, claims: {groups: [x, y]}}, tenant: acme, team: search, user: {claim: sub},"
        " classes: chat, models: m, role: operator}"
    )
    identity = parse(with_rule(rule)).identity
    assert identity is not None
    [found] = identity.rules
    assert (found.tenant, found.team, found.user) == ("acme", "search", FromClaim("sub"))
    assert (found.issuers, found.claims) == ({"corp"}, {"groups": {"x", "y"}})
    assert (found.classes, found.models, found.role) == ({"chat"}, {"m"}, OperatorRole.OPERATOR)
    assert identity.gives_roles


def test_a_tenant_needs_no_key_where_tokens_lead_to_it() -> None:
    assert "acme" in parse(with_rule("{tenant: acme}")).tenants
    assert "has no keys, so no request can belong to it" in problems("tenants: {acme: {}}")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{tenant: acm}", "identity.rules[0].tenant: there is no tenant 'acm' (did you mean 'acme'?)"),
        ("{tenant: acme, team: serch}", "rules[0].team: there is no team 'serch' (did you mean 'search'?)"),
        ("{tenant: acme, classes: chta}", "rules[0].classes: there is no class 'chta' (did you mean 'chat'?)"),
        ("{tenant: acme, classes: batch}", "rules[0].classes: has batch, which the tenant may not use"),
        ("{tenant: acme, models: [m, n]}", "rules[0].models: has n, which the tenant may not use (it may use m)"),
        ("{tenant: acme, user: {clam: sub}}", "there is no 'clam' here (did you mean 'claim'?)"),
        ("{tenant: acme, when: {issuer: crop}}", "there is no issuer 'crop' (did you mean 'corp'?)"),
        ("{tenant: acme, when: {claim: {a: b}}}", "there is no 'claim' here (did you mean 'claims'?)"),
        ("{when: {issuer: corp}}", "rules[0]: gives nothing (write a tenant, a role, or both)"),
        ("{role: viewer, team: search}", "rules[0].team: needs a tenant beside it"),
        ("{role: veiwer}", "rules[0].role: there is no role 'veiwer' (did you mean 'viewer'?)"),
        ("{tenant: acme}, {tenant: acme}", "rules[1]: is never reached: the rule before it gives every token a tenant"),
        ("{role: viewer}, {role: owner}", "rules[1]: is never reached: the rule before it gives every token a role"),
        ("", "rules: is an empty list"),
    ],
)
def test_a_mistake_in_a_rule_is_named(rule: str, words: str) -> None:
    assert words in problems(with_rule(rule))


def test_a_rule_without_condition_that_takes_claims_may_be_followed_by_others() -> None:
    parse(with_rule("{tenant: {claim: org}}, {tenant: acme}"))
    parse(with_rule("{role: viewer}, {tenant: acme}"))


@pytest.mark.parametrize(
    ("issuer", "words"),
    [
        ("corp: {audience: a}", "issuers.corp: has no issuer"),
        ("corp: {issuer: 'https://x'}", "issuers.corp: has no audience"),
        ("corp: {issuer: 'http://login.example.com', audience: a}", "must begin with https://"),
        ("corp: {issuer: login.example.com, audience: a}", "must be a URL such as https://login.example.com"),
        ("corp: {issuer: 'https://u@x', audience: a}", "must be a URL such as https://login.example.com"),
        ("corp: {issuer: 'https://x:0', audience: a}", "must be a URL such as https://login.example.com"),
        ("corp: {issuer: 'https://x:port', audience: a}", "must be a URL such as https://login.example.com"),
        ("corp: {issuer: 'https://x', audience: a, jwks: 'http://x/keys'}", "corp.jwks: must begin with https://"),
        ("corp: {issuer: 'https://x', audience: a, algorithms: HS256}", "HS256 is never allowed"),
        ("corp: {issuer: 'https://x', audience: a, algorithms: none}", "none is never allowed"),
        ("corp: {issuer: 'https://x', audience: a, algorithms: RS255}", "there is no algorithm 'RS255'"),
        ("corp: {issuer: 'https://x', audience: a, skew: 1h}", "corp.skew: must be at most 10m"),
        ("corp: {issuer: 'https://x', audience: a, tls: {cert: a.crt}}", "corp.tls: has no key"),
        (
            "corp: {issuer: 'https://x', audience: a}, b: {issuer: 'https://x', audience: c}",
            "issuers.b: is the issuer 'corp' again",
        ),
        ("", "has no issuer (write a name of yours"),
    ],
)
def test_a_mistake_in_an_issuer_is_named(issuer: str, words: str) -> None:
    assert words in problems(with_rule("{tenant: acme}", issuer))


def test_operators_keys_may_have_roles_and_names() -> None:
    keys = f"[{{key: '{HASH}', role: viewer, name: vera}}, 'sha256:{'b' * 64}', {{key: 'sha256:{'c' * 64}'}}]"
    server = parse(f"server: {{admin_keys: {keys}}}").server
    assert len(server.admin_key_hashes) == 3
    assert server.operators == {
        "a" * 64: Operator("vera", OperatorRole.VIEWER),
        "c" * 64: Operator("c" * 12, OperatorRole.OWNER),
    }


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (f"[{{key: '{HASH}', role: admin}}]", "admin_keys[0].role: there is no role 'admin' (known: viewer, operator"),
        ("[{role: viewer}]", "admin_keys[0]: has no key"),
        (f"[{{key: '{HASH}', roel: viewer}}]", "there is no 'roel' here (did you mean 'role'?)"),
        (f"['{HASH}', {{key: '{HASH}', role: viewer}}]", "admin_keys[1]: the same key is here twice"),
        ("[plain]", "a key must not stand in plain text"),
    ],
)
def test_a_mistake_in_an_operators_key_is_named(keys: str, words: str) -> None:
    assert words in problems(f"server: {{admin_keys: {keys}}}")


def test_a_port_that_others_can_reach_needs_keys_or_roles() -> None:
    open_port = "server: {admin: '0.0.0.0:8082'}\n"
    assert "server.admin: can be reached from other machines but has no keys" in problems(open_port)
    assert "has no keys" in problems(open_port + with_rule("{tenant: acme}"))
    parse(open_port + with_rule("{role: viewer}"))


def test_the_last_way_in_for_operators_cannot_be_removed_while_the_router_runs() -> None:
    before, text = parse(with_rule("{role: viewer}")), with_rule("{tenant: acme}")
    [line] = fixed_changes(before, parse(text), text=text, source="sla.yaml")
    assert "cannot all be removed while the router runs" in line
    text = with_rule("{role: owner}")
    assert fixed_changes(before, parse(text), text=text, source="sla.yaml") == ()
