"""The certificates of a router, and the ports that take keys without."""

from __future__ import annotations

import pytest

from policies.sla.parse import parse
from router.start.tls import pool_certificates, port_certificates, ports_in_clear, store_certificates

KEYS = f"tenants: {{acme: {{keys: ['sha256:{'ab' * 32}']}}}}\n"
TLS = "tls: {cert: /c, key: /k, ports: {grpc: off}}"


def test_without_sections_there_are_none() -> None:
    config = parse("")
    assert port_certificates(config, lambda _: None) == {}
    assert pool_certificates(config) == {}
    assert store_certificates(config) is None


def test_a_port_that_is_off_needs_no_certificate() -> None:
    config = parse("server: {http: '127.0.0.1:1', grpc: off, tls: {cert: /c, key: /k, ports: {http: off}}}")
    assert port_certificates(config, lambda _: None) == {}


TOKENS = """
tenants: {acme: {}}
identity:
  issuers: {corp: {issuer: 'https://login.example.com', audience: pointsman}}
  rules: """


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        (KEYS, ()),
        ("server: {http: '0.0.0.0:80'}", ()),
        (f"{KEYS}server: {{http: '0.0.0.0:80'}}", ("http 0.0.0.0:80",)),
        (f"{KEYS}server: {{http: '10.0.0.1:80', grpc: '0.0.0.0:81', {TLS}}}", ("grpc 0.0.0.0:81",)),
        (
            f"{KEYS}server: {{admin: '0.0.0.0:82', admin_keys: ['sha256:{'cd' * 32}']}}",
            ("admin 0.0.0.0:82",),
        ),
        (f"server: {{http: '[::]:80', keys_file: /keys}}\n{KEYS}", ("http [::]:80",)),
        (f"{TOKENS}[{{tenant: acme}}]\nserver: {{http: '0.0.0.0:80', admin: '127.0.0.1:82'}}", ("http 0.0.0.0:80",)),
        (f"{TOKENS}[{{role: viewer}}]\nserver: {{admin: '0.0.0.0:82'}}", ("admin 0.0.0.0:82",)),
    ],
)
def test_keys_cross_the_network_in_clear_where_others_reach_a_plain_port(text: str, found: tuple[str, ...]) -> None:
    assert ports_in_clear(parse(text)) == found
