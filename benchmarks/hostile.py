"""Hostile input on the HTTP port of a whole router: the replies to each published trick of request smuggling, and the
effect of mutated requests.

    python benchmarks/hostile.py --table                  # the table of docs/clients.md
    python benchmarks/hostile.py [--requests 100000] [--seed 1] [--at-once 32]

The table: each row is sent on a connection of its own, followed by a second request that must not be read as a part
of the first, nor reach a backend if the first was refused. Slow clients meet limits of a fraction of a second instead
of the default ones, which the table names.

Mutated requests: real requests of every endpoint, changed in their bytes, headers and JSON, in one to four pieces on a
connection of their own. No answer may have a status of 500 or be missing for 10 s, no error may be logged, and the
resident memory may grow by at most 32 MiB after a tenth of the requests, which warms up. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends.fake import Answer, FakeBackend
from http1.limits import ServerLimits
from http1.server import HttpServer
from policies.nouns import Prompt, Request
from policies.sla.parse import parse
from router.protocols.http.endpoints import HttpEndpoints
from router.protocols.strangers import Strangers
from router.start.app import Router

KEY = "a-key-for-measurements-only"
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
tenants: {{acme: {{keys: ["sha256:{key}"]}}}}
pools: {{own: {{kind: fake, at: "a:1", model: m}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off, max_body: 1MiB}}
"""
CHAT = "/v1/chat/completions"
CHUNKED = "Transfer-Encoding: chunked"
ANSWER_S = 10.0
"""A connection that has not ended after this time hangs."""
MOST_GROWTH_MIB = 32.0
"""Most growth of the resident memory once the router is warm."""
LOGGED = ("pointsman", "asyncio")
"""Loggers that must not log errors."""


def a_request(*headers: str, method: str = "POST", target: str = CHAT, body: bytes | None = None) -> bytes:
    """A request with the key of the tenant; its body has a length unless a header frames it."""
    lines = [f"{method} {target} HTTP/1.1", "Host: a", f"Authorization: Bearer {KEY}", *headers]
    if body is not None and not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + (body or b"")


def a_chat(text: str, **fields: object) -> bytes:
    """The body of a chat."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


FIRST = a_chat("first")
SECOND = a_request("Connection: close", body=a_chat("second"))
SIZE = f"{len(FIRST):x}".encode()
IN_CHUNKS = SIZE + b"\r\n" + FIRST + b"\r\n0\r\n\r\n"


def _raw(first_line: bytes, rest: bytes = b"\r\n") -> bytes:
    return first_line + b"\r\nHost: a\r\nAuthorization: Bearer " + KEY.encode() + rest


def _odd(line: str) -> bytes:
    """A valid chat with one odd header `line`."""
    return a_request(line, body=FIRST)


def _chunked(body: bytes) -> bytes:
    return a_request(CHUNKED, body=body)


LENGTH = len(FIRST)
ROWS: dict[str, bytes] = {
    "two `Content-Length`, equal": a_request(*[f"Content-Length: {LENGTH}"] * 2, body=FIRST),
    "two `Content-Length`, different": a_request(f"Content-Length: {LENGTH}", "Content-Length: 3", body=FIRST),
    "`Content-Length: 5, 5`": a_request(f"Content-Length: {LENGTH}, {LENGTH}", body=FIRST),
    "`Content-Length: +5`": a_request(f"Content-Length: +{LENGTH}", body=FIRST),
    "`Content-Length` beyond 64 bits": a_request(f"Content-Length: {2**64 + LENGTH}", body=FIRST),
    "`Content-Length` and `Transfer-Encoding`": a_request(f"Content-Length: {len(IN_CHUNKS)}", CHUNKED, body=IN_CHUNKS),
    "`Transfer-Encoding` and `Content-Length`": a_request(CHUNKED, "Content-Length: 4", body=IN_CHUNKS),
    "`Transfer-Encoding: chunked, identity`": a_request(f"{CHUNKED}, identity", body=IN_CHUNKS),
    "`Transfer-Encoding: identity`": a_request("Transfer-Encoding: identity", f"Content-Length: {LENGTH}", body=FIRST),
    "`Transfer-Encoding: gzip, chunked`": a_request("Transfer-Encoding: gzip, chunked", body=IN_CHUNKS),
    "`Transfer-Encoding: xchunked`": a_request("Transfer-Encoding: xchunked", body=IN_CHUNKS),
    "`Transfer-Encoding` twice": a_request(CHUNKED, CHUNKED, body=IN_CHUNKS),
    "`Transfer-Encoding` in HTTP/1.0": _chunked(IN_CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunk size with a letter beyond F": _chunked(b"g" + IN_CHUNKS),
    "chunk size with `0x`": _chunked(b"0x" + IN_CHUNKS),
    "chunk size with a sign": _chunked(b"+" + IN_CHUNKS),
    "chunk size beyond 64 bits": _chunked(b"1" + b"0" * 16 + IN_CHUNKS),
    "chunk size that is too small": _chunked(b"3\r\n" + FIRST + b"\r\n0\r\n\r\n"),
    "chunk size that ends with a bare LF": _chunked(IN_CHUNKS.replace(b"\r\n", b"\n", 1)),
    "chunk without its CRLF": _chunked(SIZE + b"\r\n" + FIRST + b"0\r\n\r\n"),
    "chunk extension": _chunked(IN_CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)),
    "chunk extension with a bare LF": _chunked(IN_CHUNKS.replace(b"\r\n", b";a\nb\r\n", 1)),
    "`Content-Length` among the trailers": _chunked(IN_CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n"),
    "header folded over two lines (obs-fold)": _odd("X-A: b\r\n c"),
    "`Transfer-Encoding` folded": a_request("Transfer-Encoding:\r\n chunked", body=IN_CHUNKS),
    "bare CR in a header": _odd("X-A: b\rContent-Length: 3"),
    "bare LF between headers": _odd("X-A: b\nX-B: c"),
    "bare LF after the first line": _raw(b"GET /v1/models HTTP/1.1", b"\r\n\r\n").replace(b"\r\n", b"\n", 1),
    "NUL in a header": _odd("X-A: b\0c"),
    "NUL in a header's name": _odd("X\0A: b"),
    "NUL in the target": a_request(target=f"{CHAT}\0", body=FIRST),
    "space before the colon": a_request(f"Content-Length : {LENGTH}", body=FIRST),
    "tab before the colon": a_request("Transfer-Encoding\t: chunked", body=IN_CHUNKS),
    "line without a colon": _odd("X-A"),
    "no `Host`": a_request(body=FIRST).replace(b"Host: a\r\n", b""),
    "two `Host`": _odd("Host: b"),
    "head of 80 KiB": _odd(f"X-A: {'a' * (80 << 10)}"),
    "target of 80 KiB": a_request(target=f"{CHAT}?{'a' * (80 << 10)}", body=FIRST),
    "200 headers": a_request(*(f"X-{number}: a" for number in range(200)), body=FIRST),
    "absolute target, `http://b/v1/...`": a_request(target=f"http://b{CHAT}", body=FIRST),
    "authority as target, `CONNECT b:80`": a_request(method="CONNECT", target="b:80"),
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.2": _raw(b"GET /v1/models HTTP/1.2", b"\r\n\r\n"),
    "first line of HTTP/2.0": _raw(b"GET /v1/models HTTP/2.0", b"\r\n\r\n"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "`Upgrade: h2c`": a_request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", body=FIRST),
    "handshake of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "garbage behind a body": a_request(body=FIRST) + b"garbage\r\n\r\n",
}
"""Name in the table -> bytes of the first request; SECOND follows."""

SLOW = ("head in drops for 30 s", "head that stops for 30 s", "body that stops for 60 s", "answer unread for 60 s")
"""Behaviours of slow clients; the names have the default limits."""
QUICK = ServerLimits(head_s=0.3, body_s=0.3, write_s=0.3, linger_s=0.2)


class Outcome(NamedTuple):
    """The statuses of the answers, and the texts of the chats that reached a backend."""

    statuses: tuple[int, ...]
    reached: tuple[str, ...]

    def __str__(self) -> str:
        words = {(): "nothing", ("first",): "the first request", ("first", "second"): "two requests"}
        shown = ", ".join(map(str, self.statuses)) or "none"
        return f"{shown} | {words.get(self.reached, str(self.reached))}"


@asynccontextmanager
async def a_router(script: Answer | None = None) -> AsyncIterator[tuple[Router, FakeBackend]]:
    """A whole router with one scripted backend."""
    backend = FakeBackend("b", pool="own", models=frozenset({"m"}), script=script or Answer(), address="a:1")
    config = parse(SLA.format(key=hashlib.sha256(KEY.encode()).hexdigest()))
    async with Router(config, backends=lambda _: [backend]) as router:
        assert await router.wait_until_reached(10)
        yield router, backend


def port_of(router: Router) -> int:
    """The HTTP port of `router`."""
    return int(router.http_url.rpartition(":")[2])


def statuses_in(answer: bytes) -> tuple[int, ...]:
    """The statuses of all answers in `answer`."""
    return tuple(int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.1 (\d{3}) ", answer))


def texts_in(received: Sequence[tuple[Request, Prompt]]) -> tuple[str, ...]:
    """The first texts of the chats in `received`."""
    return tuple(prompt.body["messages"][0]["content"] for _, prompt in received if prompt.body is not None)


async def outcome_of(raw: bytes, piece_bytes: int = 1 << 20) -> Outcome:
    """The outcome of `raw` and the second request behind it, sent in pieces of at most `piece_bytes`."""
    sent = raw + SECOND
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    async with a_router() as (router, backend):
        answer = await reply_to(port_of(router), pieces, ends=False)
        return Outcome(statuses_in(answer), texts_in(backend.received))


async def slow_outcome(name: str) -> Outcome:
    """The outcome of a slow client."""
    long = Answer(texts=("a" * 1000,) * 100_000)
    async with a_router(long if name == SLOW[3] else None) as (router, backend):
        endpoints = HttpEndpoints(router.gateway, router.telemetry.exposition, Strangers(router.gateway.clock))
        server = HttpServer(endpoints.answer, QUICK, refuse=endpoints.refuse)
        port = await server.listen("127.0.0.1", 0)
        whole = a_request(body=FIRST)
        if name == SLOW[0]:
            answer = await reply_to(port, [whole[at : at + 1] for at in range(200)], ends=False, pause_s=0.01)
        elif name == SLOW[1]:
            answer = await reply_to(port, [whole[:40]], ends=False)
        elif name == SLOW[2]:
            answer = await reply_to(port, [whole[:-5]], ends=False)
        else:
            answer = await _unread(port, a_request(body=a_chat("first", stream=True)), backend)
        await server.close()
        return Outcome(statuses_in(answer), texts_in(backend.received))


async def _unread(port: int, raw: bytes, backend: FakeBackend) -> bytes:
    """The bytes that a client receives if it reads its answer only after the router has given it up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        writer.write(raw)
        async with asyncio.timeout(ANSWER_S):
            while not backend.cancelled:  # noqa: ASYNC110 - of the state of another part
                await asyncio.sleep(0.01)
        return await reader.read(1024)
    finally:
        writer.transport.abort()


async def rows() -> AsyncIterator[tuple[str, Outcome]]:
    """The rows of the table."""
    for name, raw in ROWS.items():
        yield name, await outcome_of(raw)
    for name in SLOW:
        yield name, await slow_outcome(name)


async def print_table() -> None:
    """Print it as docs/clients.md has it."""
    print("| sent | answers | reaches a backend |\n|---|---|---|")
    async for name, outcome in rows():
        print(f"| {name} | {outcome} |")


class Client(asyncio.Protocol):
    """Collects the bytes received until the connection ends."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Client {len(self.answer)} bytes>"

    def data_received(self, data: bytes) -> None:
        """A part of the answer came."""
        self.answer += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - either way no more comes
        """The connection ended."""
        if not self.over.done():
            self.over.set_result(None)


async def reply_to(port: int, pieces: Sequence[bytes], *, ends: bool, pause_s: float = 0.0) -> bytes:
    """All bytes received for `pieces` until the server closes; `ends`: this side closes after the last one.

    Raises TimeoutError.
    """
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", port)
    try:
        async with asyncio.timeout(ANSWER_S):
            for piece in pieces:
                if transport.is_closing():
                    break
                transport.write(piece)
                if len(pieces) > 1:
                    await asyncio.sleep(pause_s)
            if ends and not transport.is_closing():
                with suppress(OSError):
                    transport.write_eof()
            await client.over
    finally:
        transport.abort()
    return bytes(client.answer)


# mutated requests

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": "Hello"}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: (
        {"model": "m", "messages": [_USER]},
        {"model": "m", "messages": [{"role": "system", "content": "x"}, _USER], "stream": True, "max_tokens": 5},
        {"model": "m", "messages": [_USER], "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "n": 2},
        {"model": "m", "messages": [_USER], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"model": "m", "messages": [_USER], "temperature": 0.5, "top_p": 0.9, "stop": ["a"], "logit_bias": {"5": 1}},
        {"model": "m", "messages": [_USER], "stream_options": {"include_usage": True}, "stream": True, "seed": 5},
        {"model": "m", "messages": [_USER], "logprobs": True, "top_logprobs": 2, "metadata": {"a": "b"}, "user": "u"},
    ),
    "/v1/completions": (
        {"model": "m", "prompt": "Once"},
        {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 1, "stream": True},
        {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3, "suffix": "x"},
    ),
    "/v1/messages": (
        {"model": "m", "max_tokens": 9, "messages": [_USER], "system": [{"type": "text", "text": "s"}]},
        {"model": "m", "max_tokens": 9, "messages": [_USER], "stream": True, "thinking": {"type": "disabled"}},
    ),
    "/v1/messages/count_tokens": ({"model": "m", "messages": [_USER]},),
    "/v1/responses": (
        {"model": "m", "input": "Hello", "instructions": "x"},
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "stream": True},
    ),
    "/v1/embeddings": ({"model": "m", "input": ["a", "b"], "encoding_format": "float"},),
    "/v1/rerank": ({"model": "m", "query": "a", "documents": ["b", "c"], "top_n": 1},),
    "/tokenize": ({"model": "m", "prompt": "Hello"},),
    "/v1/prefixes": ({"model": "m", "messages": [_USER]},),
}
PLAIN = (
    a_request(method="GET", target="/v1/models"),
    a_request("anthropic-version: 2023-06-01", method="GET", target="/v1/models/m?limit=20"),
    a_request(method="HEAD", target="/healthz"),
    a_request(method="GET", target="/readyz"),
    a_request("Origin: https://a.b", "Access-Control-Request-Method: POST", method="OPTIONS"),
    a_request(method="DELETE", target="/v1/prefixes/a%20b"),
    a_request(CHUNKED, body=IN_CHUNKS),
    a_request("Expect: 100-continue", body=FIRST),
    a_request("Content-Encoding: gzip", body=gzip.compress(FIRST, mtime=0)),
    a_request("x-pointsman-explain: 1", "x-pointsman-session: s", "traceparent: 00-ab-cd-01", body=FIRST),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, -(2**64), 10**40, 0.5, 1e308, "", "\0", "\ud800", "a" * 5000, "💥" * 50),
    *([], {}, [[]], [None], [0] * 300, {"": ""}, {"type": "text"}, {"type": "image_url", "image_url": {"url": 5}}),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {"$ref": "#"}),
)
MARKS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b",", b'"', b"\\u0000", b"{", b"]", b"\xff", b"\xf0\x9f", b"%00"),
    *(b"chunked", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n", b"-1", b"9" * 40),
    *(b"../", b"?", b"e999", b"null", b"[" * 200, b"Expect: 100-continue\r\n", b"Connection: close\r\n"),
)


def _with_odd_value(rng: random.Random, value: Any) -> Any:
    """`value` with one part replaced by another kind of value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: inner for other, inner in value.items() if other != name}
        return {**value, name: _with_odd_value(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _with_odd_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)


def sound(rng: random.Random) -> bytes:
    """A request of any endpoint: half of them with other JSON than its API defines."""
    if rng.random() < 0.25:
        return rng.choice(PLAIN)
    path = CHAT if rng.random() < 0.5 else rng.choice(list(BODIES))
    body = rng.choice(BODIES[path])
    for _ in range(rng.choice((0, 1, 1, 2))):
        body = _with_odd_value(rng, body)
    return a_request(target=path, body=json.dumps(body).encode())


def _with_other_headers(rng: random.Random, raw: bytes) -> bytes:
    """Headers in another order, with one twice, or without one."""
    head, end, body = raw.partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    rng.shuffle(headers)
    match rng.randrange(3):
        case 0 if headers:
            headers.append(rng.choice(headers))
        case 1 if headers:
            headers.pop()
    return b"\r\n".join((first, *headers)) + end + body


def mutated(rng: random.Random) -> bytes:
    """One to three requests, with up to six changes."""
    raw = bytearray(b"".join(sound(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 6))):
        at, until = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0:
                raw[at:at] = rng.choice(MARKS)
            case 1:
                del raw[at : at + rng.choice((1, 2, 4, 50))]
            case 2 if raw:
                raw[min(at, len(raw) - 1)] ^= 1 << rng.randrange(8)
            case 3:
                raw[until:until] = raw[at:until][:200]
            case 4:
                raw[at:] = sound(rng)[rng.randrange(60) :]
            case 5:
                raw = bytearray(_with_other_headers(rng, bytes(raw)))
            case _:
                raw[at : at + 2] = rng.choice(MARKS)
    return bytes(raw)


def in_pieces(rng: random.Random, raw: bytes) -> list[bytes]:
    """`raw`, cut at up to three places."""
    cuts = sorted({0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))})
    return [raw[start:end] for start, end in pairwise(cuts)]


class _Errors(logging.Handler):
    """Records logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Remember `record`."""
        self.lines.append(self.format(record))


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    """The errors logged inside this context."""
    handler = _Errors()
    for name in LOGGED:
        logging.getLogger(name).addHandler(handler)
    try:
        yield handler.lines
    finally:
        for name in LOGGED:
            logging.getLogger(name).removeHandler(handler)


def resident_mib() -> float:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@dataclass
class Storm:
    """The results of the mutated requests; `failed` are those with a status of 500, `hung` those without an end."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[bytes] = field(default_factory=list)
    hung: list[bytes] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    warm_mib: float = 0.0
    end_mib: float = 0.0
    reached: int = 0

    @property
    def growth_mib(self) -> float:
        """Resident memory at the end less that when the router was warm."""
        return self.end_mib - self.warm_mib

    @property
    def is_survived(self) -> bool:
        """Whether nothing failed, hung, or grew."""
        return not (self.failed or self.hung or self.errors) and self.growth_mib <= MOST_GROWTH_MIB


async def storm(requests: int, *, seed: int = 1, at_once: int = 32, shows: bool = False) -> Storm:
    """Send `requests` mutated requests to a router, each on a connection of its own."""
    rng, seen = random.Random(seed), Storm()
    with errors_logged() as seen.errors:
        async with a_router() as (router, backend):
            port = port_of(router)

            async def send(raw: bytes, pieces: Sequence[bytes]) -> None:
                began = time.perf_counter()
                try:
                    statuses = statuses_in(await reply_to(port, pieces, ends=True))
                except TimeoutError:
                    seen.hung.append(raw)
                else:
                    seen.statuses.update(statuses)
                    if 500 in statuses:
                        seen.failed.append(raw)
                seen.slowest_s = max(seen.slowest_s, time.perf_counter() - began)

            left = iter(range(requests))

            async def client() -> None:
                for number in left:
                    raw = mutated(rng)
                    await send(raw, in_pieces(rng, raw))
                    seen.sent += 1
                    seen.reached += len(backend.received)
                    backend.received.clear()
                    if number == requests // 10:
                        seen.warm_mib = resident_mib()
                    if shows and seen.sent % max(1, requests // 20) == 0:
                        print(
                            f"{seen.sent:8} sent, {resident_mib():6.1f} MiB, slowest {seen.slowest_s:.2f} s", flush=True
                        )

            await asyncio.gather(*(client() for _ in range(at_once)))
            seen.end_mib = resident_mib()
            # it must still answer valid requests
            assert statuses_in(await reply_to(port, [SECOND], ends=False)) == (200,)
            assert await router.gateway.doors.emptied(5)
            router.check()
    return seen


async def _weather(options: argparse.Namespace) -> bool:
    began = time.perf_counter()
    seen = await storm(options.requests, seed=options.seed, at_once=options.at_once, shows=True)
    seconds = time.perf_counter() - began
    print(f"{seen.sent} mutated requests in {seconds:.0f} s; {seen.reached} prompts reached the backend")
    print("answers by status:", ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items())))
    print(f"500: {len(seen.failed)}, hung: {len(seen.hung)}, errors logged: {len(seen.errors)}")
    print(f"resident: {seen.warm_mib:.1f} MiB warm, {seen.end_mib:.1f} at the end, at most {MOST_GROWTH_MIB} more")
    for raw in [*seen.failed, *seen.hung][:5]:
        print(raw)
    for error in seen.errors[:5]:
        print(error)
    return seen.is_survived


def main() -> None:
    """Run the command line."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--table", action="store_true", help="print the table of docs/clients.md and end")
    reader.add_argument("--requests", type=int, default=100_000, help="how many mutated requests; default: 100000")
    reader.add_argument("--seed", type=int, default=1, help="of the mutations; default: 1")
    reader.add_argument("--at-once", type=int, default=32, help="connections at once; default: 32")
    options = reader.parse_args()
    if options.table:
        uvloop.run(print_table())
    elif not uvloop.run(_weather(options)):
        sys.exit(1)


if __name__ == "__main__":
    main()
