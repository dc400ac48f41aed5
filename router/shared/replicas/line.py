"""A connection to Redis or Valkey; all its failures are StoreFailed. Redis 6.2 or newer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.shared.redis_tls import use_certificates
from router.shared.store.base import Fault, StoreFailed
from router.shared.store.redis import MUTE_S, faults
from tls.certificates import Certificates

KEPT_S = 3600
"""Keys without a write expire after this time."""


class RedisLine:
    """One connection to the server at `url`, without deadlines and retries."""

    def __init__(self, url: str, certificates: Certificates | None = None) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=MUTE_S, socket_connect_timeout=MUTE_S
        )
        use_certificates(self._redis.connection_pool, certificates)

    @asynccontextmanager
    async def pipe(self) -> AsyncIterator[Any]:
        """A pipeline. Its failures are StoreFailed, and so are errors of the code inside that reads its answers."""
        try:
            with faults():
                async with self._redis.pipeline(transaction=False) as pipe:
                    yield pipe
        except StoreFailed:
            await self._hang_up()
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            await self._hang_up()
            raise StoreFailed(Fault.NONSENSE, f"unexpected answer from Redis: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    async def _hang_up(self) -> None:
        # answers that still arrive on this connection belong to earlier commands
        await self._redis.connection_pool.disconnect()
