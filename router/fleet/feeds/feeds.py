"""All feeds of a router: made from its pools' options, run, watched, and ended."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from backends.base import EventPublisher
from backends.events import sglang, vllm
from backends.events.nouns import CacheEvent, Cleared
from policies.errors import BackendFailed, ConfigError
from policies.sla.pools import PoolSpec
from router.fleet.cluster.names import backend_name
from router.fleet.feeds.health import FeedHealth
from router.fleet.feeds.options import OVER_ZMQ, FeedSpec, feed_specs, found_specs, is_switched_off, published_specs
from router.fleet.feeds.relay import MemoryRelay, Relay
from router.fleet.feeds.sink import EventSink, RankCache
from router.fleet.feeds.tensorrt_llm import TensorRTFeed
from router.supervise import supervise

if TYPE_CHECKING:
    import zmq.asyncio


_log = logging.getLogger("pointsman.feeds")

_FIRST_ASKED_AGAIN_S, _ASKED_AGAIN_S = 1.0, 60.0
"""First and last interval in s after which a backend is asked again where it publishes, if it did not answer."""


class Feed(Protocol):
    """The feed of one engine process."""

    name: str

    async def run(self) -> None:
        """Listen until cancelled."""
        ...

    def health(self) -> Sequence[FeedHealth]:
        """The state of each of its sources."""
        ...


class _Tap:
    """Passes one feed's events to the sink until it is shut, whatever its task still sends then."""

    def __init__(self, sink: EventSink) -> None:
        self._sink, self.is_open = sink, True

    def hear(self, source: RankCache, event: CacheEvent) -> None:
        if self.is_open:
            self._sink.hear(source, event)

    def forget(self, backend: str) -> None:
        if self.is_open:
            self._sink.forget(backend)


@dataclass(frozen=True, slots=True)
class _Running:
    spec: FeedSpec
    feed: Feed
    tap: _Tap
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class _Named:
    """The pools of the file, and the feeds of each backend with an address there."""

    pools: Mapping[str, PoolSpec]
    listed: Mapping[str, tuple[FeedSpec, ...]]


class Feeds:
    """Receives the events of every backend of a pool with options for events, from its joining to its leaving.

    A backend of a pool without such options is asked where it publishes, if its kind can answer, and again whenever it
    becomes healthy: it may have been restarted.

    An async context manager: after it is left, none of its tasks runs. `sink` gets all events. `relay` is shared with
    the other routers; without one, this router is the only one. Raises ConfigError if an option is wrong, also for
    backends that are not found yet, or if ZeroMQ is needed and not installed.
    """

    def __init__(
        self,
        pools: Iterable[PoolSpec],
        sink: EventSink,
        *,
        relay: Relay | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self._has_zmq, self._has_complained = find_spec("zmq") is not None, False
        self._named = self._read(pools)
        self._sink, self._clock, self._on_failure = sink, clock, on_failure
        self._relay = relay or MemoryRelay(clock)
        self._rng = rng or random.Random()
        self._running: dict[str, tuple[_Running, ...]] = {}
        self._publishers: dict[str, tuple[EventPublisher, str]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None

    def __repr__(self) -> str:
        return f"<Feeds of {', '.join(self._running) or 'none'}>"

    def change(self, pools: Iterable[PoolSpec]) -> Callable[[], None]:
        """A function that puts `pools` into effect: their backends are heard then. Raises ConfigError, as above."""
        named = self._read(pools)

        def put_into_effect() -> None:
            self._named = named
            for backend, every in tuple(self._running.items()):
                # a source that a publisher or a found backend brought comes again with its backend
                specs = named.listed.get(backend)
                if specs and specs != tuple(running.spec for running in every):
                    for source in self._silence(backend):
                        self._sink.hear(source, Cleared())
                    self._running[backend] = tuple(self._begun(spec) for spec in specs)

        return put_into_effect

    def health(self) -> tuple[FeedHealth, ...]:
        """The state of each source now."""
        return tuple(state for feeds in self._running.values() for running in feeds for state in running.feed.health())

    def hears(self, backend: str) -> bool:
        """Whether there is a feed of `backend`."""
        return backend in self._running

    def join(self, backend: str, pool: str, address: str, publisher: EventPublisher | None = None) -> None:
        """Start the feeds of `backend` of `pool` at `address`, if the pool names events and there are none already.

        If the pool names none, ask the `publisher`.
        """
        if backend in self._running:
            return
        if specs := self._specs(backend, pool, address):
            self._running[backend] = tuple(self._begun(spec) for spec in specs)
        elif publisher is not None and (named := self._named.pools.get(pool)) and not is_switched_off(named):
            self._publishers[backend] = (publisher, address)
            self.ask(backend)

    def ask(self, backend: str) -> None:
        """Ask `backend` again where it publishes, if its feeds come from such an answer."""
        if backend in self._publishers and backend not in self._asking:
            task = asyncio.create_task(self._ask(backend), name=f"where {backend} publishes")
            self._asking[backend] = task
            task.add_done_callback(lambda _: self._asking.pop(backend, None))

    async def asked(self) -> None:
        """Wait until every backend that is being asked where it publishes has answered."""
        await asyncio.gather(*self._asking.values())

    def leave(self, backend: str) -> tuple[str, ...]:
        """`backend` is gone: end its feeds. Returns the names of its sources."""
        self._publishers.pop(backend, None)
        if (asking := self._asking.get(backend)) is not None:
            self._end(asking)
        return tuple(map(str, self._silence(backend)))

    async def __aenter__(self) -> Feeds:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [running.task for every in self._running.values() for running in every]
        tasks += [*self._ending, *self._asking.values()]
        self._running.clear()
        self._publishers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None
        finally:
            await self._relay.close()

    def _read(self, pools: Iterable[PoolSpec]) -> _Named:
        """The feeds that `pools` name. Raises ConfigError."""
        by_name = {pool.name: pool for pool in pools}
        # report wrong options now, not when the first backend is found
        nowhere = [found_specs(pool, pool.name, "127.0.0.1:1") for pool in by_name.values() if pool.is_found]
        listed = {name: specs for pool in by_name.values() for name, specs in _listed(pool)}
        needs_zmq = [spec for specs in (*listed.values(), *nowhere) for spec in specs if spec.engine in OVER_ZMQ]
        if needs_zmq and not self._has_zmq:
            hint = "pip install 'pointsman[feeds]', or leave events out"
            raise ConfigError(f"the events of {needs_zmq[0].source.backend} need pyzmq", hint=hint)
        return _Named(by_name, listed)

    def _specs(self, backend: str, pool: str, address: str) -> tuple[FeedSpec, ...]:
        spec = self._named.pools.get(pool)
        if backend in self._named.listed or spec is None or not spec.is_found:
            return self._named.listed.get(backend, ())
        return found_specs(spec, backend, address)

    async def _ask(self, backend: str) -> None:
        pause_s = _FIRST_ASKED_AGAIN_S
        while True:
            publisher, address = self._publishers[backend]
            try:
                specs = published_specs(backend, address, await publisher.event_addresses())
                break
            except BackendFailed:
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, _ASKED_AGAIN_S)
        if specs and not self._has_zmq:
            if not self._has_complained:
                self._has_complained = True
                _log.warning("%s publishes cache events; receiving them needs pip install 'pointsman[feeds]'", backend)
            return
        if specs != tuple(running.spec for running in self._running.get(backend, ())):
            for source in self._silence(backend):
                self._sink.hear(source, Cleared())
            self._running[backend] = tuple(self._begun(spec) for spec in specs)
            _log.info(
                "%s publishes cache events at %s", backend, ", ".join(spec.events for spec in specs) or "no place"
            )

    def _silence(self, backend: str) -> list[RankCache]:
        """End the feeds of `backend`. Returns its sources."""
        every = self._running.pop(backend, ())
        sources = [health.source for running in every for health in running.feed.health()]
        for running in every:
            running.tap.is_open = False
            self._end(running.task)
        self._sink.forget(backend)
        return sources

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _begun(self, spec: FeedSpec) -> _Running:
        tap = _Tap(self._sink)
        feed = self._made(spec, tap)
        work = supervise(f"events of {feed.name}", feed.run, on_failure=self._on_failure)
        return _Running(spec, feed, tap, asyncio.create_task(work, name=f"events of {feed.name}"))

    def _made(self, spec: FeedSpec, sink: EventSink) -> Feed:
        if spec.engine not in OVER_ZMQ:
            owner = uuid.UUID(int=self._rng.getrandbits(128)).hex
            return TensorRTFeed(spec, sink, relay=self._relay, owner=owner, clock=self._clock, rng=self._rng)
        # imported late: a router without such feeds runs without pyzmq
        import zmq.asyncio

        from router.fleet.feeds.zmq_feed import ZmqDialect, ZmqFeed

        self._context = self._context or zmq.asyncio.Context()
        dialects = {
            "vllm": ZmqDialect(vllm.decode),
            "sglang": ZmqDialect(sglang.decode, sglang.epoch_of),
        }
        dialect = dialects[spec.engine]
        return ZmqFeed(spec, sink, dialect=dialect, context=self._context, clock=self._clock, rng=self._rng)


def _listed(pool: PoolSpec) -> Iterator[tuple[str, tuple[FeedSpec, ...]]]:
    """Backends with addresses in the file, each with its feeds."""
    names = tuple(backend_name(pool.name, number) for number in range(len(pool.at)))
    specs = feed_specs(pool, names)
    yield from ((name, tuple(spec for spec in specs if spec.source.backend == name)) for name in names)
