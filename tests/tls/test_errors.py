"""Why an address did not answer, in words for people, whichever library asked."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.tls.authority import Authority
from tls.certificates import Certificates
from tls.errors import why_unanswered
from tls.settings import HTTP_ALPN, TlsSettings

EXPECTED = {
    "plain HTTP asked by https": "it does not speak TLS",
    "TLS asked by http": "it hung up without an answer",
    "unknown CA": "its certificate is signed by a CA that is not trusted",
    "expired": "its certificate has expired",
    "wrong name": "its certificate is not for this address",
    # some servers hang up before their reason arrives
    "wants a certificate": ("the other side wants a certificate", "it hung up without an answer"),
    "nothing listens": "Connection refused",
    "no such name": ("Name or service not known", "Temporary failure in name resolution", "No address associated"),
}


@asynccontextmanager
async def a_mistake(name: str, authority: Authority, stranger: Authority) -> AsyncIterator[str]:
    """The URL of a server with this mistake, or of one that is asked in the wrong way."""
    if name == "no such name":
        yield "https://no-such-host.invalid:1"
        return
    issued = {
        "unknown CA": lambda: stranger.issue("server"),
        "expired": lambda: authority.issue("old", days=-1),
        "wrong name": lambda: authority.issue("other", names="DNS:elsewhere"),
    }.get(name, lambda: authority.issue("server"))()
    context = None
    if name not in ("plain HTTP asked by https", "nothing listens"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(issued.cert, issued.key)
        if name == "wants a certificate":
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(authority.cert)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # a ClientHello too gets an answer, as from any HTTP server
            await reader.read(65536)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            pass
        finally:
            writer.close()

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    if name == "nothing listens":
        server.close()
        await server.wait_closed()
    scheme = "http" if name == "TLS asked by http" else "https"
    yield f"{scheme}://127.0.0.1:{port}"
    server.close()


async def asked_by_urllib(url: str, context: ssl.SSLContext) -> Exception:
    def ask() -> Exception:
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            opener.open(url, timeout=20).close()
        except (OSError, http.client.HTTPException) as error:
            return error
        raise AssertionError("it answered")

    return await asyncio.to_thread(ask)


async def asked_by_aiohttp(url: str, context: ssl.SSLContext) -> Exception:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        try:
            async with session.get(url):
                raise AssertionError("it answered")
        except (aiohttp.ClientError, OSError) as error:
            return error


@pytest.mark.parametrize("asked", [asked_by_urllib, asked_by_aiohttp])
@pytest.mark.parametrize("name", EXPECTED)
async def test_each_mistake_has_its_name_whichever_library_asks(
    name: str, asked: Callable, authority: Authority, stranger: Authority
) -> None:
    settings = TlsSettings(ca=str(authority.cert))
    context = Certificates(settings, is_server=False, what="the client", alpn=HTTP_ALPN).context()
    async with a_mistake(name, authority, stranger) as url:
        error = await asked(url, context)
    reason, hint = why_unanswered(url, error)
    assert reason.startswith(EXPECTED[name])
    assert "_ssl.c" not in reason + hint
    assert "Errno" not in reason
    is_of_tls = name not in ("nothing listens", "no such name")
    assert bool(hint) == is_of_tls, "what to do about it"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), "it was silent for too long"),
        (urllib.error.URLError(TimeoutError("timed out")), "it was silent for too long"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ConnectionResetError(104, "Connection reset by peer"), "it hung up without an answer"),
        (OSError(113, "No route to host"), "No route to host"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_that_are_not_of_tls_are_named_too(error: Exception, reason: str) -> None:
    assert why_unanswered("https://a", error)[0] == reason
