"""The connections to a Redis or Valkey (6.2 or newer): one server, the primary that Sentinels name, or a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from policies.sla.redis_address import RedisAddress, RedisKind, read_address
from router.shared.redis.certificates import LiveConnection, LiveSentinelConnection
from router.shared.redis.faults import faults
from router.shared.store.base import Fault, StoreFailed
from tls.certificates import Certificates

AnyRedis = Any
"""A redis.asyncio.Redis or RedisCluster: both have the commands, and no common type."""

MUTE_S = 5.0
"""A connection without data for this long is closed, if its caller has not given up before."""

_SENTINEL_S = 0.3
"""Deadline of one answer of a Sentinel: the next one is asked then."""


class RedisLine:
    """Connections to the Redis at `url` (`read_address`), without retries: its callers have deadlines, and know what
    may be repeated.

    After a failure no idle connection is used again. A server that answers with an error may have been replaced behind
    the same address (it is a replica now, loads its data, has another password), and one that says nothing may have
    gone without a word. `most` connections are open at a time, and a call that finds none free waits for one; None: as
    many as there are calls.
    """

    def __init__(
        self, url: str, certificates: Certificates | None = None, *, timeout_s: float = MUTE_S, most: int | None = None
    ) -> None:
        address = read_address(url)
        options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
        }
        self._sentinel: Sentinel | None = None
        self.redis: AnyRedis
        if address.kind is RedisKind.CLUSTER:
            self.redis = _cluster(address, options, certificates)
        elif address.kind is RedisKind.SENTINEL:
            self._sentinel = _sentinels(address, certificates)
            self.redis = _primary(self._sentinel, address, options, certificates)
        else:
            self.redis = _server(address, options, certificates, most)
        self._place, self.is_cluster = address.place, address.kind is RedisKind.CLUSTER

    def __repr__(self) -> str:
        return f"<RedisLine {self._place}>"

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[AnyRedis]:
        """The client. Failures of its calls are StoreFailed, and the next call makes a new connection."""
        try:
            with faults():
                yield self.redis
        except StoreFailed:
            await self.hang_up()
            raise

    @asynccontextmanager
    async def pipe(self) -> AsyncIterator[Any]:
        """A pipeline. Its failures are StoreFailed, and so are errors of the code inside that reads its answers."""
        try:
            async with self.calls() as client, client.pipeline(transaction=False) as pipe:
                yield pipe
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            await self.hang_up()
            raise StoreFailed(Fault.NONSENSE, f"unexpected answer from Redis: {error}") from error

    async def hang_up(self) -> None:
        """Close what is idle, and what is in use once its call has ended; a cluster is looked at anew."""
        with faults():
            if self.is_cluster:
                await self.redis.aclose()
                return
            pool = self.redis.connection_pool
            await pool.update_active_connections_for_reconnect()
            await pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close all connections."""
        if self.is_cluster:
            await self.redis.aclose()
        else:
            await self.redis.aclose(close_connection_pool=True)
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _server(
    address: RedisAddress, options: dict[str, Any], certificates: Certificates | None, most: int | None
) -> redis.asyncio.Redis:
    if most is None:
        pool = redis.asyncio.ConnectionPool.from_url(address.url, **options)
    else:
        pool = redis.asyncio.BlockingConnectionPool.from_url(address.url, max_connections=most, timeout=None, **options)
    if certificates is not None:
        pool.connection_class = LiveConnection
        pool.connection_kwargs["certificates"] = certificates
    return redis.asyncio.Redis(connection_pool=pool)


def _sentinels(address: RedisAddress, certificates: Certificates | None) -> Sentinel:
    user, password = address.sentinel
    found = Sentinel(  # type: ignore[no-untyped-call]
        address.hosts,
        sentinel_kwargs={
            "username": user,
            "password": password,
            "ssl": address.is_tls,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": _SENTINEL_S,
            "socket_connect_timeout": _SENTINEL_S,
        },
    )
    if certificates is not None:
        for sentinel in found.sentinels:
            sentinel.connection_pool.connection_class = LiveConnection
            sentinel.connection_pool.connection_kwargs["certificates"] = certificates
    return found


def _primary(
    sentinel: Sentinel, address: RedisAddress, options: dict[str, Any], certificates: Certificates | None
) -> redis.asyncio.Redis:
    if certificates is not None:
        options = {**options, "connection_class": LiveSentinelConnection, "certificates": certificates}
    elif address.is_tls:
        options = {**options, "ssl": True}
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        address.primary,
        sentinel,
        db=address.db,
        username=address.username,
        password=address.password,
        **options,
    )
    return redis.asyncio.Redis(connection_pool=pool)


def _cluster(
    address: RedisAddress, options: dict[str, Any], certificates: Certificates | None
) -> redis.asyncio.RedisCluster:
    cluster = redis.asyncio.RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        username=address.username,
        password=address.password,
        ssl=address.is_tls,
        # the nodes of the file stay those to ask first: all that were found may have been replaced
        dynamic_startup_nodes=False,
        **options,
    )
    if certificates is not None:
        # redis-py has no option for the class of a cluster's connections
        cluster.connection_kwargs.update(connection_class=LiveConnection, certificates=certificates)
        for node in cluster.startup_nodes:
            node.connection_class = LiveConnection
            node.connection_kwargs["certificates"] = certificates
    return cluster
