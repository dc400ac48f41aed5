"""Registration of a shard: announces its address to routers repeatedly, and withdraws it when the shard stops."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from tls.certificates import Certificates
from tls.errors import sentence_of

TTL_S = 30.0
"""A router forgets a shard that has not been announced for this long."""

_EVERY_S = 10.0
_CALL_S = 5.0

_log = logging.getLogger("pointsman.announce")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The operators' ports of `routers` (a URL each) with their `key`, and the announced `address` in `pool`. `tls` is
    for https:// URLs; None: the system's authorities.
    """

    routers: Sequence[str]
    pool: str
    address: str
    key: str | None = field(default=None, repr=False)
    tls: Certificates | None = None


class Announcer:
    """Announces to each router in a task of its own. After an outage a router is announced to as soon as it is back."""

    def __init__(self, announcement: Announcement, *, every_s: float = _EVERY_S) -> None:
        self._what, self._every_s = announcement, every_s
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<Announcer of {self._what.address} to {len(self._what.routers)} routers>"

    async def start(self) -> None:
        """Start announcing."""
        key = {"authorization": f"Bearer {self._what.key}"} if self._what.key else {}
        self._http = aiohttp.ClientSession(
            headers=key,
            timeout=aiohttp.ClientTimeout(total=_CALL_S),
            connector=None if self._what.tls is None else aiohttp.TCPConnector(ssl=self._what.tls.live()),
        )
        self._tasks = [
            asyncio.create_task(self._keep_telling(router), name=f"announcing to {router}")
            for router in self._what.routers
        ]

    async def stop(self) -> None:
        """Withdraw the announcement from every reachable router, and end every task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await asyncio.gather(*(self._say(router, "unregister") for router in self._what.routers))
            await self._http.close()
            self._tasks, self._http = [], None

    async def _keep_telling(self, router: str) -> None:
        was_heard = True
        while True:
            refusal = await self._say(router, "register")
            if refusal is not None and was_heard:
                _log.warning("%s rejects this shard's announcement; retrying: %s", router, refusal)
            was_heard = refusal is None
            # jitter: not all shards announce at the same moment
            await asyncio.sleep(self._every_s * random.uniform(0.8, 1.0))

    async def _say(self, router: str, what: str) -> str | None:
        """Post the announcement to `router`: the reason if that failed, or None."""
        assert self._http is not None, "it was not started"
        body = {"pool": self._what.pool, "address": self._what.address, "ttl_s": TTL_S}
        try:
            async with self._http.post(f"{router.rstrip('/')}/backends/{what}", json=body) as reply:
                return None if reply.status == 200 else f"{reply.status}: {(await reply.text())[:300]}"
        except aiohttp.ClientSSLError as error:
            return sentence_of(error.os_error)
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or type(error).__name__


def reachable_address(listening: str, router: str) -> str:
    """`listening` (host:port) as `router` (a URL) can reach it: a wildcard becomes this machine's address."""
    host, _, port = listening.rpartition(":")
    if host not in {"0.0.0.0", "[::]", "::", ""}:  # noqa: S104 - that is what is asked
        return listening
    at = urlsplit(router)
    # connecting a UDP socket sends nothing, but selects the local address of the route
    with suppress(OSError):
        places = socket.getaddrinfo(at.hostname, at.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = places[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(place)
            ours = way.getsockname()[0]
            return f"[{ours}]:{port}" if ":" in ours else f"{ours}:{port}"
    return listening
