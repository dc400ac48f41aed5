"""An engine at an https:// address: certificates of the pool, and reasons for those that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backends.http.client import HttpClient
from backends.http.exchange import HttpOptions
from http1.request import Request, Response
from http1.server import HttpServer
from policies.errors import BackendFailed, Unreached
from tests.tls.authority import Authority
from tls.certificates import Certificates
from tls.listener import TlsListener
from tls.settings import HTTP_ALPN, TlsSettings


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def hello(_: Request) -> Response:
    return Response(200, b"hello")


@asynccontextmanager
async def an_engine(settings: TlsSettings) -> AsyncIterator[str]:
    server = HttpServer(hello)
    listener = TlsListener(server.connection, Certificates(settings, is_server=True, what="engine", alpn=HTTP_ALPN))
    port = await listener.listen("127.0.0.1", 0)
    try:
        yield f"https://localhost:{port}"
    finally:
        await listener.close()
        await server.close()


async def page(url: str, settings: TlsSettings | None) -> bytes:
    tls = None if settings is None else Certificates(settings, is_server=False, what="pool vllm", alpn=HTTP_ALPN)
    client = HttpClient("vllm-0", url, HttpOptions(tls=tls))
    try:
        return (await client.get("/health")).body
    finally:
        await client.close()


async def test_it_is_reached_with_the_pools_certificates(authority: Authority) -> None:
    async with an_engine(authority.server(authority.issue("engine"))) as url:
        assert await page(url, authority.client(authority.issue("router"))) == b"hello"


async def test_an_unknown_authority_is_named_in_the_error_and_in_the_log(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with an_engine(authority.server(authority.issue("engine"), mutual=False)) as url:
        with pytest.raises(Unreached, match="its certificate is signed by a CA that is not trusted"):
            await page(url, None)
        assert not caplog.messages
        with pytest.raises(Unreached, match="is not pinned"):
            await page(url, authority.client(pins=frozenset({"0" * 64})))
        assert caplog.messages[0].startswith(f"pool vllm: no TLS with {url}: its key sha256:")


async def test_an_engine_that_wants_a_certificate_says_so(authority: Authority) -> None:
    async with an_engine(authority.server(authority.issue("engine"))) as url:
        with pytest.raises(BackendFailed, match="the other side wants a certificate"):
            await asyncio.wait_for(page(url, authority.client()), 10)
