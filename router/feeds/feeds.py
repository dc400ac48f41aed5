"""All feeds of a router: made from its pools' options, run, watched, and ended."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from backends import events_sglang, events_vllm
from policies.config import PoolSpec
from policies.errors import ConfigError
from router.cluster import backend_name
from router.feeds.health import FeedHealth
from router.feeds.options import FeedSpec, feed_specs
from router.feeds.relay import MemoryRelay, Relay
from router.feeds.sink import EventSink
from router.feeds.tensorrt_llm import TensorRTFeed
from router.supervise import supervise

if TYPE_CHECKING:
    import zmq.asyncio


class Feed(Protocol):
    """One engine process that is listened to."""

    name: str

    async def run(self) -> None:
        """Listen until cancelled."""
        ...

    def health(self) -> Sequence[FeedHealth]:
        """How well each of its sources is heard."""
        ...


class Feeds:
    """Listens to every engine whose pool names its events. An async context manager: left, nothing is left of it.

    `sink` hears everything. `relay` is shared with the other routers; without one, this router is the only one.
    Raises ConfigError if an option is wrong, or if ZeroMQ is needed and not installed.
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
        self._specs = tuple(_specs(pools))
        self._sink, self._clock, self._on_failure = sink, clock, on_failure
        self._relay = relay or MemoryRelay(clock)
        self._rng = rng or random.Random()
        self._feeds: list[Feed] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        needs_zmq = [spec for spec in self._specs if spec.engine != "tensorrt_llm"]
        if needs_zmq and find_spec("zmq") is None:
            hint = "pip install 'pointsman[feeds]', or leave events out"
            raise ConfigError(f"the events of {needs_zmq[0].source.backend} need pyzmq", hint=hint)

    def __repr__(self) -> str:
        return f"<Feeds of {', '.join(str(spec.source) for spec in self._specs) or 'nobody'}>"

    def health(self) -> tuple[FeedHealth, ...]:
        """How well each source is heard now."""
        return tuple(health for feed in self._feeds for health in feed.health())

    async def __aenter__(self) -> Feeds:
        for spec in self._specs:
            feed = self._made(spec)
            self._feeds.append(feed)
            work = supervise(f"events of {feed.name}", feed.run, on_failure=self._on_failure)
            self._tasks.append(asyncio.create_task(work, name=f"events of {feed.name}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _made(self, spec: FeedSpec) -> Feed:
        if spec.engine == "tensorrt_llm":
            owner = uuid.UUID(int=self._rng.getrandbits(128)).hex
            return TensorRTFeed(spec, self._sink, relay=self._relay, owner=owner, clock=self._clock, rng=self._rng)
        # imported late: a router without such feeds runs without pyzmq
        import zmq.asyncio

        from router.feeds.zmq_feed import ZmqDialect, ZmqFeed

        self._context = self._context or zmq.asyncio.Context()
        dialects = {
            "vllm": ZmqDialect(events_vllm.decode),
            "sglang": ZmqDialect(events_sglang.decode, events_sglang.epoch_of),
        }
        dialect = dialects[spec.engine]
        return ZmqFeed(spec, self._sink, dialect=dialect, context=self._context, clock=self._clock, rng=self._rng)


def _specs(pools: Iterable[PoolSpec]) -> Iterable[FeedSpec]:
    for pool in pools:
        yield from feed_specs(pool, tuple(backend_name(pool.name, number) for number in range(len(pool.at))))
