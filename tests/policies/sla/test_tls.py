"""The sections `tls`: ports, pools and the store."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.parse import parse
from tls.settings import TlsSettings

PIN = "sha256:" + "ab" * 32


def server(tls: str) -> Config:
    return parse(f"server: {{tls: {tls}}}")


def mistakes(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    return tuple(problem.partition(": ")[2] for problem in raised.value.problems)


def test_without_a_section_every_port_is_plain() -> None:
    config = parse("")
    assert config.server.tls == {}
    assert config.pools["own"].tls is None
    assert config.store.tls is None


def test_one_pair_serves_all_ports() -> None:
    tls = server("{cert: /tls.crt, key: /tls.key}").server.tls
    assert tls == dict.fromkeys(("http", "grpc", "admin", "picker"), TlsSettings("/tls.crt", "/tls.key"))


def test_a_port_may_differ_or_stay_plain() -> None:
    ports = f"{{admin: {{client_ca: /ca.crt, pins: '{PIN}', min_version: 1.3}}, picker: off}}"
    tls = server(f"{{cert: /tls.crt, key: /tls.key, ports: {ports}}}").server.tls
    assert tls["admin"] == TlsSettings("/tls.crt", "/tls.key", "/ca.crt", frozenset({"ab" * 32}), "1.3")
    assert tls["http"] == TlsSettings("/tls.crt", "/tls.key")
    assert "picker" not in tls


def test_each_port_may_have_a_pair_of_its_own() -> None:
    tls = server("{ports: {http: {cert: /a, key: /b}, grpc: off, admin: {cert: /c, key: /d}, picker: off}}").server.tls
    assert {port: settings.cert for port, settings in tls.items()} == {"http": "/a", "admin": "/c"}


@pytest.mark.parametrize(
    ("tls", "mistake"),
    [
        ("{cert: /tls.crt}", "server.tls: has no key (write key: and the path of a file in PEM)"),
        ("{client_ca: /ca.crt}", "server.tls: has no cert (write cert: and the path of a file in PEM)"),
        ("{cert: /c, key: /k, pins: abc}", "server.tls.pins: must be sha256: and 64 hexadecimal digits, not 'abc'"),
        (
            f"{{cert: /c, key: /k, pins: '{PIN}'}}",
            "server.tls: has pins and no client_ca (pins are for clients with a certificate of that CA)",
        ),
        ("{cert: /c, key: /k, min_version: 1.1}", "server.tls.min_version: must be 1.2 or 1.3, not '1.1'"),
        (
            "{cert: /c, key: /k, ports: {htp: off}}",
            "server.tls.ports.htp: there is no 'htp' here (did you mean 'http'?)",
        ),
        ("{cert: /c, key: /k, ca: /ca}", "server.tls.ca: there is no 'ca' here"),
    ],
)
def test_mistakes_of_ports(tls: str, mistake: str) -> None:
    assert any(found.startswith(mistake) for found in mistakes(f"server: {{tls: {tls}}}"))


def test_a_pool_has_the_authority_of_its_backends_and_perhaps_our_certificate() -> None:
    tls = f"{{ca: /ca.crt, cert: /c, key: /k, pins: ['{PIN}'], name: shards.internal}}"
    config = parse(f"pools: {{own: {{at: ['10.0.0.5:7001'], tls: {tls}}}}}")
    assert config.pools["own"].tls == TlsSettings("/c", "/k", "/ca.crt", frozenset({"ab" * 32}), name="shards.internal")


def test_backends_that_are_found_are_reached_over_https_if_the_pool_has_tls() -> None:
    text = "pools: {a: {kind: openai_compatible, at: 'dns://engines:8000', model: m, tls: {}}}"
    assert parse(text).pools["a"].reachable("10.0.0.5:8000") == "https://10.0.0.5:8000"
    plain = parse(text.replace(", tls: {}", ""))
    assert plain.pools["a"].reachable("10.0.0.5:8000") == "http://10.0.0.5:8000"


@pytest.mark.parametrize(
    ("pool", "mistake"),
    [
        ("{at: ['h:1'], tls: {cert: /c}}", "pools.a.tls: has no key"),
        ("{local: 1, tls: {ca: /c}}", "pools.a.tls: is for backends on other machines"),
        (
            "{kind: openai_compatible, at: ['http://h:1'], model: m, tls: {ca: /c}}",
            "pools.a.tls: is not used at http://h:1 (write https://)",
        ),
    ],
)
def test_mistakes_of_pools(pool: str, mistake: str) -> None:
    (found,) = mistakes(f"pools: {{a: {pool}}}")
    assert found.startswith(mistake)


def test_the_store_may_have_certificates_if_its_address_is_one_with_tls() -> None:
    tls = "tls: {ca: /ca.crt, cert: /c, key: /k}"
    store = parse(f"store: {{redis: 'rediss://there', {tls}}}").store
    assert store.tls == TlsSettings("/c", "/k", "/ca.crt")
    (found,) = mistakes(f"store: {{redis: 'redis://there', {tls}}}")
    assert found.startswith("store.tls: is for rediss:// addresses alone (write rediss://")
