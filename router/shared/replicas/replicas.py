"""Replicas: the exchange of this router with the others: prompts sent, blocks learned, requests running."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from policies.prefix.match import faded
from router.fleet.belief_news import Learnt
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.shared.prefixes.prefix import Dropped, Prefix, PrefixNews
from router.shared.replicas.news import News, Running, batches, decode, encode
from router.shared.replicas.own_traffic import OwnTraffic
from router.shared.replicas.peers import Peers
from router.shared.replicas.scribe import Scribe, Taken
from router.shared.replicas.shelf import Shelf
from router.shared.replicas.stream import AT_ONCE, START, Entry, Exchanged, Stream, StreamState, earlier, is_after
from router.shared.store.base import Fault, StoreFailed
from router.shared.store.calls import Calls
from router.supervise import supervise
from router.waiters import Waiters

_JUST_SENT_S = 10.0
"""Age in s from which a prompt counts as held only if its answer has confirmed it."""

_LEAST_TRUST = 0.5
"""Least trust in learned blocks while other routers cannot be heard: this router's own prompts stay true."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Intervals, deadlines and bounds of the exchange.

    News are written and read every `every_s`, less often by more than `at_full_pace` routers. Without an answer within
    `deadline_s` the stream counts as away, and is retried after `first_backoff_s`, then at growing intervals.
    `patience_s`: how long the start waits until it has caught up. At most `most_kept` news wait to be sent; the oldest
    are dropped. A sign of life is sent every `again_s`, all running requests every `whole_s`, and a router that is
    silent for `silent_s` counts as gone. One of the routers writes a snapshot every `snapshot_every_s`. A router that
    started too late to read everything and found no snapshot counts as exact after `settled_s`; for the same time it
    keeps a snapshot's backends that are not members yet.
    """

    every_s: float = 0.015
    at_full_pace: int = 8
    deadline_s: float = 0.25
    first_backoff_s: float = 0.1
    most_backoff_s: float = 2.0
    patience_s: float = 2.0
    most_kept: int = 4096
    again_s: float = 1.0
    whole_s: float = 8.0
    silent_s: float = 4.0
    snapshot_every_s: float = 8.0
    settled_s: float = 60.0


class Replicas:
    """Sends the news of `beliefs` and the running requests of `cluster` to `stream`, and passes those of other
    routers on to both.

    A request only appends to a buffer; one background task writes and reads. The stream keeps only the latest entries;
    earlier ones are in a snapshot on `shelf`. `is_exact`: this router has read both; until then, and while
    they are away, placement is approximate and requests are served all the same. `by` is this router's name, unlike any
    other's. `clock` is that of `beliefs`.

    `on_event` gets `replicas_<fault>`, `replicas_back`, `replicas_forgotten` (the stream was lost and began again),
    `replicas_missed` (the stream had dropped entries that were not read), `replicas_news_dropped`,
    `replicas_unreadable`, and the events of Scribe; `on_state` gets `is_exact` and the number of other routers;
    `on_prefix` gets the pinned prefixes of others.
    """

    def __init__(
        self,
        stream: Stream,
        shelf: Shelf,
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
        self._traffic = OwnTraffic(cluster, again_s=options.again_s, whole_s=options.whole_s)
        self._heard_all_at = -1e9
        self._after, self._is_known = START, False
        self._is_current = self._is_whole = False
        self._listens_since = clock()
        self._taken = Taken(START, {})
        self._awaited: set[str] = set()
        self._backoff_s = options.first_backoff_s
        self._task: asyncio.Task[None] | None = None
        self._has_caught_up = asyncio.Event()
        self._turns = 0
        self._waiters = Waiters[None, int, bool](take_back=lambda *_: None, left=lambda: None)
        """Callers that wait for a turn, by its number."""
        self._calls = Calls(options.deadline_s)
        self._scribe = Scribe(shelf, by, beliefs, clock, self._calls, options.snapshot_every_s, on_event)
        beliefs.share(self.tell)

    def __repr__(self) -> str:
        state = "exact" if self.is_exact else "approximate"
        return f"<Replicas {self._by} {state}, {len(self._news)} news to send, {self._peers!r}>"

    @property
    def is_exact(self) -> bool:
        """Whether this router knows everything that the others sent."""
        return self._is_current and self._is_whole

    @property
    def routers(self) -> int:
        """How many routers are known, this one included."""
        return 1 + len(self._peers)

    @property
    def state(self) -> str:
        """`exact` or `approximate`, as shown to operators."""
        return "exact" if self.is_exact else "approximate"

    def tell(self, news: News) -> None:
        """Send `news` to the others with the next exchange."""
        if len(self._news) >= self._options.most_kept:
            self._news.popleft()
            self._on_event("replicas_news_dropped")
        self._news.append((self._clock(), news))

    async def start(self) -> None:
        """Begin to read. Returns once caught up, or after `patience_s`; then it continues in the background."""
        self._on_state(False, 0)
        self._task = asyncio.create_task(supervise("replicas", self._look_after))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.patience_s):
                await self._has_caught_up.wait()

    async def close(self) -> None:
        """Send the remaining news, and that no request runs here any more, if the stream answers; then close it."""
        async with AsyncExitStack() as stack:
            for close in (self._calls.end, self._scribe.close, self._stream.close):
                stack.push_async_callback(close)
            if self._task is not None:
                self._task.cancel()
                with suppress(asyncio.CancelledError):
                    await self._task
            if self._is_current:
                with suppress(StoreFailed):
                    await self._calls.run(self._stream.exchange, self._payloads(Running({})), self._after)

    async def catch_up(self) -> None:
        """Return when all earlier news were written, and all entries written before were read.

        At once while the stream is away, and after `deadline_s` in any case.
        """
        if self._is_current:
            # a turn that runs already may have read before now
            with suppress(TimeoutError):
                await self._waiters.wait(None, self._turns + 1, timeout_s=self._options.deadline_s)

    async def turn(self) -> bool:
        """Write what is new and read once; returns whether there is more to read. Never raises StoreFailed."""
        self._turns += 1
        try:
            if not self._is_known:
                await self._find()
            count = len(self._news)
            payloads = self._payloads(self._traffic.due(self._clock()))
            found = await self._calls.run(self._stream.exchange, payloads, self._after)
        except StoreFailed as failure:
            self._lost(failure.fault)
            return False
        if found.unwritten is None:
            self._drop_sent(count)
        await self._hear(found)
        is_behind = len(found.entries) == AT_ONCE
        if not is_behind:
            self._peers.forget_silent(self._clock())
        self._cluster.hear_elsewhere(self._peers.changed())
        if found.unwritten is not None:
            self._lost(found.unwritten.fault)
        elif not is_behind:
            self._caught_up()
            if self.is_exact:
                await self._scribe.write(self._after)
        return self._is_known and is_behind

    def check(self) -> None:
        """Assert that nothing is buffered without bound, and that the peers' requests add up."""
        assert len(self._news) <= self._options.most_kept, f"{self!r} keeps too much"
        self._peers.check()

    async def _look_after(self) -> None:
        while True:
            if not await self.turn():
                await asyncio.sleep(self._interval_s() if self._is_known else self._backoff())

    async def _find(self) -> None:
        """Find out whether the stream still has every entry after the last one read; if not, and at first, take over
        the snapshot."""
        there = await self._calls.run(self._stream.state)
        if is_after(self._after, there.newest):
            # Redis lost the stream: new entries may have smaller numbers
            self._after = START
            self._on_event("replicas_forgotten")
        is_missed = there.lacks(self._after)
        if is_missed and self._after != START:
            self._on_event("replicas_missed")
        if is_missed:
            self._is_whole, self._listens_since = False, self._clock()
        elif self._after == START:
            self._is_whole = True
        if is_missed or self._after == START:
            await self._take_over(there)
        self._is_known = True

    async def _take_over(self, there: StreamState) -> None:
        taken = await self._scribe.read(there.lacks)
        if taken is not None:
            self._taken, self._is_whole = taken, True
            # the snapshot lacks the prompts that were just sent
            self._after = earlier(taken.position, _JUST_SENT_S)
            self._awaited = {name for name in taken.covered if name not in self._cluster}
            self._listens_since = self._clock()

    def _is_awaited(self, backend: str) -> bool:
        """Whether the backend is a member, or may become one soon, because another router has found it."""
        return backend in self._cluster or backend in self._awaited

    def _settle(self) -> None:
        """After `settled_s` this router counts as exact, and backends that have not joined are given up."""
        if self._clock() - self._listens_since >= self._options.settled_s:
            self._is_whole = True
            for name in self._awaited:
                if name not in self._cluster:
                    self._beliefs.forget(name)
            self._awaited.clear()

    def _payloads(self, running: Running | None) -> list[bytes]:
        return [encode(batch) for batch in batches(self._news, running, self._clock())]

    def _drop_sent(self, count: int) -> None:
        # the oldest may have been dropped while the others were written
        for _ in range(min(count, len(self._news))):
            self._news.popleft()

    async def _hear(self, found: Exchanged) -> None:
        now = self._clock()
        for entry in found.entries:
            self._after = entry.number
            if entry.by != self._by:
                # one entry is a few hundred microseconds of work: let requests run in between
                await asyncio.sleep(0)
                # two clocks drift apart, so that both times are the server's
                self._hear_one(entry, now - max(0, found.now_ms - entry.at_ms) / 1000)

    def _hear_one(self, entry: Entry, written_at: float) -> None:
        try:
            batch = decode(entry.payload)
        except ValueError:  # of a router of another version, or of another program
            self._on_event("replicas_unreadable")
            return
        self._peers.hear(entry.by, batch.traffic, batch.changes, written_at)
        for age_ms, news in batch.news:
            if isinstance(news, Prefix | Dropped):
                self._on_prefix(news)
            elif self._is_awaited(news.backend) and not self._is_covered(news, entry.number):
                self._beliefs.hear(news, written_at - age_ms / 1000)

    def _is_covered(self, news: News, number: str) -> bool:
        """Whether the snapshot had it already."""
        taken = self._taken
        return isinstance(news, Learnt) and not is_after(number, taken.covered.get(news.backend, taken.position))

    def _caught_up(self) -> None:
        if not self._is_current:
            self._on_event("replicas_back")
            self._beliefs.doubt(1.0)
        self._is_current, self._heard_all_at = True, self._clock()
        self._settle()
        self._has_caught_up.set()
        self._backoff_s = self._options.first_backoff_s
        self._on_state(self.is_exact, len(self._peers))
        self._let_go_on(self._turns)

    def _lost(self, fault: Fault) -> None:
        self._is_current = self._is_known = False
        self._traffic.lost()
        self._on_event(f"replicas_{fault}")
        now = self._clock()
        self._beliefs.doubt(max(_LEAST_TRUST, faded(now - self._heard_all_at)))
        self._peers.forget_silent(now)
        self._cluster.hear_elsewhere(self._peers.changed())
        self._on_state(False, len(self._peers))
        self._let_go_on(self._turns + 1)

    def _let_go_on(self, turn: int) -> None:
        """Wake the callers that waited for this turn or an earlier one."""
        self._waiters.serve(lambda waiter: waiter.wish <= turn or None)

    def _interval_s(self) -> float:
        """Time between two exchanges. It grows with the routers beyond `at_full_pace`: each exchange reads one entry of
        each of them, so that the entries that all routers read would grow with their square."""
        return self._options.every_s * max(1.0, self.routers / self._options.at_full_pace)

    def _backoff(self) -> float:
        backoff_s = self._backoff_s
        self._backoff_s = min(self._options.most_backoff_s, 2 * backoff_s)
        return backoff_s
