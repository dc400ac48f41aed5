"""Redis over TLS: with certificates of both sides, which are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.shared.keys.redis import RedisKeys
from router.shared.redis.line import RedisLine
from router.shared.store.base import Fault, StoreFailed
from router.shared.store.redis import RedisStore
from tests.router.shared.store.parts import RedisServer, a_line, a_redis
from tests.tls.authority import Authority, Issued
from tls.certificates import Certificates
from tls.settings import TlsSettings


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def guarding(authority: Authority, pins: frozenset[str] = frozenset()) -> ssl.SSLContext:
    settings = authority.server(authority.issue("redis"), pins=pins)
    return Certificates(settings, is_server=True, what="redis").context()


def ours(settings: TlsSettings) -> Certificates:
    return Certificates(settings, is_server=False, what="store", clock=iter(range(10**6)).__next__)


async def test_quotas_keys_and_replicas_are_shared_with_certificates_of_both_sides(
    server: RedisServer, authority: Authority
) -> None:
    certificates = ours(authority.client(authority.issue("router")))
    async with a_line(server, guarding(authority)) as line:
        assert line.url.startswith("rediss://")
        store = RedisStore(line.url, certificates=certificates)
        await store.renew(())
        await store.close()
        keys = RedisKeys(line.url, certificates=certificates)
        assert await keys.look() is not None
        await keys.close()
        replicas = RedisLine(line.url, certificates)
        async with replicas.pipe() as pipe:
            pipe.ping()
            assert await pipe.execute() == [True]
        await replicas.close()
        assert line.accepted == 3


async def test_a_server_of_another_authority_is_as_one_that_is_gone(
    server: RedisServer, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with a_line(server, guarding(stranger)) as line:
        store = RedisStore(line.url, certificates=ours(authority.client(authority.issue("router"))))
        with pytest.raises(StoreFailed, match=r"(?i)certificate verify failed") as failed:
            await store.renew(())
        assert failed.value.fault is Fault.GONE
        await store.close()


async def test_a_new_connection_shows_the_renewed_certificate(
    server: RedisServer, authority: Authority, tmp_path: Path
) -> None:
    pair, renewed = Issued(tmp_path / "tls.crt", tmp_path / "tls.key"), authority.issue("renewed")
    pair.replace_with(authority.issue("first"))
    certificates = ours(authority.client(pair))
    async with a_line(server, guarding(authority, pins=frozenset({renewed.pin}))) as line:
        first = RedisStore(line.url, certificates=certificates)
        with pytest.raises(StoreFailed):
            await first.renew(())
        pair.replace_with(renewed)
        await first.renew(())
        await first.close()
