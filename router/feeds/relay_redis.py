"""A relay through Redis: the lease is a key that expires, what was drained is a stream of bounded length.

A router that starts late, or was cut off for a while, reads on where it was, as far as the stream goes back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from router.feeds.relay import Relayed
from router.store.redis import MUTE_S

_CLAIM = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return false end
local token = redis.call('HGET', KEYS[1], 'token')
if not token then
    local now = redis.call('TIME')
    token = string.format('%d', now[1] * 1000000 + now[2])
    redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'token', token)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token
"""
"""The token is the time at which the lease was taken, so that it grows even if Redis forgets everything."""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""

_BLOCK_MS = 1000
_MOST_AT_ONCE = 100


class RedisRelay:
    """A relay for routers that share a Redis (6.2 or newer). `redis` answers with bytes and is closed with the relay.

    Of each channel the last `most_kept` drains are kept, approximately.
    """

    def __init__(self, redis: Redis, *, prefix: str = "pointsman:feeds:", most_kept: int = 10_000) -> None:
        self._redis, self._prefix, self._most_kept = redis, prefix, most_kept
        self._claim: Callable[..., Any] = redis.register_script(_CLAIM)
        self._release: Callable[..., Any] = redis.register_script(_RELEASE)

    def __repr__(self) -> str:
        return f"<RedisRelay at {self._prefix}>"

    @classmethod
    def at(cls, url: str) -> RedisRelay:
        """A relay at `url`, which need not be there yet."""
        retry, mute_s = Retry(NoBackoff(), 0), MUTE_S
        return cls(Redis.from_url(url, retry=retry, socket_timeout=mute_s, socket_connect_timeout=mute_s))

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        """See Relay."""
        with _as_os_error():
            token = await self._claim(keys=[self._lease(channel)], args=[owner, max(1, int(ttl_s * 1000))])
        return None if token is None else int(token)

    async def release(self, channel: str, owner: str) -> None:
        """See Relay."""
        with _as_os_error():
            await self._release(keys=[self._lease(channel)], args=[owner])

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        """See Relay."""
        entry: dict[Any, Any] = {"token": token, "payload": payload}
        with _as_os_error():
            await self._redis.xadd(self._stream(channel), entry, maxlen=self._most_kept, approximate=True)

    async def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
        """See Relay. Ends with OSError when Redis is out of reach."""
        stream, last = self._stream(channel), after or "0"
        while True:
            with _as_os_error():
                found: Any = await self._redis.xread({stream: last}, count=_MOST_AT_ONCE, block=_BLOCK_MS)
            for _, entries in found or ():
                for number, entry in entries:
                    last = number.decode()
                    yield Relayed(int(entry[b"token"]), entry[b"payload"], last)

    async def close(self) -> None:
        """See Relay."""
        await self._redis.aclose()

    def _lease(self, channel: str) -> str:
        return f"{self._prefix}{{{channel}}}:lease"

    def _stream(self, channel: str) -> str:
        return f"{self._prefix}{{{channel}}}:events"


@contextmanager
def _as_os_error() -> Any:
    try:
        yield
    except RedisConnectionError as error:
        raise ConnectionError(str(error)) from error
    except RedisError as error:
        raise OSError(f"redis: {error}") from error
