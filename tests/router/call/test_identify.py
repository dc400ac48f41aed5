from __future__ import annotations

import pytest
from msgspec.structs import replace

from policies.errors import Unauthenticated, Unavailable
from policies.nouns import Tenant
from policies.rules import Facts, classify
from policies.sla.config import Config
from policies.sla.parse import parse
from router.call.identify import MOST_BOUND, Identity, identity_of, key_in
from router.shared.keys.file import FileKeys
from router.shared.keys.ring import KeyRing
from tests.router.parts import KEY, a_config, a_tenant


def identify(key: str | None, config: Config, issued: KeyRing | None = None) -> Tenant:
    return identity_of(key, config, issued or KeyRing(None, clock=lambda: 0.0)).tenant


def test_a_key_leads_to_its_tenant() -> None:
    assert identify(KEY, a_config()).name == "acme"


@pytest.mark.parametrize("key", [None, "", "wrong", "ключ", b"\xff".decode(errors="surrogateescape")])
def test_no_key_or_a_wrong_one_is_refused_with_a_hint(key: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        identify(key, a_config())
    assert caught.value.hint


def test_a_wrong_key_is_not_anonymous_where_tenants_have_keys() -> None:
    guest = a_tenant("guest", key=None)
    config = a_config(a_tenant(), guest, anonymous=guest)
    assert identify(None, config) is guest
    with pytest.raises(Unauthenticated):
        identify("wrong", config)


def test_any_key_will_do_if_no_tenant_has_one() -> None:
    guest = a_tenant("guest", key=None)
    assert identify("whatever", a_config(guest, anonymous=guest)) is guest


def test_what_was_issued_once_is_not_anonymous_once_it_is_revoked() -> None:
    guest = a_tenant("guest", key=None)
    with pytest.raises(Unauthenticated):
        identify("pm_revoked", a_config(guest, anonymous=guest))


def test_while_the_issued_keys_are_unknown_clients_are_asked_to_retry() -> None:
    never_read = KeyRing(FileKeys("/nowhere"), clock=lambda: 0.0)
    with pytest.raises(Unavailable) as caught:
        identify("pm_perhaps", a_config(), never_read)
    assert caught.value.retry_after_s
    assert identify(KEY, a_config(), never_read).name == "acme"
    with pytest.raises(Unauthenticated):
        identify("not one of those", a_config(), never_read)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"authorization": "Basic k"}, None),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer ", "x-api-key": "k"}, "k"),
        ({}, None),
    ],
)
def test_keys_come_in_two_headers(headers: dict[str, str], key: str | None) -> None:
    assert key_in(headers) == key


def test_an_identity_keeps_the_ruling_of_a_file_where_it_depends_on_the_model_alone() -> None:
    acme, rules = a_tenant(), "classes: {chat: {}, rag: {}}\nrules: [{when: {prompt_tokens: '>= 1k'}, class: rag}, %s]"
    by_model, by_length = parse("classes: {chat: {}}\nrules: [{class: chat}]"), parse(rules % "{class: chat}")
    identity, facts = Identity(acme), Facts(acme, "m", prompt_tokens=2000, max_new_tokens=1, uncached_tokens=1)
    assert identity.ruled(facts, by_model) == classify(facts, by_model)
    assert identity.rulings == {"m": (by_model, classify(facts, by_model))}
    assert identity.ruled(facts, by_length).service_class.name == "rag"
    assert identity.rulings == {"m": (by_length, None)}
    for number in range(MOST_BOUND + 1):
        identity.ruled(replace(facts, model=f"model-{number}"), by_model)
    assert len(identity.rulings) <= MOST_BOUND


def test_an_identity_keeps_the_limits_of_a_bounded_number_of_models() -> None:
    identity = Identity(a_tenant())
    for number in range(MOST_BOUND + 1):
        assert identity.bound(f"model-{number}") is identity.bound(f"model-{number}")
    assert identity.known_bounds.keys() == {f"model-{MOST_BOUND}"}
