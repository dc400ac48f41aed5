"""Requests that another program could understand differently: each is refused, and nothing of it reaches a handler.

Sources: RFC 9112, sections 2.2, 3.2, 5.1, 5.2, 6.1, 6.3, 7.1 and 11.2; published cases of request smuggling.
"""

import pytest

from http1.errors import HttpError
from http1.request import Reply, Request, Response
from tests.http1.parts import a_request, a_server, parsed, reply_to, statuses

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"

AMBIGUOUS = {
    "both lengths": a_request("Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"),
    "both lengths, the other order": a_request(CHUNKED, "Content-Length: 5", body=b"0\r\n\r\n"),
    "two lengths": a_request("Content-Length: 3", "Content-Length: 5", body=b"abcde"),
    "the same length twice": a_request("Content-Length: 5", "Content-Length: 5", body=b"abcde"),
    "a list of lengths": a_request("Content-Length: 5, 5", body=b"abcde"),
    "a length with a sign": a_request("Content-Length: +5", body=b"abcde"),
    "a negative length": a_request("Content-Length: -5", body=b"abcde"),
    "a length in hexadecimal": a_request("Content-Length: 0x5", body=b"abcde"),
    "a length with a space inside": a_request("Content-Length: 1 2", body=b"abcde"),
    "no length in its header": a_request("Content-Length: ", body=b"abcde"),
    "a length beyond 64 bits": a_request("Content-Length: 18446744073709551621", body=b"abcde"),
    "a coding that is not chunked": a_request("Transfer-Encoding: gzip", body=b"abcde"),
    "a coding below chunked": a_request("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "a coding above chunked": a_request("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"),
    "identity": a_request("Transfer-Encoding: identity", "Content-Length: 5", body=b"abcde"),
    "chunked after an empty one": a_request("Transfer-Encoding: ,chunked", body=b"0\r\n\r\n"),
    "chunked twice": a_request(CHUNKED, CHUNKED, body=b"0\r\n\r\n"),
    "chunked with a parameter": a_request("Transfer-Encoding: chunked;a=b", body=b"0\r\n\r\n"),
    "chunked in quotes": a_request('Transfer-Encoding: "chunked"', body=b"0\r\n\r\n"),
    "chunked after a vertical tab": a_request("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "another word with chunked in it": a_request("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "no coding in its header": a_request("Transfer-Encoding: ", body=b"0\r\n\r\n"),
    "chunked in HTTP/1.0": a_request(CHUNKED, version="1.0", body=b"0\r\n\r\n"),
    "a folded header": a_request("X-A: b\r\n c"),
    "a folded first header": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n",
    "a folded coding": a_request("Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n"),
    "a bare CR in a value": a_request("X-A: b\rContent-Length: 5"),
    "a bare CR in a name": a_request("X-A\r: b"),
    "a bare LF between headers": a_request("X-A: b\nX-B: c"),
    "a bare LF at the end": b"GET / HTTP/1.1\r\nHost: a\n\n",
    "a bare LF after the first line": b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    "a NUL in a value": a_request("X-A: b\0c"),
    "a NUL in a name": a_request("X\0A: b"),
    "a NUL in the target": a_request(path="/\0"),
    "a control character in a value": a_request("X-A: b\x01"),
    "a space before a colon": a_request("Content-Length : 5", body=b"abcde"),
    "a tab before a colon": a_request("Transfer-Encoding\t: chunked", body=b"0\r\n\r\n"),
    "no colon": a_request("Content-Length 5", body=b"abcde"),
    "no name": a_request(": 5"),
    "a name that is no token": a_request("X(A): b"),
    "a space after the version": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a tab in the first line": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "bytes beyond ASCII in the target": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method in small letters": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": a_request(host=None),
    "two hosts": a_request("Host: b"),
    "the handshake of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}
BAD_CHUNKS = {
    "a size with a letter beyond F": b"5g\r\nabcde\r\n0\r\n\r\n",
    "no size": b"\r\nabcde\r\n0\r\n\r\n",
    "a size with a sign": b"+5\r\nabcde\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nabcde\r\n0\r\n\r\n",
    "a size with 0x": b"0x5\r\nabcde\r\n0\r\n\r\n",
    "a space before a size": b" 5\r\nabcde\r\n0\r\n\r\n",
    "a space after a size": b"5 \r\nabcde\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"10000000000000005\r\nabcde\r\n0\r\n\r\n",
    "a bare LF after a size": b"5\nabcde\r\n0\r\n\r\n",
    "a bare CR in an extension": b"5;a\rb\r\nabcde\r\n0\r\n\r\n",
    "a bare LF in an extension": b"5;a\nb\r\nabcde\r\n0\r\n\r\n",
    "no CRLF after a chunk": b"5\r\nabcde0\r\n\r\n",
    "a bare LF after a chunk": b"5\r\nabcde\n0\r\n\r\n",
    "a chunk that is longer than its size": b"5\r\nabcdefg\r\n0\r\n\r\n",
    "a length among the trailers": b"5\r\nabcde\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a coding among the trailers": b"5\r\nabcde\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folded trailer": b"5\r\nabcde\r\n0\r\nX-A: b\r\n c\r\n\r\n",
}
OTHER = {
    "an unknown version": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2 over HTTP/1.1's first line": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "another protocol": (b"PLAY / RTSP/1.0\r\n\r\n", 501),
    "a tunnel": (b"CONNECT b:80 HTTP/1.1\r\nHost: b:80\r\n\r\n" + HIDDEN, 501),
    "another expectation": (a_request("Expect: a miracle", body=b"abcde"), 417),
}


async def seen_and_answered(*pieces: bytes) -> tuple[list[str], bytes]:
    """The paths that reached a handler, and what was answered."""
    seen: list[str] = []

    async def handler(request: Request) -> Reply:
        seen.append(request.path)
        return Response(200, await request.body())

    async with a_server(handler) as (_, port):
        return seen, await reply_to(port, *pieces)


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_what_is_ambiguous_is_refused(name: str) -> None:
    seen, answer = await seen_and_answered(AMBIGUOUS[name] + HIDDEN)
    assert (seen, statuses(answer)) == ([], [400])
    assert b"Connection: close" in answer


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_is_ambiguous_is_refused_in_any_pieces(name: str) -> None:
    raw = AMBIGUOUS[name] + HIDDEN
    cuts = [[raw[:at], raw[at:]] for at in range(1, len(raw))]
    for pieces in ([raw[at : at + 1] for at in range(len(raw))], *cuts):
        requests = parsed(*pieces)
        (error,) = requests.waiting
        assert isinstance(error, HttpError)
        assert (error.status, requests.is_deaf) == (400, True)


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_body_in_bad_chunks_is_refused(name: str) -> None:
    seen, answer = await seen_and_answered(a_request(CHUNKED, body=BAD_CHUNKS[name]) + HIDDEN)
    assert (seen, statuses(answer)) == ([], [400])


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_handler_that_streams_a_body_gets_an_error_for_bad_chunks(name: str) -> None:
    seen, answer = await seen_and_answered(a_request(CHUNKED), BAD_CHUNKS[name] + HIDDEN)
    assert (seen, statuses(answer)) == (["/"], [400])


@pytest.mark.parametrize("name", OTHER)
async def test_other_protocols_are_refused(name: str) -> None:
    raw, status = OTHER[name]
    seen, answer = await seen_and_answered(raw)
    assert (seen, statuses(answer)) == ([], [status])


async def test_requests_before_an_ambiguous_one_are_answered() -> None:
    seen, answer = await seen_and_answered(
        a_request(path="/1") + a_request(path="/2", body=b"x") + AMBIGUOUS["two lengths"]
    )
    assert (seen, statuses(answer)) == (["/1", "/2"], [200, 200, 400])


async def test_what_follows_a_request_that_closes_is_dropped() -> None:
    seen, answer = await seen_and_answered(a_request("Connection: close", path="/1") + HIDDEN)
    assert (seen, statuses(answer)) == (["/1"], [200])


@pytest.mark.parametrize("framing", ["Content-Length: 5", CHUNKED])
async def test_an_upgrade_is_not_followed_and_its_request_is_served(framing: str) -> None:
    """Java's client asks so for HTTP/2, with its first request."""
    body = b"abcde" if framing.startswith("Content") else b"5\r\nabcde\r\n0\r\n\r\n"
    asked = a_request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", framing, path="/1", body=body)
    last = a_request("Connection: close", path="/2", body=b"xyz")
    for pieces in ([asked + asked + last], [(asked + last)[at : at + 3] for at in range(0, len(asked + last), 3)]):
        seen, answer = await seen_and_answered(*pieces)
        assert seen == ["/1"] * (len(seen) - 1) + ["/2"]
        assert statuses(answer) == [200] * len(seen)
        assert answer.count(b"\r\n\r\nabcde") == len(seen) - 1
        assert answer.endswith(b"xyz")
