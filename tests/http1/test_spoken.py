"""A peer that speaks another protocol is told which one, if its first bytes come together."""

from __future__ import annotations

import pytest

from http1.spoken import other_protocol
from tests.http1.parts import a_server, reply_to

OTHERS = {
    "PROXY 1": (b"PROXY TCP4 192.0.2.1 10.0.0.1 5000 80\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", "PROXY protocol"),
    "PROXY 1, unknown": (b"PROXY UNKNOWN\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", "PROXY protocol"),
    "PROXY 2": (b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c" + bytes(12) + b"GET / HTTP/1.1\r\n\r\n", "PROXY protocol"),
    "TLS 1.3": (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160), "TLS was spoken"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 was spoken"),
}


async def test_requests_and_nonsense_are_no_other_protocol() -> None:
    for begin in (b"", b"GET / HTTP/1.1\r\n", b"POST /PROXY HTTP/1.1", b"PROXY/1", b"\x16", b"\x00\r\nQUI"):
        assert other_protocol(begin) is None


@pytest.mark.parametrize("name", OTHERS)
async def test_another_protocol_is_refused_by_its_name(name: str) -> None:
    sent, words = OTHERS[name]
    async with a_server() as (_, port):
        answer = await reply_to(port, sent)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert words.encode() in answer, answer
