"""What only one of the routers that share a Redis does."""

from __future__ import annotations

import logging

from router.shared.redis.line import RedisLine
from router.shared.store.base import StoreFailed
from tls.certificates import Certificates

PATIENCE_S = 1.0
KEPT_S = 40 * 86_400
"""Longer than a month, the longest period of a budget."""

_log = logging.getLogger("pointsman.alerts")


class Once:
    """Names that were taken, each by one router, for KEPT_S. While Redis is away every router may take a name."""

    def __init__(self, url: str, *, prefix: str, certificates: Certificates | None = None) -> None:
        self._line = RedisLine(url, certificates, timeout_s=PATIENCE_S)
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<Once {self._prefix}>"

    async def is_first(self, name: str) -> bool:
        """Take `name`; whether no router had it."""
        try:
            async with self._line.calls() as redis:
                return bool(await redis.set(f"{self._prefix}{name}", "", nx=True, ex=KEPT_S))
        except StoreFailed as failure:
            _log.info("Redis is away, so an alert may be sent twice: %s", failure.fault)
            return True

    async def close(self) -> None:
        """Close the connections."""
        await self._line.close()
