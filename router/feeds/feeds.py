"""All feeds of a router: made from its pools' options, run, watched, and ended."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from backends.events import sglang, vllm
from backends.events.nouns import CacheEvent
from policies.errors import ConfigError
from policies.sla.config import PoolSpec
from router.cluster.names import backend_name
from router.feeds.health import FeedHealth
from router.feeds.options import FeedSpec, feed_specs, found_specs
from router.feeds.relay import MemoryRelay, Relay
from router.feeds.sink import EventSink, Source
from router.feeds.tensorrt_llm import TensorRTFeed
from router.supervise import supervise

if TYPE_CHECKING:
    import zmq.asyncio


_OVER_ZMQ = frozenset({"vllm", "sglang"})


class Feed(Protocol):
    """One engine process that is listened to."""

    name: str

    async def run(self) -> None:
        """Listen until cancelled."""
        ...

    def health(self) -> Sequence[FeedHealth]:
        """How well each of its sources is heard."""
        ...


class _Tap:
    """One feed on its way to the sink. Once it is shut nothing passes, whatever its task still has to say."""

    def __init__(self, sink: EventSink) -> None:
        self._sink, self.is_open = sink, True

    def hear(self, source: Source, event: CacheEvent) -> None:
        if self.is_open:
            self._sink.hear(source, event)

    def forget(self, backend: str) -> None:
        if self.is_open:
            self._sink.forget(backend)


@dataclass(frozen=True, slots=True)
class _Running:
    feed: Feed
    tap: _Tap
    task: asyncio.Task[None]


class Feeds:
    """Listens to every backend that joined and whose pool names its events, until it leaves.

    An async context manager: left, nothing is left of it. `sink` hears everything. `relay` is shared with the other
    routers; without one, this router is the only one. Raises ConfigError if an option is wrong, also one for backends
    that are yet to be found, or if ZeroMQ is needed and not installed.
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
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        # what is wrong should not come out when the first backend is found
        nowhere = [found_specs(pool, pool.name, "127.0.0.1:1") for pool in self._pools.values() if pool.is_found]
        self._listed = {name: specs for pool in self._pools.values() for name, specs in _listed(pool)}
        self._sink, self._clock, self._on_failure = sink, clock, on_failure
        self._relay = relay or MemoryRelay(clock)
        self._rng = rng or random.Random()
        self._running: dict[str, tuple[_Running, ...]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        needs_zmq = [spec for specs in (*self._listed.values(), *nowhere) for spec in specs if spec.engine in _OVER_ZMQ]
        if needs_zmq and find_spec("zmq") is None:
            hint = "pip install 'pointsman[feeds]', or leave events out"
            raise ConfigError(f"the events of {needs_zmq[0].source.backend} need pyzmq", hint=hint)

    def __repr__(self) -> str:
        return f"<Feeds of {', '.join(self._running) or 'nobody'}>"

    def health(self) -> tuple[FeedHealth, ...]:
        """How well each source is heard now."""
        return tuple(one for every in self._running.values() for running in every for one in running.feed.health())

    def join(self, backend: str, pool: str, address: str) -> None:
        """Listen to `backend` of `pool` at `address`, if the pool names events, and it is not listened to already."""
        if backend not in self._running and (specs := self._specs(backend, pool, address)):
            self._running[backend] = tuple(self._begun(spec) for spec in specs)

    def leave(self, backend: str) -> tuple[str, ...]:
        """`backend` is gone: nothing is heard of it from now on. The names of its sources."""
        every = self._running.pop(backend, ())
        sources = tuple(str(health.source) for running in every for health in running.feed.health())
        for running in every:
            running.tap.is_open = False
            running.task.cancel()
            self._ending.add(running.task)
            running.task.add_done_callback(self._ending.discard)
        self._sink.forget(backend)
        return sources

    async def __aenter__(self) -> Feeds:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [running.task for every in self._running.values() for running in every] + list(self._ending)
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        await self._relay.close()

    def _specs(self, backend: str, pool: str, address: str) -> tuple[FeedSpec, ...]:
        if backend in self._listed or pool not in self._pools or not self._pools[pool].is_found:
            return self._listed.get(backend, ())
        return found_specs(self._pools[pool], backend, address)

    def _begun(self, spec: FeedSpec) -> _Running:
        tap = _Tap(self._sink)
        feed = self._made(spec, tap)
        work = supervise(f"events of {feed.name}", feed.run, on_failure=self._on_failure)
        return _Running(feed, tap, asyncio.create_task(work, name=f"events of {feed.name}"))

    def _made(self, spec: FeedSpec, sink: EventSink) -> Feed:
        if spec.engine not in _OVER_ZMQ:
            owner = uuid.UUID(int=self._rng.getrandbits(128)).hex
            return TensorRTFeed(spec, sink, relay=self._relay, owner=owner, clock=self._clock, rng=self._rng)
        # imported late: a router without such feeds runs without pyzmq
        import zmq.asyncio

        from router.feeds.zmq_feed import ZmqDialect, ZmqFeed

        self._context = self._context or zmq.asyncio.Context()
        dialects = {
            "vllm": ZmqDialect(vllm.decode),
            "sglang": ZmqDialect(sglang.decode, sglang.epoch_of),
        }
        dialect = dialects[spec.engine]
        return ZmqFeed(spec, sink, dialect=dialect, context=self._context, clock=self._clock, rng=self._rng)


def _listed(pool: PoolSpec) -> Iterator[tuple[str, tuple[FeedSpec, ...]]]:
    """Backends that the file names, each with its feeds."""
    names = tuple(backend_name(pool.name, number) for number in range(len(pool.at)))
    specs = feed_specs(pool, names)
    yield from ((name, tuple(spec for spec in specs if spec.source.backend == name)) for name in names)
