"""A relay through Redis: the lease is a key that expires, and drained events are in a stream of bounded length.

A router that starts late, or was cut off for a while, continues at its last position, as far as the stream goes back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router.fleet.feeds.relay import MOST_KEPT, MOST_KEPT_BYTES, Relayed, RelayForgot
from router.shared.redis.line import AnyRedis, RedisLine
from router.shared.redis.script import Script
from router.shared.store.base import StoreFailed
from tls.certificates import Certificates

_CLAIM = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return false end
local token = redis.call('HGET', KEYS[1], 'token')
if not token then
    local now, least = redis.call('TIME'), 0
    local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
    for i = 1, newest and #newest[2] or 0, 2 do
        if newest[2][i] == 'token' then least = (tonumber(newest[2][i + 1]) or 0) + 1 end
    end
    token = string.format('%.0f', math.max(least, now[1] * 1000000 + now[2]))
    redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'token', token)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token
"""
"""The token is the time at which the lease was taken, so that it grows even if Redis loses its data; and larger than
the last published one, so that it grows even if the clock goes back."""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""

_START = "0-0"
_BLOCK_MS = 1000
_MOST_AT_ONCE = 16
_OF_SO_MANY = 32
"""Number of drains for the mean size that bounds how many are kept."""

_KEPT_S = 86400
"""A channel without new events expires after this time."""


class RedisRelay:
    """A relay for routers that share the Redis at `url`, which need not be reachable yet.

    Of each channel the last `most_kept` drains are kept, or about `most_bytes` of them.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pointsman:feeds:",
        certificates: Certificates | None = None,
        most_kept: int = MOST_KEPT,
        most_bytes: int = MOST_KEPT_BYTES,
    ) -> None:
        self._line = RedisLine(url, certificates)
        self._prefix, self._most_kept, self._most_bytes = prefix, most_kept, most_bytes
        self._usual_bytes: dict[str, float] = {}
        self._claim, self._release = Script(_CLAIM), Script(_RELEASE)

    def __repr__(self) -> str:
        return f"<RedisRelay at {self._prefix}>"

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        keys = [self._lease(channel), self._stream(channel)]
        async with self._calls() as redis:
            token = await self._claim.run(redis, keys, [owner, max(1, int(ttl_s * 1000))])
        return None if token is None else int(token)

    async def release(self, channel: str, owner: str) -> None:
        async with self._calls() as redis:
            await self._release.run(redis, [self._lease(channel)], [owner])

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        entry: dict[Any, Any] = {"token": token, "payload": payload}
        usual = self._usual_bytes.get(channel, float(len(payload)))
        self._usual_bytes[channel] = usual = usual + (len(payload) - usual) / _OF_SO_MANY
        most = max(1, min(self._most_kept, int(self._most_bytes / max(1.0, usual))))
        async with self._calls() as redis, redis.pipeline(transaction=False) as pipe:
            pipe.xadd(self._stream(channel), entry, maxlen=most, approximate=True)
            pipe.expire(self._stream(channel), _KEPT_S)
            await pipe.execute()

    async def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
        """See Relay. Ends with OSError if Redis cannot be reached."""
        stream, last = self._stream(channel), after or _START
        while True:
            async with self._calls() as redis:
                found: Any = await redis.xread({stream: last}, count=_MOST_AT_ONCE, block=_BLOCK_MS)
                newest: Any = found or await redis.xrevrange(stream, count=1)
            if not found and last != _START and _place(newest[0][0] if newest else b"0-0") < _place(last.encode()):
                raise RelayForgot(f"{stream} begins anew")
            for _, entries in found or ():
                for number, entry in entries:
                    last = number.decode()
                    # entries of other programs cannot be read, and are skipped
                    if entry and entry.get(b"token", b"").isdigit() and b"payload" in entry:
                        yield Relayed(int(entry[b"token"]), entry[b"payload"], last)

    async def close(self) -> None:
        await self._line.close()

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[AnyRedis]:
        try:
            async with self._line.calls() as redis:
                yield redis
        except StoreFailed as failure:
            raise ConnectionError(f"redis: {failure}") from failure

    def _lease(self, channel: str) -> str:
        return f"{self._prefix}{{{channel}}}:lease"

    def _stream(self, channel: str) -> str:
        return f"{self._prefix}{{{channel}}}:events"


def _place(number: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split(b"-"))
