"""A server of keys that is slow, huge, redirecting or broken costs its own issuer's tokens and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from policies.identity import Issuer
from router.identity import key_source
from router.identity.key_source import KeySource
from router.identity.signing_keys import read_keys
from tests.router.identity.local_issuer import an_rsa_key, base64url, jwk_of

OK = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(bytes(64 << 20), 9)

ANSWERS: dict[str, tuple[list[bytes], str]] = {
    "a redirect to an inner address": (
        [b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"],
        "answered with status 302",
    ),
    "64 MiB in 64 KB": (
        [OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB), BOMB],
        "answered with more than 1 MiB",
    ),
    "a body that comes byte by byte": (
        [OK + b"Content-Length: 5000\r\n\r\n", *([b"x"] * 5000)],
        "did not answer within",
    ),
    "a head that comes line by line": ([OK, *(b"X-%d: a\r\n" % number for number in range(5000))], "did not answer"),
    "nothing": ([b""] * 5000, "did not answer within"),
    "a header of 1 MB": ([OK + b"X: " + b"a" * (1 << 20)], "its answer is no HTTP, or breaks off"),
    "less than it says": ([OK + b"Content-Length: 99999999999\r\n\r\n{}"], "its answer is no HTTP, or breaks off"),
    "another protocol": ([b"220 smtp.example.com ESMTP\r\n"], "its answer is no HTTP, or breaks off"),
    "the end": ([], "cannot be reached"),
}


@asynccontextmanager
async def a_server(pieces: list[bytes]) -> AsyncIterator[str]:
    """A server that sends `pieces`, 10 ms apart, whatever it is asked; its URL, with a secret."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01 if len(pieces) > 3 else 0)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys?token=hidden"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", ANSWERS)
async def test_keys_that_do_not_come_are_an_error_in_a_sentence_without_secrets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_source, "FETCH_S", 0.3)
    pieces, words = ANSWERS[name]
    async with a_server(pieces) as url, asyncio.timeout(10):
        issuer = Issuer("corp", "https://login.example.com", frozenset({"a"}), jwks=url)
        with pytest.raises(ValueError, match=words) as caught:
            await KeySource(issuer).fetch()
        assert "hidden" not in str(caught.value)
        assert len(str(caught.value)) < 200


GOOD = jwk_of(an_rsa_key())
ODD: dict[str, dict[str, Any]] = {
    "a modulus of 700,000 bytes": {**GOOD, "n": base64url(b"\xff" * 700_000)},
    "a modulus of 16,392 bits": {**GOOD, "n": base64url(b"\xff" * 2049)},
    "a modulus of 2,047 bits": {**GOOD, "n": base64url(b"\x7f" + b"\xff" * 255)},
    "an exponent of 65 bits": {**GOOD, "e": base64url(b"\x01" + bytes(7) + b"\x01")},
    "an exponent of 256 bytes": {**GOOD, "e": base64url(b"\xff" * 256)},
    "no point of the curve": {"kty": "EC", "crv": "P-256", "x": base64url(bytes(32)), "y": base64url(bytes(32))},
    "a long curve": {"kty": "EC", "crv": "P" * 100_000, "x": "AA", "y": "AA"},
}


@pytest.mark.parametrize("name", ODD)
def test_a_key_that_makes_each_signature_slow_is_left_out(name: str) -> None:
    with pytest.raises(ValueError, match="no key that can verify a signature"):
        read_keys(json.dumps({"keys": [ODD[name]] * 20}).encode())
    assert len(read_keys(json.dumps({"keys": [ODD[name], GOOD]}).encode()).keys) == 1
