"""Bodies over plain sockets: compressed, cut, endless or invalid."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import zlib

import pytest

from backends.nesting import MOST_LEVELS
from http1.limits import ServerLimits
from http1.message import Headers
from http1.request import Request
from router.call.bodies import SMALL_BYTES, Bodies, Held
from router.protocols.http import body as body_module
from router.start.app import Router
from tests.http1.parts import no_connection
from tests.router.parts import CHAT, KEY, MODEL, a_chat, a_client, a_config, a_router

BODY = json.dumps(a_chat()).encode()


def a_chat_with(levels: int) -> bytes:
    """A chat with a field of so many levels."""
    return BODY[:-1] + b', "schema": ' + b"[" * levels + b"]" * levels + b"}"


async def answered(router: Router, *pieces: bytes) -> str:
    """The answer to `pieces`, sent one after the other."""
    host, _, port = router.http_url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(10):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            return (await reader.readuntil(b"}}" if pieces[0].startswith(b"POST") else b"\r\n\r\n")).decode()
    finally:
        writer.close()


def a_post(body: bytes, *headers: str, version: str = "1.1", length: int | None = None) -> bytes:
    given = ("Host: a", f"Authorization: Bearer {KEY}", *headers)
    given += (f"Content-Length: {len(body) if length is None else length}",) if length != -1 else ()
    return "\r\n".join((f"POST {CHAT} HTTP/{version}", *given, "", "")).encode() + body


FIRST, SECOND = BODY[:5], BODY[5:]
CHUNKS = (b"5\r\n%s\r\n" % FIRST, b"%x\r\n%s\r\n0\r\n\r\n" % (len(SECOND), SECOND))


@pytest.mark.parametrize(
    "pieces",
    [
        (a_post(BODY),),
        (a_post(BODY, version="1.0"),),
        (a_post(gzip.compress(BODY), "Content-Encoding: GZIP"),),
        (a_post(zlib.compress(BODY), "Content-Encoding: deflate"),),
        (a_post(BODY, "Content-Encoding:"),),
        (a_post(b"\xef\xbb\xbf" + BODY),),
        (a_post(BODY, "X-Baggage: " + "a" * 20_000),),
        (a_post(b"", "Transfer-Encoding: chunked", length=-1), *CHUNKS),
        # of two `model` members the last counts, for the router and for backends
        (a_post(BODY.replace(b'"model"', b'"model": "other", "model"')),),
    ],
    ids=["plain", "HTTP/1.0", "gzip", "deflate", "no encoding", "BOM", "a long header", "chunks", "twice"],
)
async def test_what_clients_and_proxies_make_of_a_chat_is_answered(pieces: tuple[bytes, ...]) -> None:
    async with a_router() as router:
        answer = await answered(router, *pieces)
    assert answer.split("\r\n")[0].endswith("200 OK")
    assert '"content":"ok"' in answer


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with a_router() as router:
        answer = await answered(router, a_post(b"", "Expect: 100-continue", length=len(BODY)), BODY)
    assert answer.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (BODY.replace(b"hello", b"\xff"), "the body is not UTF-8: invalid start byte at byte"),
        (BODY.decode().encode("utf-16"), "the body is not valid JSON"),
        (b"", "the body is not valid JSON"),
        (a_chat_with(MOST_LEVELS), "nested more than 128 levels deep"),
        (a_chat_with(5_000), "nested more than 128 levels deep"),
    ],
)
async def test_a_body_that_is_not_json_in_utf_8_is_refused(body: bytes, words: str) -> None:
    async with a_router() as router:
        answer = await answered(router, a_post(body))
    assert answer.startswith("HTTP/1.1 400")
    assert words in answer


async def test_a_body_as_deep_as_the_limit_is_answered() -> None:
    async with a_router() as router:
        answer = await answered(router, a_post(a_chat_with(MOST_LEVELS - 1)))
    assert answer.startswith("HTTP/1.1 200")


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    async with a_router(config=a_config(max_body_bytes=10_000)) as router:
        answer = await answered(router, a_post(b"", length=10_001))
    assert answer.startswith("HTTP/1.1 413")
    assert "larger than 10000 bytes" in answer


async def test_a_small_body_that_unpacks_to_a_large_one_is_too_large() -> None:
    async with a_router(config=a_config(max_body_bytes=10_000)) as router:
        answer = await answered(router, a_post(gzip.compress(b" " * 10_000_000), "Content-Encoding: gzip"))
    assert answer.startswith("HTTP/1.1 413")


async def test_a_body_of_which_nothing_comes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.start.app._LIMITS", ServerLimits(body_s=0.1))
    async with a_router() as router:
        answer = await answered(router, a_post(BODY[:9], length=len(BODY)))
    assert answer.startswith("HTTP/1.1 400")
    assert "nothing of the body came for 0.1 s" in answer


async def test_a_body_that_comes_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.start.app._LIMITS", ServerLimits(body_s=0.4))
    pieces = [BODY[at : at + 3] for at in range(0, len(BODY), 3)]
    async with a_router() as router:
        answer = await answered(router, a_post(b"", length=len(BODY)), *pieces)
    assert len(pieces) * 0.02 > 0.4, "each piece is sent 20 ms after the one before"
    assert answer.startswith("HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nX-Api-Key: secret\r\nBad Header\r\n\r\n"])
async def test_what_is_no_http_is_no_error_of_ours(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with a_router() as router:
            assert "400" in await answered(router, sent)
    logged = [
        (record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records if "http" in record.name
    ]
    assert logged == [("INFO", "a client sent invalid HTTP")]
    assert "secret" not in caplog.text


async def test_a_model_with_slashes_is_found_by_its_name_and_in_either_shape() -> None:
    async with a_router() as router, a_client(router) as client:
        async with client.get(f"/v1/models/{MODEL}") as reply:
            assert (await reply.json())["object"] == "model"
        for name in ("a/b", "a%2Fb"):
            async with client.get(f"/v1/models/{name}") as reply:
                assert (reply.status, "there is no model 'a/b'" in await reply.text()) == (404, True)
        async with client.session.head(f"{client.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}) as reply:
            assert (reply.status, await reply.read()) == (200, b"")


OBJECTS = b'{"model": "m", "messages": [], "x": [' + b",".join([b"{}"] * 200_000) + b"]}"


@pytest.mark.parametrize(
    "post",
    [a_post(OBJECTS), a_post(gzip.compress(OBJECTS), "Content-Encoding: gzip")],
    ids=["plain", "gzip"],
)
async def test_a_body_that_would_take_too_much_memory_is_refused_in_the_words_of_its_api(post: bytes) -> None:
    async with a_router() as router:
        answer = await answered(router, post)
        other = await answered(router, post.replace(CHAT.encode(), b"/v1/messages", 1))
    assert answer.startswith("HTTP/1.1 413")
    assert '"code":"request_too_large"' in answer
    assert "MiB of memory" in answer
    assert "server.memory" in answer
    assert other.startswith("HTTP/1.1 413")
    assert '"type":"request_too_large"' in other


async def test_large_bodies_wait_for_memory_in_turn_and_all_of_them_are_answered() -> None:
    chat = json.dumps(a_chat("\N{GRINNING FACE} hello " * 20_000), ensure_ascii=False).encode()
    coded = gzip.compress(chat)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (chat[:100_000], chat[100_000:])) + b"0\r\n\r\n"
    posts = [
        a_post(chat),
        a_post(coded, "Content-Encoding: gzip"),
        a_post(chunks, "Transfer-Encoding: chunked", length=-1),
    ]
    config = a_config(max_body_bytes=len(chat), memory_bytes=64 * len(chat))
    async with a_router(config=config) as router:
        answers = await asyncio.gather(*(answered(router, post) for post in posts * 8))
        assert router.gateway.bodies.arriving.lent == router.gateway.bodies.parsed.lent == 0
    # the model's context is far smaller
    assert [answer.split("\r\n")[0] for answer in answers] == ["HTTP/1.1 400 Bad Request"] * 24


async def test_of_many_chats_far_beyond_the_context_each_is_refused_for_that_and_none_because_others_wait() -> None:
    post = a_post(json.dumps(a_chat("the lazy dog " * 600_000)).encode())
    async with a_router() as router:
        answers = await asyncio.gather(*(answered(router, post) for _ in range(16)))
    assert {answer.split("\r\n")[0] for answer in answers} == {"HTTP/1.1 400 Bad Request"}
    assert all("at least" in answer and "context_length_exceeded" in answer for answer in answers)


async def test_a_large_body_is_joined_in_the_thread_that_parses_and_a_compressed_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, whole = list[int](), body_module._whole

    def whole_seen(pieces: list[bytes], encoding: str, most_bytes: int) -> bytes:
        threads.append(threading.get_ident())
        return whole(pieces, encoding, most_bytes)

    monkeypatch.setattr(body_module, "_whole", whole_seen)
    chat = {**a_chat(), "user": "a" * 2_000_000}
    async with a_router() as router:
        await answered(router, a_post(gzip.compress(BODY), "Content-Encoding: gzip"))
        await answered(router, a_post(b"\xef\xbb\xbf" + json.dumps(chat).encode()))
    assert threads[0] == threading.get_ident() != threads[1]


async def test_a_body_that_comes_byte_by_byte_is_kept_in_few_pieces() -> None:
    request = Request(
        "POST",
        "/",
        Headers(b""),
        no_connection(),
        ServerLimits(unread_bytes=2**20, body_bytes=2**20),
    )
    reading = asyncio.create_task(body_module._arrived(request, 2**20, None, is_coded=False))
    for _ in range(1000):
        request.put(b"a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    request.put(b"b" * SMALL_BYTES)
    await asyncio.sleep(0.01)
    request.put(b"c")
    request.end()
    assert [len(piece) for piece in await reading] == [1000 + SMALL_BYTES, 1]


@pytest.mark.parametrize("size", [2**20, 3 * 2**20])
async def test_a_body_that_has_its_memory_comes_without_pauses_and_as_it_was_sent(size: int) -> None:
    bodies, body = Bodies(64 * 2**20), bytes(range(256)) * (size // 256)
    request = Request("POST", "/", Headers(b""), no_connection(), ServerLimits(unread_bytes=2**16))
    request.content_length = size
    with Held(bodies, "a") as held:
        reading = asyncio.create_task(body_module.read_body(request, size, held))
        await asyncio.sleep(0)
        for start in range(0, size, 2**18):
            request.put(body[start : start + 2**18])
            assert not request.is_full
        assert await reading == body
        assert bodies.arriving.lent == 2 * size
    bodies.check()
    bodies.close()
