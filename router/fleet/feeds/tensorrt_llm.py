"""A feed from TensorRT-LLM, which gives each event only once: one router drains it and relays the events to all.

Source: trtllm-serve, POST /kv_cache_events; it needs `event_buffer_max_size` > 0 in the server's KV cache settings.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import aiohttp

from backends.events import tensorrt_llm
from backends.events.nouns import Batch, MalformedEvents
from backends.nesting import FEW_BYTES
from backends.reconnect import Backoff
from router.fleet.feeds.health import FeedHealth
from router.fleet.feeds.heard import HeardSource
from router.fleet.feeds.options import FeedSpec
from router.fleet.feeds.relay import Relay, Relayed, RelayForgot
from router.fleet.feeds.sink import EventSink, RankCache
from router.fleet.feeds.tracker import Message, Tracker

_PATH = "/kv_cache_events"
_OUT_OF_TOUCH = b""
"""Relayed instead of events when the engine cannot be reached: it may be restarted before it is back."""

_UNHEARD = b"null"
"""Relayed instead of events when the engine does not return them: known blocks get old. Any later drain ends that."""

_MOST_RANKS = 1024

_TURN = 64
"""Events between two turns of the event loop."""

_MOST_BYTES = 64 << 20


class TensorRTFeed:
    """Drains the engine of `spec` while it holds the lease, and passes to `sink` the events of every holder.

    `owner` names this router; no two may have the same name. Each attention-DP rank is a source of its own. Events are
    numbered, so events lost with an answer or an earlier holder are noticed, and the known blocks are cleared.
    """

    def __init__(
        self,
        spec: FeedSpec,
        sink: EventSink,
        *,
        relay: Relay,
        owner: str,
        poll_s: float = 0.1,
        lease_s: float = 5.0,
        answer_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = str(spec.source)
        self._spec, self._sink, self._relay, self._owner = spec, sink, relay, owner
        self._poll_s, self._lease_s, self._clock, self._sleep = poll_s, lease_s, clock, sleep
        self._timeout = aiohttp.ClientTimeout(total=answer_s)
        self._url = spec.events.rstrip("/").removesuffix(_PATH) + _PATH
        self._backoff = Backoff(rng or random.Random())
        self._ranks: dict[int, HeardSource] = {}
        self._highest_token = 0
        self._is_unheard = False
        self._rank(0)

    def __repr__(self) -> str:
        return f"<TensorRTFeed at {self._url}: {len(self._ranks)} ranks>"

    def health(self) -> Sequence[FeedHealth]:
        """The present state of each rank."""
        return tuple(heard.health() for heard in self._ranks.values())

    async def run(self) -> None:
        """Drain or wait for the lease, and read the relay, until cancelled."""
        async with aiohttp.ClientSession(timeout=self._timeout) as http:
            works = [asyncio.create_task(work) for work in (self._keep_hearing(), self._keep_draining(http))]
            try:
                # neither of the two tasks is of use without the other
                done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                for work in done:
                    work.result()
            finally:
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)

    async def _keep_draining(self, http: aiohttp.ClientSession) -> None:
        claimed_at, token = -self._lease_s, None
        try:
            while True:
                try:
                    if token is None or self._clock() - claimed_at >= self._lease_s / 3:
                        # measured before the claim, so that the lease never seems to last longer than it does
                        claimed_at = self._clock()
                        token = await self._relay.claim(self.name, self._owner, self._lease_s)
                        self._reachable()
                    if token is None:
                        await self._sleep(self._lease_s / 3)
                        continue
                    await self._drain(http, token)
                    await self._sleep(self._poll_s)
                except OSError as error:
                    token = None
                    self._doubt(f"the relay cannot be reached: {error}")
                    await self._sleep(self._backoff.next_s())
        finally:
            if token is not None:
                # an error here would replace the cancellation
                with suppress(OSError):
                    await asyncio.shield(self._relay.release(self.name, self._owner))

    async def _drain(self, http: aiohttp.ClientSession, token: int) -> None:
        """Drain the engine and relay its events. Raises OSError if the relay cannot be reached."""
        try:
            async with http.post(self._url) as reply:
                body = await _read(reply)
                if reply.status != 200:
                    raise MalformedEvents(f"{self._url} answered {reply.status}")
        except aiohttp.ClientConnectionError as error:
            await self._relay.publish(self.name, token, _OUT_OF_TOUCH)
            self._trouble(f"{self._url} cannot be reached: {error}")
            await self._sleep(self._backoff.next_s())
        except (aiohttp.ClientError, TimeoutError, MalformedEvents) as error:
            # the numbers of the next events show whether this drain took any
            if not self._is_unheard:
                await self._relay.publish(self.name, token, _UNHEARD)
            self._trouble(str(error) or f"{self._url} did not answer in time")
            await self._sleep(self._backoff.next_s())
        else:
            self._backoff.reset()
            if len(body) > len(b"[]") or self._is_unheard:
                await self._relay.publish(self.name, token, body)

    async def _keep_hearing(self) -> None:
        backoff, position = Backoff(random.Random(self._owner)), None
        while True:
            try:
                async for relayed in self._relay.hear(self.name, after=position):
                    backoff.reset()
                    position = relayed.position
                    await self._hear(relayed)
                    # payloads kept for late readers arrive without a pause
                    await asyncio.sleep(0)
            except RelayForgot:
                position, self._highest_token = None, 0
                continue
            except OSError as error:
                self._doubt(f"the relay cannot be reached: {error}")
            await self._sleep(backoff.next_s())

    async def _hear(self, relayed: Relayed) -> None:
        if relayed.token < self._highest_token:
            # an earlier holder that does not know of the new one yet; numbers show that its events are missing
            return
        self._highest_token = relayed.token
        if relayed.payload == _OUT_OF_TOUCH:
            self._lose("the engine could not be reached")
            return
        if relayed.payload == _UNHEARD:
            self._is_unheard = True
            self._doubt(self._rank(0).trouble or "the engine does not return its events")
            return
        if self._is_unheard:
            self._is_unheard = False
            self._trouble("")
        self._reachable()
        try:
            if len(relayed.payload) > FEW_BYTES:
                events = await asyncio.to_thread(tensorrt_llm.decode, relayed.payload)
            else:
                events = tensorrt_llm.decode(relayed.payload)
        except MalformedEvents as error:
            self._rank(0).tracker.counts.undecodable += 1
            self._lose(str(error))
            return
        for number, event in enumerate(events, 1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            if event.seq is None or (event.rank not in self._ranks and len(self._ranks) >= _MOST_RANKS):
                self._rank(0).tracker.counts.undecodable += 1
                self._lose("an event has no number")
                continue
            heard = self._rank(event.rank)
            heard.is_connected, heard.trouble = True, ""
            heard.tracker.counts.unknown += event.unknown
            heard.tracker.counts.undecodable += event.malformed
            heard.hear(Message(event.seq, Batch(event.events)))

    def _rank(self, rank: int) -> HeardSource:
        if rank not in self._ranks:
            source = RankCache(self._spec.source.backend, rank)
            self._ranks[rank] = HeardSource(source, self._sink, Tracker(replays=False), clock=self._clock)
        return self._ranks[rank]

    def _lose(self, trouble: str) -> None:
        for heard in self._ranks.values():
            heard.lost(trouble)

    def _doubt(self, trouble: str) -> None:
        for heard in self._ranks.values():
            heard.doubt(trouble)

    def _trouble(self, trouble: str) -> None:
        for heard in self._ranks.values():
            heard.trouble = trouble

    def _reachable(self) -> None:
        if self._is_unheard:
            return
        for heard in self._ranks.values():
            heard.trust()


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in reply.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise MalformedEvents(f"{reply.url} answered more than {_MOST_BYTES} bytes")
    return bytes(body)
