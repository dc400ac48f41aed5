"""A feed over ZeroMQ, for vLLM and SGLang: SUB for new messages, DEALER for replays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from backends.events.nouns import Batch, MalformedEvents
from backends.reconnect import Backoff
from router.fleet.feeds.health import FeedHealth
from router.fleet.feeds.heard import HeardSource
from router.fleet.feeds.options import FeedSpec
from router.fleet.feeds.sink import EventSink
from router.fleet.feeds.tracker import Message, Replay, Tracker

_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES
_MOST_MESSAGE_BYTES = 4 << 20
"""Of the events of one step: those of 200,000 tokens and more."""

_LARGE = 16 << 10
"""Larger messages are decoded on a thread: events that cannot be read take 4 us each."""

_MOST_QUEUED = 20_000
_TURN = 32
"""Messages taken in a row before other tasks run: ZeroMQ returns waiting messages without yielding."""

_BROKEN = {
    zmq.Event.DISCONNECTED: "it closed the connection",
    zmq.Event.CLOSED: "it refused the connection",
    zmq.Event.CONNECT_RETRIED: "it refused the connection",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it does not speak ZeroMQ",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it did not let us in",
    zmq.Event.MONITOR_STOPPED: "the socket was closed",
}


@dataclass(frozen=True, slots=True)
class ZmqDialect:
    """One engine's message format: how payloads are decoded, and where the epoch is, if anywhere."""

    decode: Callable[[bytes], Batch]
    epoch_of: Callable[[bytes], str | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts: for a connection, for the next piece of a replay, and before a quiet engine is asked."""

    connect_s: float = 10.0
    replay_s: float = 5.0
    tick_s: float = 1.0
    check_every_s: float = 30.0
    first_backoff_s: float = 0.1
    longest_backoff_s: float = 10.0


class _Broken(Exception):
    """The connection is unusable; the message gives the reason."""


class ZmqFeed:
    """Keeps one subscription to the engine of `spec` and passes its events to `sink`, for as long as it runs."""

    def __init__(
        self,
        spec: FeedSpec,
        sink: EventSink,
        *,
        dialect: ZmqDialect,
        context: zmq.asyncio.Context,
        patience: Patience = Patience(),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = str(spec.source)
        self._spec, self._dialect, self._context, self._patience, self._sleep = spec, dialect, context, patience, sleep
        tracker = Tracker(replays=spec.replay is not None, check_every_s=patience.check_every_s)
        self._heard = HeardSource(spec.source, sink, tracker, clock=clock)
        self._backoff = Backoff(
            rng or random.Random(), first_s=patience.first_backoff_s, longest_s=patience.longest_backoff_s
        )
        self._wish = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ZmqFeed of {self._spec.engine} at {self._spec.events}: {self._heard!r}>"

    def health(self) -> Sequence[FeedHealth]:
        """Its present state."""
        return (self._heard.health(),)

    async def run(self) -> None:
        """Connect, listen, and do so again whenever the connection is lost, until cancelled."""
        try:
            while True:
                try:
                    await self._listen_once()
                except (_Broken, zmq.ZMQError, TimeoutError) as error:
                    self._heard.lost(str(error) or f"no connection within {self._patience.connect_s:g} s")
                await self._sleep(self._backoff.next_s())
        finally:
            self._heard.lost("it was closed")

    async def _listen_once(self) -> None:
        """Subscribe and listen until the connection breaks, which raises."""
        subscriber = self._context.socket(zmq.SUB)
        monitor = subscriber.get_monitor_socket()
        try:
            _limit(subscriber)
            # no automatic reconnect by ZeroMQ: messages missed meanwhile must be requested first
            subscriber.setsockopt(zmq.RECONNECT_IVL, -1)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._spec.topic.encode())
            subscriber.connect(self._spec.events)
            async with asyncio.timeout(self._patience.connect_s):
                await _until_connected(monitor)
            self._backoff.reset()
            self._heard.connected()
            self._wish.set()
            await _first_of(self._hear(subscriber), _until_broken(monitor), self._keep_whole())
        finally:
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    async def _hear(self, subscriber: zmq.asyncio.Socket) -> None:
        taken = 0
        while True:
            frames = await subscriber.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == _SEQ_BYTES and frames[1] != _END:
                topic, seq, payload = frames
                epoch = self._dialect.epoch_of(topic)
                self._heard.hear(await self._decoded(_number(seq), payload, epoch))
                if self._heard.wanted is not None:
                    self._wish.set()
            else:
                self._misshapen(frames)
            taken += 1
            if taken % _TURN == 0:
                await asyncio.sleep(0)

    async def _keep_whole(self) -> None:
        """Request missing messages, one replay at a time, and from time to time check for losses."""
        answered = 0
        while True:
            with suppress(TimeoutError):
                # not wait_for, which on 3.11 loses a cancellation that comes together with the event
                async with asyncio.timeout(self._patience.tick_s):
                    await self._wish.wait()
            self._wish.clear()
            self._heard.tick()
            while (wish := self._heard.wanted) is not None and wish.number != answered:
                answered = wish.number
                await self._replay(wish)

    async def _replay(self, wish: Replay) -> None:
        assert self._spec.replay is not None, "a replay is wanted from an engine without replays"
        # a new socket for each request, so that late answers to an earlier one are ignored
        dealer = self._context.socket(zmq.DEALER)
        try:
            _limit(dealer)
            dealer.connect(self._spec.replay)
            await dealer.send_multipart([b"", wish.start.to_bytes(_SEQ_BYTES, "big")])
            taken = 0
            while self._heard.wanted is wish:
                async with asyncio.timeout(self._patience.replay_s):
                    frames = await dealer.recv_multipart()
                # [empty, seq, payload], with the topic before seq since vllm#45177
                if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != _SEQ_BYTES:
                    self._misshapen(frames)
                elif frames[-2] == _END:
                    self._heard.replay_ended(wish.number)
                    return
                else:
                    seq = _number(frames[-2])
                    self._heard.replayed(wish.number, await self._decoded(seq, frames[-1]))
                taken += 1
                if taken % _TURN == 0:
                    await asyncio.sleep(0)
        except (TimeoutError, zmq.ZMQError) as error:
            why = str(error) or f"no answer within {self._patience.replay_s:g} s"
            self._heard.replay_failed(wish.number, f"{self._spec.replay} did not replay missed messages: {why}")
        finally:
            dealer.close(linger=0)

    async def _decoded(self, seq: int, payload: bytes, epoch: str | None = None) -> Message:
        decode = self._dialect.decode
        if len(payload) > _LARGE:
            decode = await asyncio.to_thread(_tried, decode, payload)
        return self._heard.decoded(decode, seq, payload, epoch)

    def _misshapen(self, frames: Sequence[bytes]) -> None:
        """It is unknown which message this was; if it was one, its number will be missing."""
        self._heard.tracker.counts.undecodable += 1
        self._heard.trouble = f"a message of {len(frames)} frames is not one of {self._spec.engine}"


def _tried(decode: Callable[[bytes], Batch], payload: bytes) -> Callable[[bytes], Batch]:
    """What `decode` does with `payload`, done already."""
    try:
        batch = decode(payload)
    except MalformedEvents as error:
        malformed = error

        def refuse(_: bytes) -> Batch:
            raise malformed

        return refuse
    return lambda _: batch


async def _until_connected(monitor: zmq.asyncio.Socket) -> None:
    while True:
        event = await _event(monitor)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return
        if event in _BROKEN:
            raise _Broken(_BROKEN[event])


async def _until_broken(monitor: zmq.asyncio.Socket) -> None:
    while True:
        event = await _event(monitor)
        if event in _BROKEN:
            raise _Broken(_BROKEN[event])


async def _event(monitor: zmq.asyncio.Socket) -> zmq.Event:
    return zmq.Event(parse_monitor_message(await monitor.recv_multipart())["event"])


async def _first_of(*works: Awaitable[None]) -> None:
    """Run all until the first one ends, then cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _limit(socket: zmq.asyncio.Socket) -> None:
    """Bound the queues, and detect a peer that vanished."""
    socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)


def _number(seq: bytes) -> int:
    return int.from_bytes(seq, "big")
