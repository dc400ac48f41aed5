"""Replicas: this router among others, telling what it sends and learns and hearing what they do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from policies.prefix.match import faded
from router.beliefs import Beliefs
from router.cluster import Cluster
from router.flights import Traffic
from router.prefixes.prefix import Dropped, Prefix, PrefixNews
from router.replicas.news import News, batches, decode, encode
from router.replicas.peers import Peers
from router.replicas.stream import AT_ONCE, START, Exchanged, Stream, Told, is_after
from router.store.base import Fault, StoreFailed
from router.supervise import supervise

_LEAST_TRUST = 0.5
"""What was learnt is never believed less for others being out of hearing: what this router sent itself stays true."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How often, how patiently and how much.

    Every `every_s` what is new is written and read. Without an answer within `deadline_s` the stream counts as away,
    and is looked for after `first_backoff_s`, then ever less often. `patience_s`: how long starting waits until it has
    caught up. At most `most_kept` news wait to be told; the oldest go first. What is under way is said again every
    `again_s`, and who says nothing for `silent_s` is gone.
    """

    every_s: float = 0.015
    deadline_s: float = 0.25
    first_backoff_s: float = 0.1
    most_backoff_s: float = 2.0
    patience_s: float = 2.0
    most_kept: int = 4096
    again_s: float = 1.0
    silent_s: float = 4.0


class Replicas:
    """Tells `stream` what `beliefs` hears and what `cluster` has under way, and both what other routers tell.

    A request only appends to a buffer; one background task writes and reads. `is_exact`: everything that the stream has
    is known here; until then, and while it is away, placement is approximate and requests are served all the same.
    `by` is this router's name, unlike any other's. `clock` is that of `beliefs`.

    `on_event` hears of `replicas_<fault>`, `replicas_back`, `replicas_forgotten` (the stream began anew),
    `replicas_news_dropped` and `replicas_unreadable`; `on_state` of `is_exact` and how many other routers are heard;
    `on_prefix` of the prefixes that others keep.
    """

    def __init__(
        self,
        stream: Stream,
        by: str,
        *,
        beliefs: Beliefs,
        cluster: Cluster,
        clock: Callable[[], float],
        options: ReplicaOptions = ReplicaOptions(),
        on_event: Callable[[str], None] = lambda _: None,
        on_state: Callable[[bool, int], None] = lambda *_: None,
        on_prefix: Callable[[PrefixNews], None] = lambda _: None,
    ) -> None:
        self._stream, self._by, self._clock, self._options = stream, by, clock, options
        self._beliefs, self._cluster = beliefs, cluster
        self._on_event, self._on_state, self._on_prefix = on_event, on_state, on_prefix
        self._peers = Peers(silent_s=options.silent_s)
        self._news: deque[tuple[float, News]] = deque()
        self._told_traffic: dict[str, Traffic] = {}
        self._told_at = self._heard_all_at = -1e9
        self._after, self._is_known, self._offset_ms = START, False, 0.0
        self._backoff_s = options.first_backoff_s
        self._calls: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._has_caught_up = asyncio.Event()
        self.is_exact = False
        beliefs.share(self.tell)

    def __repr__(self) -> str:
        state = "exact" if self.is_exact else "approximate"
        return f"<Replicas {self._by} {state}, {len(self._news)} news to tell, {self._peers!r}>"

    @property
    def state(self) -> str:
        """`exact` or `approximate`, as operators see it."""
        return "exact" if self.is_exact else "approximate"

    def tell(self, news: News) -> None:
        """Have the others hear `news` in a moment."""
        if len(self._news) >= self._options.most_kept:
            self._news.popleft()
            self._on_event("replicas_news_dropped")
        self._news.append((self._clock(), news))

    async def start(self) -> None:
        """Begin to listen; returns once caught up, or when it has taken too long, and then it goes on behind."""
        self._on_state(False, 0)
        self._task = asyncio.create_task(supervise("replicas", self._look_after))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.patience_s):
                await self._has_caught_up.wait()

    async def close(self) -> None:
        """Tell what is left, and that nothing is under way here any more, if the stream listens; let go of it."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.is_exact:
            with suppress(StoreFailed):
                await self._in_time(self._stream.exchange(self._payloads({}), self._after))
        await self._stream.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._options.deadline_s)

    async def turn(self) -> bool:
        """Write what is new and read once; is there more to read? Never raises StoreFailed."""
        try:
            if not self._is_known:
                await self._find()
            count = len(self._news)
            payloads = self._payloads(self._new_traffic())
            found = await self._in_time(self._stream.exchange(payloads, self._after))
        except StoreFailed as failure:
            self._lost(failure.fault)
            return False
        if found.unwritten is None:
            self._forget_told(count)
        await self._hear(found)
        if found.unwritten is not None:
            self._lost(found.unwritten.fault)
        elif len(found.told) < AT_ONCE:
            self._caught_up()
        return self._is_known and len(found.told) == AT_ONCE

    def check(self) -> None:
        """Nothing is buffered without bound."""
        assert len(self._news) <= self._options.most_kept, f"{self!r} keeps too much"

    async def _look_after(self) -> None:
        while True:
            if not await self.turn():
                await asyncio.sleep(self._options.every_s if self._is_known else self._backoff())

    async def _find(self) -> None:
        """Learn the server's time, and whether the stream is still the one that was read."""
        now_ms, newest = await self._in_time(self._stream.state())
        self._offset_ms = now_ms - self._clock() * 1000
        if is_after(self._after, newest):
            # Redis lost it: what comes now may have smaller numbers
            self._after = START
            self._on_event("replicas_forgotten")
        self._is_known = True

    def _payloads(self, traffic: dict[str, Traffic] | None) -> list[bytes]:
        now = self._clock()
        payloads = [encode(batch) for batch in batches(self._news, traffic, now)]
        if traffic is not None:
            self._told_traffic, self._told_at = traffic, now
        return payloads

    def _new_traffic(self) -> dict[str, Traffic] | None:
        """What is under way here, if that is news or was not said for a while."""
        traffic = self._cluster.traffic()
        is_due = self._clock() - self._told_at >= self._options.again_s
        return traffic if is_due or traffic != self._told_traffic else None

    def _forget_told(self, count: int) -> None:
        # the oldest may have had to make room while the others were written
        for _ in range(min(count, len(self._news))):
            self._news.popleft()

    async def _hear(self, found: Exchanged) -> None:
        now = self._clock()
        for told in found.told:
            self._after = told.number
            if told.by != self._by:
                # one entry is a few hundred microseconds of work: requests go in between
                await asyncio.sleep(0)
                self._hear_one(told, now)
        self._cluster.hear_elsewhere(self._peers.together(now))

    def _hear_one(self, told: Told, now: float) -> None:
        try:
            batch = decode(told.payload)
        except ValueError:  # of a router that speaks otherwise, or of somebody else
            self._on_event("replicas_unreadable")
            return
        written_at = min(now, (told.at_ms - self._offset_ms) / 1000)
        self._peers.hear(told.by, batch.traffic, written_at)
        for age_ms, news in batch.news:
            if isinstance(news, Prefix | Dropped):
                self._on_prefix(news)
            elif news.backend in self._cluster:
                self._beliefs.hear(news, written_at - age_ms / 1000)

    def _caught_up(self) -> None:
        if not self.is_exact:
            self._on_event("replicas_back")
            self._beliefs.doubt(1.0)
        self.is_exact, self._heard_all_at = True, self._clock()
        self._has_caught_up.set()
        self._backoff_s = self._options.first_backoff_s
        self._on_state(True, len(self._peers))

    def _lost(self, fault: Fault) -> None:
        self.is_exact = self._is_known = False
        self._on_event(f"replicas_{fault}")
        now = self._clock()
        self._beliefs.doubt(max(_LEAST_TRUST, faded(now - self._heard_all_at)))
        self._cluster.hear_elsewhere(self._peers.together(now))
        self._on_state(False, len(self._peers))

    def _backoff(self) -> float:
        backoff_s = self._backoff_s
        self._backoff_s = min(self._options.most_backoff_s, 2 * backoff_s)
        return backoff_s

    async def _in_time(self, call: Coroutine[object, object, _T]) -> _T:
        """What `call` returns, within the deadline. In a task of its own: a client that swallows its cancellation must
        hold up neither the deadline nor whoever cancels."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task}, timeout=self._options.deadline_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise StoreFailed(Fault.SLOW, f"no answer within {self._options.deadline_s} s")
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # whoever stopped waiting for it does not want to know
