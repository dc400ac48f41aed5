"""Mutated requests and answers: no exception, no hang, bounded memory, and nothing depends on how bytes were cut."""

from __future__ import annotations

import asyncio
import logging
import random
import tracemalloc
from contextlib import suppress
from itertools import pairwise

import httptools
import pytest

from http1.client import HttpClient
from http1.errors import AnswerError, HttpError
from http1.limits import ClientLimits, ServerLimits
from http1.request import Request
from tests.http1.parts import (
    a_connection,
    a_peer,
    a_request,
    a_server,
    eventually,
    parsed,
    read_all,
    reply_to,
    statuses,
)
from tests.http1.test_smuggling import AMBIGUOUS, BAD_CHUNKS, CHUNKED, OTHER

SOUND = [
    a_request(method="GET", path="/v1/models?limit=20"),
    a_request("Authorization: Bearer k", "Content-Type: application/json", body=b'{"model": "m"}'),
    a_request(CHUNKED, body=b"5\r\nabcde\r\n3;x=y\r\nfgh\r\n0\r\nX-Trailer: z\r\n\r\n"),
    a_request("Expect: 100-continue", body=b"abc"),
    a_request("Connection: close", method="DELETE", path="/v1/prefixes/a%20b"),
    a_request("Connection: Upgrade", "Upgrade: h2c", body=b"abcde"),
    a_request(method="HEAD", version="1.0"),
]
UNSOUND = [*AMBIGUOUS.values(), *(a_request(CHUNKED, body=body) for body in BAD_CHUNKS.values())]
REQUESTS = [*SOUND * 12, *UNSOUND, *(raw for raw, _ in OTHER.values())]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 500 No\r\nConnection: close\r\nX-A: b\r\n\r\nhello",
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"HTTP/1.0 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
]
MARKS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b",",
    b"0",
    b"\xff",
    b"chunked",
    b"Content-Length: 7\r\n",
    b"\r\n\r\n",
]


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One to three of `corpus`, with up to six changes."""
    raw = bytearray(b"".join(rng.choice(corpus) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        at, until = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0:
                raw[at:at] = rng.choice(MARKS)
            case 1:
                del raw[at : at + rng.randint(1, 4)]
            case 2:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                raw[until:until] = raw[at:until][:200]
            case _:
                raw[at : at + 2] = rng.choice(MARKS)
    return bytes(raw)


def in_pieces(rng: random.Random, raw: bytes) -> list[bytes]:
    """`raw`, cut at up to eight places."""
    cuts = sorted({0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randint(0, 8)))})
    return [raw[start:end] for start, end in pairwise(cuts)]


def send(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    """Send `data`, or the end, unless the other side has closed."""
    if not writer.transport.is_closing():
        with suppress(OSError):
            writer.write(data) if data is not None else writer.write_eof()


def understood(*pieces: bytes) -> list[object]:
    """The parsed `pieces`: requests with their bodies, and the refusal."""
    requests = parsed(*pieces)
    seen: list[object] = []
    for request in requests.waiting:
        if isinstance(request, HttpError):
            seen.append(request.status)
        else:
            body = b"".join(request._pieces)
            seen.append(
                (
                    request.method,
                    request.target,
                    request.headers.lowered,
                    body,
                    request.is_ended,
                    request.keeps_alive,
                )
            )
    return [*seen, requests.is_deaf]


def test_what_is_understood_does_not_depend_on_how_it_was_cut() -> None:
    rng = random.Random(1)
    accepted = refused = 0
    for _ in range(4000):
        raw = mutated(rng, REQUESTS)
        whole = understood(raw)
        accepted += sum(isinstance(message, tuple) for message in whole)
        refused += whole[-1] is True
        for pieces in (in_pieces(rng, raw), [raw[at : at + 1] for at in range(len(raw))]):
            assert understood(*pieces) == whole, raw
    # the mutations are neither harmless nor hopeless
    assert accepted > 1000
    assert refused > 1000


def test_no_mutation_of_an_unsound_request_hides_a_second_body_length() -> None:
    """Whatever is accepted frames its body in one way."""
    rng = random.Random(2)
    for _ in range(4000):
        raw = mutated(rng, UNSOUND)
        for request in parsed(raw).waiting:
            if isinstance(request, Request):
                fields = request.headers
                assert not ("content-length" in fields and "transfer-encoding" in fields), raw
                assert fields.get("transfer-encoding", "chunked").lower() == "chunked", raw
                assert fields.get("content-length", "0").isdigit(), raw
                for name, value in fields.items():
                    assert not set(name + value) & set("\r\n\0"), raw


async def test_a_server_survives_whatever_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    limits = ServerLimits(half_closed_s=0.02, linger_s=0.05)
    async with a_server(limits=limits) as (server, port):

        async def send_mutated(raw: bytes) -> None:
            async with a_connection(port) as (reader, writer):
                for piece in in_pieces(rng, raw):
                    send(writer, piece)
                    await asyncio.sleep(0)
                if rng.random() < 0.8:
                    send(writer, None)
                    await read_all(reader)

        for _ in range(25):
            await asyncio.gather(*(send_mutated(mutated(rng, REQUESTS)) for _ in range(20)))
        await eventually(lambda: server.connections == 0)
        assert statuses(await reply_to(port, a_request("Connection: close", body=b"still here"))) == [200]
    assert not caplog.records


async def test_a_client_survives_whatever_it_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(4)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(TimeoutError):
            while True:
                for piece in in_pieces(rng, mutated(rng, ANSWERS)):
                    send(writer, piece)
                    await asyncio.sleep(0)
                if rng.random() < 0.7:
                    return
                # a client that awaits more than was sent finds the end of the connection
                async with asyncio.timeout(0.05):
                    await reader.readuntil(b"\r\n\r\n")

    async def exchange(client: HttpClient) -> bool:
        try:
            async with await client.request("GET", "/", silence_s=30.0) as answer:
                await answer.body(1 << 20)
        except AnswerError:
            return False
        return True

    # Python's own loop says so when the peer writes to a connection that the client has closed
    caplog.set_level(logging.ERROR)
    async with a_peer(talk) as port:
        client = HttpClient(f"http://127.0.0.1:{port}", ClientLimits(most_idle=8))
        ends = [end for _ in range(25) for end in await asyncio.gather(*(exchange(client) for _ in range(20)))]
        await client.close()
    assert 50 < sum(ends) < 450
    assert not caplog.records


ENDLESS = {
    "target": (b"GET /", b"a"),
    "header name": (b"GET / HTTP/1.1\r\n", b"a"),
    "header value": (b"GET / HTTP/1.1\r\nX-A: ", b"a"),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-A: b\r\n"),
    "empty lines": (b"", b"\r\n"),
    "chunk extension": (a_request(CHUNKED) + b"1;", b"a"),
    "chunk extensions": (a_request(CHUNKED) + b"1", b";a=b"),
    "chunk size": (a_request(CHUNKED), b"0"),
    "trailer": (a_request(CHUNKED) + b"0\r\nX-A: ", b"a"),
    "trailers": (a_request(CHUNKED) + b"0\r\n", b"X-A: b\r\n"),
    "chunks": (a_request(CHUNKED), b"1\r\na\r\n"),
    "body": (a_request("Content-Length: 99999999"), b"a"),
    "requests": (b"", a_request(method="GET")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_refused_before_it_fills_memory(name: str) -> None:
    begin, more = ENDLESS[name]
    piece = more * (16_000 // len(more))
    limits = ServerLimits(head_bytes=32 << 10, body_bytes=64 << 10)
    tracemalloc.start()
    try:
        requests = parsed(begin, *(piece for _ in range(400)), limits=limits)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert requests.is_deaf
    assert most < 4_000_000


class Told:
    """What the parser itself tells of the heads that it is given, one field after the other."""

    def __init__(self) -> None:
        self.target, self.fields, self.heads = b"", list[tuple[bytes, bytes]](), list[tuple[str, dict[str, str]]]()

    def on_message_begin(self) -> None:
        self.target, self.fields = b"", []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        fields: dict[str, str] = {}
        for raw, value in self.fields:
            name, text = raw.lower().decode(), value.strip(b" \t").decode(errors="replace")
            fields[name] = f"{fields[name]}, {text}" if name in fields else text
        self.heads.append((self.target.decode(), fields))


def test_a_head_is_read_as_the_parser_reads_it() -> None:
    rng = random.Random(5)
    compared = 0
    for _ in range(4000):
        raw = mutated(rng, [*SOUND, a_request("X-A: \t b \t", "x-a:\xe9", "X-Empty:", "Cookie: a=b; c:d")])
        told = Told()
        with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            httptools.HttpRequestParser(told).feed_data(raw)
        requests = [request for request in parsed(raw).waiting if isinstance(request, Request)]
        for request, (target, fields) in zip(requests, told.heads, strict=False):
            assert (request.target, request.headers.lowered) == (target, fields), raw
            compared += 1
    assert compared > 1500
