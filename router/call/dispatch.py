"""Late binding: a prompt waits here until a backend has room for it, so that a better rank can still overtake it.

Source of the idea: late binding of tasks in cluster scheduling (Ousterhout et al., Sparrow, SOSP 2013).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from policies.errors import Overloaded
from policies.fairness.queue import FairQueue
from policies.learning.drain_rate import DrainRate
from policies.nouns import ClusterView, Decision
from policies.predict import uncached_tokens
from policies.sla.config import Config
from policies.waiting import ROOM, is_outage, is_worth_waiting, would_take
from router.call.bid import USUAL, Bid, Found, Look, Placed
from router.call.waking import Waking
from router.fleet.cluster.cluster import Cluster

MOST_FAILED_LOOKS = 8
"""Decisions that may fail in one walk through a queue: each takes up to 2 ms of the event loop."""

MOST_PLACED = 32
"""Prompts that one walk may place; then the event loop has its turn."""

MOST_SEEN = 512
"""Waiting prompts that one walk may look at, 5 µs each where they need not be decided on."""

PAUSE_S = 0.002
"""Changes within this time are answered by one walk."""


PATIENCE = 10.0
"""A bid waits for a certain backend, while others have room, this many times as long as was expected; then for any."""

Wish = tuple[Hashable, str | None]


@dataclass(eq=False, slots=True)
class ModelQueue:
    """What waits for one model: in `fair` their order, with the bids in it, and those of each wish, oldest first.

    A wish is a shape and the backend that is awaited, if it is a certain one. `awaited` counts the bids of each rank
    that wait for a certain backend.

    `stuck` are wishes and whole shapes that found no room in a walk. `reserved` are backends for which a bid has waited
    so long that no other bid may pass it. `passed` are wishes that had a look behind many stuck ones, until all had
    one. `outages` are the shapes that wait for a backend to be well, and since when.

    Few changes make room, and a walk looks only at bids that may find some. `changed` are the backends that changed
    since the last walk; None in it stands for all. `offers` are those with room, until every bid has looked at them,
    and `declined` are those that no bid wanted, until they are full again.
    """

    model: str
    fair: FairQueue
    bids: dict[str, Bid] = field(default_factory=dict)
    wishes: dict[Wish, dict[str, Bid]] = field(default_factory=dict)
    awaited: dict[int, Counter[str]] = field(default_factory=dict)
    stuck: set[Hashable] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)
    passed: set[Wish] = field(default_factory=set)
    outages: dict[Hashable, float] = field(default_factory=dict)
    changed: set[str | None] = field(default_factory=set)
    offers: set[str | None] = field(default_factory=set)
    declined: set[str | None] = field(default_factory=set)
    rate: DrainRate = field(default_factory=DrainRate)
    walk: asyncio.TimerHandle | None = None

    def decide(
        self, bid: Bid, awaited: Mapping[str, int], *, all_backends: bool = False
    ) -> tuple[ClusterView, Decision, bool]:
        """What the policy decides for `bid`, behind the bids that are counted in `awaited`, if possible for a backend
        that is not reserved, and whether the chosen backend is reserved.
        """
        look = Look(all_backends, bid.takes_any, awaited)
        view, decision = bid.decide(bid.request, bid.avoiding, look)
        if decision.chosen is None or decision.chosen not in self.reserved:
            return view, decision, False
        other, elsewhere = bid.decide(bid.request, bid.avoiding | self.reserved, look)
        return (view, decision, True) if elsewhere.chosen is None else (other, elsewhere, False)

    def ahead_of(self, bid: Bid) -> Mapping[str, int]:
        """For each backend the number of bids that go before `bid`, which does not wait yet: those of its rank or a
        better one that wait for that backend.
        """
        ahead: Counter[str] = Counter()
        for rank, counts in self.awaited.items():
            if rank <= bid.request.rank:
                ahead.update(counts)
        return ahead

    def in_turn(self, now: float, most: int) -> Iterator[Bid]:
        """`most` of those that wait, in fair order; behind these the oldest of each wish that is not stuck.

        So a bid behind many that wait for other room is looked at too. Some may come twice.
        """
        for ticket in islice(self.fair.order(now), most):
            yield self.bids[ticket.id]
        if len(self.bids) > most:
            for wish, bids in list(self.wishes.items()):
                if not self.is_stuck(wish):
                    yield next(iter(bids.values()))

    def enter(self, bid: Bid, now: float) -> None:
        """`bid`, which just found no room, waits: at its place, or in front if its backend failed."""
        if bid.is_charged:
            self.fair.push_front(bid.ticket)
        else:
            self.fair.push(bid.ticket, now)
        self.bids[bid.request.id] = bid
        bid.awaits = None
        self.wishes.setdefault(_wish_of(bid), {})[bid.request.id] = bid

    def leave(self, bid: Bid) -> None:
        """`bid` waits no longer; its ticket has left the queue."""
        self.wish(bid, None)
        del self.bids[bid.request.id]
        self._unlist(bid)
        if not any(shape == bid.shape for shape, _ in self.wishes):
            self.outages.pop(bid.shape, None)
        if bid.patience is not None:
            bid.patience.cancel()
            bid.patience = None

    def wish(self, bid: Bid, awaits: str | None) -> None:
        """`bid` waits for the backend `awaits` from now on; None: for any."""
        if bid.awaits == awaits:
            return
        rank = bid.request.rank
        if bid.awaits is not None:
            counts = self.awaited[rank]
            counts[bid.awaits] -= 1
            if not counts[bid.awaits]:
                del counts[bid.awaits]
                if not counts:
                    del self.awaited[rank]
        self._unlist(bid)
        bid.awaits = awaits
        self.wishes.setdefault(_wish_of(bid), {})[bid.request.id] = bid
        if awaits is not None:
            self.awaited.setdefault(rank, Counter())[awaits] += 1

    def looked(self, bid: Bid, view: ClusterView, decision: Decision, now: float) -> None:
        """`bid`, which waits, found at `now` that it has to wait on, for room or until a backend is well."""
        self.wish(bid, decision.awaits)
        if is_outage(decision):
            self.outages.setdefault(bid.shape, now)
            # no backend is well, so this does not show how fast the queue empties
            self.rate.waited(now, 0)
        else:
            self.outages.pop(bid.shape, None)
            self.rate.waited(now, len(would_take(view, decision)))

    def is_stuck(self, wish: Wish) -> bool:
        """Has a bid with this wish found no room in this walk?"""
        return wish in self.stuck or wish[0] in self.stuck

    def all_stuck(self) -> bool:
        """Has every wish found no room?"""
        return all(map(self.is_stuck, self.wishes))

    def _unlist(self, bid: Bid) -> None:
        wish = _wish_of(bid)
        del self.wishes[wish][bid.request.id]
        if not self.wishes[wish]:
            del self.wishes[wish]
            self.passed.discard(wish)


def _wish_of(bid: Bid) -> Wish:
    return bid.shape, bid.awaits


def _weights(config: Config) -> dict[str, float]:
    return {name: tenant.weight for name, tenant in config.tenants.items()}


class Dispatcher:
    """A fair queue for each model. A change that may have made room is answered by a walk through the queue, in order.

    A bid that finds room does not wait for a bid of a better rank that finds none, unless the latter has waited longer
    than the ageing time: then no bid behind it may take the room that it waits for, so that small prompts do not starve
    it.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        clock: Callable[[], float],
        *,
        on_waiting: Callable[[str, int], None] = lambda *_: None,
        waking: Waking | None = None,
    ) -> None:
        self._cluster, self._config, self._clock, self._on_waiting = cluster, config, clock, on_waiting
        self._waking = waking
        self._queues: dict[str, ModelQueue] = {}
        self._by_tenant: Counter[str] = Counter()
        self._by_class: Counter[str] = Counter()

    def __repr__(self) -> str:
        waiting = ", ".join(f"{model}: {len(queue.bids)}" for model, queue in self._queues.items())
        return f"<Dispatcher waiting {waiting or 'nothing'}>"

    async def waited(self, bid: Bid, found: Found) -> Placed:
        """The next backend that has room for `bid`, however late, after `found` had none. Raises as `wait` does."""
        placed = await self.wait(bid, found, seconds=None)
        assert placed is not None, "a wait without an end ends with a place"
        return placed

    def look(self, bid: Bid) -> Found:
        """What the policy decides for `bid` now. Raises what its `refusal` says if no backend can take it at all."""
        model = bid.request.model
        queue = self._queues.get(model) or self._queue(model)
        found = self._look(queue, bid)
        if queue.walk is not None and found.is_free:
            # room for those that wait first; what they leave is free now, so no bid waits for nothing
            queue.walk.cancel()
            self._walk(queue)
            found = self._look(queue, bid)
        if queue.walk is not None:
            # a walk that was cut short has not looked at every bid
            found = replace(found, is_free=False)
        if not found.is_free and found.view.left_out:
            # the time that it waits depends on all backends
            found = replace(self._look(queue, bid, all_backends=True), is_free=False)
        if self._waking is not None and found.decision.chosen is None and found.is_outage:
            # whether or not the request waits for them
            self._waking.start(model, bid.request.pools)
        return found

    def forgive(self, bid: Bid) -> bool:
        """Let `bid` go again to backends that failed it and are ill or on trial now, once they are well; any?"""
        return bid.forgive(self._cluster.is_ill)

    def take(self, bid: Bid, found: Found) -> Placed:
        """Begin the flight that `found` chose, and charge it to the tenant and class once."""
        assert found.decision.chosen is not None, f"{bid!r} found no backend"
        if not bid.is_charged:
            self._queues[bid.request.model].fair.charge(bid.ticket, self._clock())
            bid.is_charged = True
        return self._placed(bid, found)

    def second(self, bid: Bid, placed: Placed, *, within_s: float) -> Placed | None:
        """Begin a flight for `bid` beside that of `placed`, at another backend that is predicted to answer `within_s`.

        None where there is none with room, or any other bid waits for it. It is not charged: it takes the place of the
        first, or is cancelled.
        """
        if self._is_full or self._queue(bid.request.model).bids:
            return None
        view, decision = bid.decide(bid.request, bid.avoiding | {placed.chosen.name}, USUAL)
        if decision.chosen is None or (decision.predicted_ttft_s or 0.0) > within_s:
            return None
        return self._placed(bid, Found(view, decision, is_free=True))

    async def wait(self, bid: Bid, found: Found, *, seconds: float | None) -> Placed | None:
        """Queue for a backend, after `found` had none; None if none came within `seconds`. Raises Overloaded, or what
        `refusal` says as soon as no backend can ever take it, or, where `seconds` sets no end, none is well for too
        long.
        """
        queue, was_charged = self._queue(bid.request.model), bid.is_charged
        self._make_place(bid)
        bid.waiting = waiting = asyncio.get_running_loop().create_future()
        self._enter(queue, bid, found)
        try:
            with self._woken(bid, found) as within_s:
                if seconds is None:
                    await self._through_outages(queue, bid, waiting, within_s)
                else:
                    await asyncio.wait((waiting,), timeout=seconds)
        except asyncio.CancelledError:
            if waiting.done() and waiting.exception() is None:
                self._cluster.end(waiting.result().flight)
                if not was_charged:
                    self.correct(bid, 0.0)
            raise
        finally:
            self._leave(queue, bid)
        return waiting.result() if waiting.done() else None

    def wait_s(self, bid: Bid, found: Found) -> float:
        """Seconds that `bid` is expected to wait in the queue if it joined it now; while no backend is well, from when
        one is.
        """
        queue, request = self._queue(bid.request.model), bid.request
        if found.decision.wait_s is not None:
            return found.decision.wait_s
        ahead_s = queue.fair.ahead_s(request.service_class, request.tenant, self._clock())
        backends = len(would_take(found.view, found.decision))
        # its own cost stands for what is left of those that run, and after an outage none runs
        left_s = 0.0 if found.is_outage else bid.cost_s or 0.0
        return (ahead_s + left_s) / queue.rate.per_second(backends)

    def correct(self, bid: Bid, actual_s: float) -> None:
        """The request is over and took `actual_s` of a backend's time; what was charged is put right, once."""
        if bid.is_charged:
            self._queues[bid.request.model].fair.correct(bid.ticket, actual_s, self._clock())
            bid.is_charged = False

    def follow(self, config: Config) -> None:
        """Queue by `config`, the file in force, from now on: requests that wait may be admitted under its limits."""
        self._config, weights = config, _weights(config)
        for queue in self._queues.values():
            queue.fair.reconfigure(config.classes, weights, config.ageing_s)
        self.changed()

    def changed(self, backend: str | None = None) -> None:
        """There may be room at `backend` where there was none; None: at any."""
        if not self._by_tenant:
            return
        for queue in self._queues.values():
            if queue.bids:
                queue.changed.add(backend)
                self._walk_soon(queue)

    def check(self) -> None:
        """Assert that every bid that waits has its ticket in the queue, and that its caller waits for it."""
        for model, queue in self._queues.items():
            queue.fair.check()
            assert len(queue.fair) == len(queue.bids), f"{self!r}: tickets and bids of {model} differ"
            wished = {name: bid for bids in queue.wishes.values() for name, bid in bids.items()}
            assert wished == queue.bids, f"{self!r}: a bid for {model} has no wish"
            awaited = Counter((bid.request.rank, bid.awaits) for bid in queue.bids.values() if bid.awaits is not None)
            counted = {(rank, name): count for rank, some in queue.awaited.items() for name, count in some.items()}
            assert awaited == counted, f"{self!r}: bids that wait for a certain backend are counted wrong"
            assert all(bid.waiting is not None for bid in queue.bids.values()), f"{self!r}: a bid waits for nothing"

    def waiting(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """How many prompts wait, by tenant and by class; tenants and classes without any are left out."""
        return self._by_tenant, self._by_class

    def waits(self, model: str, rank: int) -> bool:
        """Whether a prompt for `model` of this rank or a better one waits."""
        queue = self._queues.get(model)
        return queue is not None and any(bid.request.rank <= rank for bid in queue.bids.values())

    def is_idle(self) -> bool:
        """Does no bid wait, and is every charge corrected?"""
        return not any(queue.bids or queue.fair.charged for queue in self._queues.values())

    @property
    def _is_full(self) -> bool:
        """Does the router have as many requests at backends as it may?"""
        return len(self._cluster.on_the_way) >= self._config.server.max_concurrent

    def _look(self, queue: ModelQueue, bid: Bid, *, all_backends: bool = False) -> Found:
        """What is decided for `bid`, whatever waits. Raises its `refusal`."""
        ahead = queue.ahead_of(bid) if queue.awaited else USUAL.awaited
        is_reserved = False
        if queue.reserved:
            view, decision, is_reserved = queue.decide(bid, ahead, all_backends=all_backends)
        else:
            is_usual = not (ahead or all_backends or bid.takes_any)
            look = USUAL if is_usual else Look(all_backends, bid.takes_any, ahead)
            view, decision = bid.decide(bid.request, bid.avoiding, look)
        if decision.chosen is None and not is_worth_waiting(decision):
            raise bid.refusal(bid.request, view, decision)
        bid.measure(view, decision)
        has_room = len(self._cluster.on_the_way) < self._config.server.max_concurrent
        return Found(view, decision, decision.chosen is not None and has_room and not is_reserved)

    def _queue(self, model: str) -> ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            config = self._config
            queue = ModelQueue(model, FairQueue(config.classes, _weights(config), config.ageing_s))
            self._queues[model] = queue
        return queue

    def _make_place(self, bid: Bid) -> None:
        """Where the queue is full the newest of the tenant that fills it most leaves; Overloaded if that is `bid`'s.

        So a flood of one tenant does not close the queue to the others.
        """
        waiting, most = self._by_tenant.total(), self._config.server.max_queued
        if waiting < most:
            return
        hint = "try again in a moment, or raise queue.most"
        full = Overloaded(f"{waiting} requests wait, which is the limit", hint=hint, retry_after_s=1.0)
        fullest, count = max(self._by_tenant.items(), key=lambda pair: pair[1], default=("", 0))
        if self._by_tenant[bid.request.tenant] + 1 >= count:
            raise full
        for queue in self._queues.values():
            newest = next((one for one in reversed(queue.bids.values()) if one.request.tenant == fullest), None)
            if newest is not None:
                self._let_go(queue, newest, full)
                # it may have been the bid that no other was to pass
                queue.changed.add(None)
                self._walk_soon(queue)
                return

    def _woken(self, bid: Bid, found: Found) -> AbstractContextManager[float]:
        """Have pools started that `bid` waits for; gets the seconds for which it may wait for that."""
        if self._waking is None or not found.is_outage:
            return nullcontext(0.0)
        return self._waking.waits(bid.request.model, bid.request.pools)

    async def _through_outages(
        self, queue: ModelQueue, bid: Bid, waiting: asyncio.Future[Placed], within_s: float
    ) -> None:
        """Return once `bid` was placed or let go. Raises its `refusal` when no backend was well for too long: for the
        outage that the file allows, or `within_s`."""
        while not waiting.done():
            left_s, since = max(self._config.outage_s, within_s), queue.outages.get(bid.shape)
            if since is not None:
                left_s = bid.patience_s(since, self._clock(), left_s)
            if left_s > 0:
                # an outage that begins meanwhile is not over before this is
                await asyncio.wait((waiting,), timeout=left_s)
                continue
            view, decision = bid.decide(bid.request, bid.avoiding, Look(all_backends=True, takes_any=bid.takes_any))
            if is_outage(decision):
                raise bid.refusal(bid.request, view, decision)
            self._looked(queue, bid, view, decision)
            self._walk_soon(queue)

    def _enter(self, queue: ModelQueue, bid: Bid, found: Found) -> None:
        queue.enter(bid, self._clock())
        self._looked(queue, bid, found.view, found.decision)
        self._count(bid, 1)

    def _looked(self, queue: ModelQueue, bid: Bid, view: ClusterView, decision: Decision) -> None:
        """`bid`, which waits, has to wait on. While others have room, its patience for a certain backend ends."""
        queue.looked(bid, view, decision, self._clock())
        if decision.awaits is not None:
            awaited = next(backend for backend in view.backends if backend.name == decision.awaits)
            bid.lacks_tokens = uncached_tokens(bid.request, awaited)
        if decision.wait_s is not None and bid.patience is None:
            loop = asyncio.get_running_loop()
            bid.patience = loop.call_later(PATIENCE * decision.wait_s + PAUSE_S, self._lost_patience, queue, bid)

    def _lost_patience(self, queue: ModelQueue, bid: Bid) -> None:
        bid.takes_any = True
        queue.wish(bid, None)
        self._walk_soon(queue)

    def _leave(self, queue: ModelQueue, bid: Bid) -> None:
        """Let `bid` wait no longer; it may have been let go already."""
        bid.waiting = None
        if bid.request.id in queue.bids:
            queue.fair.remove(bid.request.id)
            queue.leave(bid)
            self._count(bid, -1)
            # it may have been the bid that no other was to pass
            queue.changed.add(None)
            self._walk_soon(queue)
        if not queue.bids:
            queue.rate.emptied(self._clock())

    def _placed(self, bid: Bid, found: Found) -> Placed:
        for chosen in found.view.backends:
            if chosen.name == found.decision.chosen:
                break
        else:
            raise LookupError(f"{found.decision.chosen} was chosen and is not in the view")
        leg, fetch = found.decision.prefill, found.decision.fetch
        # as `uncached_tokens`, without a call
        uncached = 1 if leg is not None else max(1, bid.request.prompt_tokens - (chosen.held_tokens or 0))
        if fetch is not None:
            uncached -= fetch.tokens
        # the time until its first token is not the backend's own if another one computes the prompt
        is_first_try = leg is None and not (bid.avoiding or bid.failed)
        flight = self._cluster.begin(
            chosen.name,
            bid.request,
            uncached,
            is_first_try=is_first_try,
            fetch=fetch,
        )
        if bid.sent is not None:
            bid.sent(chosen.name)
        return Placed(bid, found, chosen, flight)

    def _count(self, bid: Bid, change: int) -> None:
        tenant, service_class = bid.request.tenant, bid.request.service_class
        self._by_tenant[tenant] += change
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._by_class[service_class] += change
        self._on_waiting(service_class, self._by_class[service_class])

    def _walk_soon(self, queue: ModelQueue) -> None:
        if queue.walk is None and queue.bids:
            queue.walk = asyncio.get_running_loop().call_later(PAUSE_S, self._walk, queue)

    def _walk(self, queue: ModelQueue) -> None:
        """Place bids in fair order while there is room; if too many in front find none, look at others by turns.

        Those in front look first each time: room that they can use is theirs.
        """
        queue.walk = None
        queue.stuck.clear()
        queue.reserved.clear()
        self._find_room(queue)
        leaving: dict[Bid, Placed | Exception] = {}
        is_cut = self._look_around(queue, leaving, past=set())
        if is_cut and len(leaving) < MOST_PLACED:
            is_cut = self._look_around(queue, leaving, past=queue.passed)
            if not is_cut:
                queue.passed.clear()
        if not is_cut:
            queue.declined |= queue.offers
            queue.offers.clear()
        # the queue stands still while it is walked
        for bid, outcome in leaving.items():
            self._let_go(queue, bid, outcome)
        if is_cut:
            self._walk_soon(queue)

    def _find_room(self, queue: ModelQueue) -> None:
        """Sort the changed backends into offers and full ones."""
        if None in queue.changed:
            queue.declined.clear()
            queue.offers.add(None)
        for name in queue.changed:
            if name is not None and not self._has_room(queue, name):
                queue.declined.discard(name)
            elif name not in queue.declined:
                queue.offers.add(name)
        queue.changed.clear()

    def _may_find_room(self, queue: ModelQueue, bid: Bid, *, is_patient: bool) -> bool:
        """May a look find room for `bid`, at the backend that it waits for or, if the walk `is_patient`, elsewhere?"""
        if bid.awaits is None:
            return True
        if not bid.takes_any and self._cluster.computing.of(bid.request, self._clock()):
            # what it waits for is not there yet: the first token of that prompt is a change too
            return False
        if is_patient and queue.offers:
            return True
        return self._cluster.may_have_room(bid.awaits, queue.model, bid.request.rank, bid.lacks_tokens)

    def _look_around(self, queue: ModelQueue, leaving: dict[Bid, Placed | Exception], *, past: set[Wish]) -> bool:
        """Look for room for bids with wishes that are not in `past`, and add these wishes to it. The result for each
        bid that leaves goes into `leaving`. Returns whether a bid is left that was not looked at.

        Room is for the first that wants it. After many that do not, it is for those that wait for it.
        """
        failed, ahead = 0, Counter[str]()
        for bid in queue.in_turn(self._clock(), MOST_SEEN):
            if self._is_full or queue.all_stuck():
                return False
            if bid in leaving:
                continue
            outcome, wish = None, _wish_of(bid)
            if (
                not queue.is_stuck(wish)
                and wish not in past
                and self._may_find_room(queue, bid, is_patient=failed < MOST_FAILED_LOOKS)
            ):
                outcome = self._tried(queue, bid, ahead)
                if outcome is None:
                    failed += 1
                    past |= {wish, _wish_of(bid)}
            if outcome is not None:
                leaving[bid] = outcome
                queue.offers = {name for name in queue.offers if name is None or self._has_room(queue, name)}
            elif bid.awaits is not None:
                ahead[bid.awaits] += 1
            if len(leaving) == MOST_PLACED or failed == 2 * MOST_FAILED_LOOKS:
                return True
        if failed >= MOST_FAILED_LOOKS and queue.offers:
            return True
        # others with their wishes may stand further behind
        return bool(leaving) and len(queue.bids) > MOST_SEEN

    def _has_room(self, queue: ModelQueue, name: str) -> bool:
        return self._cluster.may_have_room(name, queue.model)

    def _tried(self, queue: ModelQueue, bid: Bid, awaited: Mapping[str, int]) -> Placed | Exception | None:
        """Where `bid` goes now, behind those in `awaited`, or why it goes nowhere; None if it has to wait on."""
        try:
            view, decision, is_reserved = queue.decide(bid, awaited)
        except Exception as error:  # noqa: BLE001 - a policy's mistake is one request's failure, not the queue's
            return error
        if is_reserved:
            queue.stuck.add(_wish_of(bid))
            return None
        if decision.chosen is not None:
            queue.outages.pop(bid.shape, None)
            return self._placed(bid, Found(view, decision, is_free=True))
        if not is_worth_waiting(decision):
            return bid.refusal(bid.request, view, decision)
        self._looked(queue, bid, view, decision)
        # where others have room, bids of the same shape may still go there
        queue.stuck.add(bid.shape if decision.wait_s is None else _wish_of(bid))
        if self._clock() - bid.arrived_at > self._config.ageing_s:
            full = (name for name, reason in decision.dropped if reason in ROOM)
            queue.reserved.update(full if decision.awaits is None else (decision.awaits,))
        return None

    def _let_go(self, queue: ModelQueue, bid: Bid, outcome: Placed | Exception) -> None:
        assert bid.waiting is not None, f"{bid!r} was let go by a queue that it is not in"
        queue.leave(bid)
        self._count(bid, -1)
        if isinstance(outcome, Exception):
            queue.fair.remove(bid.request.id)
            bid.waiting.set_exception(outcome)
            return
        queue.fair.take(bid.request.id, self._clock())
        queue.rate.left(bid.cost_s or 0.0)
        bid.is_charged = True
        bid.waiting.set_result(outcome)
