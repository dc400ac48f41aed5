"""How long a server may say nothing in the middle of its answer."""

from __future__ import annotations

import asyncio

import aiohttp


class Silence:
    """Reads a reply's body, which ends with SocketTimeoutError once the server has kept a reader waiting for `most_s`.

    One timer for the whole body, which looks when it fires how long the present wait has taken. aiohttp's own limit
    (`sock_read`) cancels a timer and makes another for everything that comes, 4 to 7 µs for each event of a stream. The
    creator closes it.
    """

    def __init__(self, reply: aiohttp.ClientResponse, most_s: float) -> None:
        self._content, self._most_s = reply.content, most_s
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._timer = self._loop.call_later(most_s, self._look)
        if reply.connection is not None and reply.connection.protocol is not None:
            # that of the head, which has come
            reply.connection.protocol.read_timeout = None

    def __repr__(self) -> str:
        return f"<Silence of at most {self._most_s} s{'' if self._waiting_since is None else ', waiting'}>"

    async def read(self) -> bytes:
        """What has come since the last time; nothing at the end."""
        self._waiting_since = self._loop.time()
        try:
            return await self._content.readany()
        finally:
            # a slow reader does not wait for the server
            self._waiting_since = None

    def close(self) -> None:
        """Listen no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due_at = (now if self._waiting_since is None else self._waiting_since) + self._most_s
        if due_at <= now:
            self._content.set_exception(aiohttp.SocketTimeoutError(f"nothing came for {self._most_s} s"))
        else:
            self._timer = self._loop.call_at(due_at, self._look)
