"""A request names one host, and nothing that another program could read otherwise (RFC 9112, section 3.2)."""

import pytest

from http1.host import is_host
from tests.http1.parts import a_request, a_server, reply_to, statuses

HOSTS = [
    "a",
    ":80",
    "a:",
    "a:80",
    "a:00080",
    "router.example:65535",
    "127.0.0.1:1",
    "[::1]",
    "[::1]:8080",
    "[::ffff:192.0.2.1]",
    "a_b",
    "%41",
    "a~b!c",
    "xn--bcher-kva.example",
]
NO_HOSTS = [
    "u@a",
    "u:p@a",
    "a:x",
    "[::1",
    "::1]",
    "::1",
    "[]",
    "[a]",
    "[::1]x",
    "[::1%25eth0]",
    "[v1.a]",
    "[1:2]",
    "a:-1",
    "a:+1",
    "a:1:2",
    "a:65536",
    "a:999999",
    "a/b",
    "a?b",
    "a#b",
    "http://a",
    "%zz",
    "%4",
    "a,b",
    "a\\b",
    "<a>",
    '"a"',
    "é",
    "a:²",
]


@pytest.mark.parametrize("host", ["", *HOSTS])
async def test_a_host_is_served(host: str) -> None:
    assert is_host(host)
    async with a_server() as (_, port):
        assert statuses(await reply_to(port, a_request("Connection: close", host=host))) == [200]


@pytest.mark.parametrize("host", ["a b", "a\tb", *NO_HOSTS])
async def test_anything_else_is_refused(host: str) -> None:
    assert not is_host(host)
    raw = f"POST / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    async with a_server() as (_, port):
        assert statuses(await reply_to(port, raw)) == [400]


@pytest.mark.parametrize("target", ["http://a b/", "http://u@a/", "http://a:x/", "http://[::1/", "http://a:65536/"])
async def test_a_whole_target_names_a_host_too(target: str) -> None:
    async with a_server() as (_, port):
        assert statuses(await reply_to(port, a_request("Connection: close", path=target))) == [400]
        sound = a_request("Connection: close", path="http://[::1]:80/x?y")
        assert b"X-Asked: POST /x\r\n" in await reply_to(port, sound)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_old_clients_name_sound_hosts_too(version: str) -> None:
    async with a_server() as (_, port):
        assert statuses(await reply_to(port, a_request(version=version, host="a b"))) == [400]
