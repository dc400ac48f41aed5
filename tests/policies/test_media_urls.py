"""Which URLs of images and the like engines may be sent."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.media_urls import _ipv4_in_parts, why_refused


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "http://10.0.0.7/a.png",
        "https://images.example.com:8443/a?b=c#d",
        "http://[2001:db8::1]/a.png",
        "data:image/png;base64,AAAA",
        "DATA:,x",
    ],
)
def test_urls_of_other_machines_and_bytes_may_be_sent(url: str) -> None:
    assert why_refused(url, None) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/a",
        "http://LOCALHOST.:8082/metrics",
        "http://x.localhost/",
        "http://127.0.0.1:8082/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://user:word@127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[fe80::1%25eth0]/",
        "http://metadata.google.internal/computeMetadata/v1/",
    ],
)
def test_this_machine_and_link_local_addresses_are_refused_in_any_notation(url: str) -> None:
    assert why_refused(url, None) is not None


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://example.com/a",
        "gopher://example.com/",
        "a.png",
        "",
        "http://",
        "http:///a.png",
        "http://exa mple.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com/\n",
        "http://[::1/",
    ],
)
def test_other_schemes_and_urls_that_parsers_read_differently_are_refused(url: str) -> None:
    assert why_refused(url, None) is not None
    assert why_refused(url, {"example.com", ""}) is not None


def test_named_hosts_are_the_only_ones_and_may_be_this_machine() -> None:
    hosts = {"cdn.example.com", "*.images.example.com", "127.0.0.1"}
    for url in ("https://CDN.example.com/a", "http://a.b.images.example.com/", "http://127.0.0.1:9000/a"):
        assert why_refused(url, hosts) is None
    for url in (
        "https://example.com/",
        "https://images.example.com/",
        "https://evilimages.example.com/",
        "http://127.1/",
    ):
        assert why_refused(url, hosts) == "is at no host of `server.media_hosts`"
    assert why_refused("https://cdn.example.com/a", ()) is not None
    assert why_refused("data:,x", ()) is None


@given(st.lists(st.sampled_from(["0", "1", "127", "0x7f", "0177", "255", "256", "65536", "08", "x", ""]), max_size=5))
def test_addresses_in_parts_are_those_of_the_c_library(parts: list[str]) -> None:
    host = ".".join(parts)
    try:
        expected = ipaddress.IPv4Address(socket.inet_aton(host)) if host else None
    except OSError:
        expected = None
    assert _ipv4_in_parts(host) == expected


@given(st.text(max_size=60), st.sampled_from(["http://", "https://", "http://[", "", "//"]))
def test_whatever_is_sent_gets_a_decision(text: str, begin: str) -> None:
    why_refused(begin + text, None)
    why_refused(begin + text, {"example.com"})
