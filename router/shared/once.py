"""What only one of the routers that share a Redis does."""

from __future__ import annotations

import logging

import redis.asyncio
from redis import exceptions as failures
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.shared.redis_tls import use_certificates
from tls.certificates import Certificates

PATIENCE_S = 1.0
KEPT_S = 40 * 86_400
"""Longer than a month, the longest period of a budget."""

_log = logging.getLogger("pointsman.alerts")


class Once:
    """Names that were taken, each by one router, for KEPT_S. While Redis is away every router may take a name."""

    def __init__(self, url: str, *, prefix: str, certificates: Certificates | None = None) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
        )
        use_certificates(self._redis.connection_pool, certificates)
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<Once {self._prefix}>"

    async def is_first(self, name: str) -> bool:
        """Take `name`; whether no router had it."""
        try:
            return bool(await self._redis.set(f"{self._prefix}{name}", "", nx=True, ex=KEPT_S))
        except (failures.RedisError, OSError, TimeoutError) as error:
            _log.info("Redis is away, so an alert may be sent twice: %s", type(error).__name__)
            return True

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose(close_connection_pool=True)
