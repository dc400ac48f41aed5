"""Late binding: a prompt waits here until a backend has room for it, so that a better rank can still overtake it.

Source of the idea: late binding of tasks in cluster scheduling (Ousterhout et al., Sparrow, SOSP 2013).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from policies.config import Config
from policies.drain_rate import DrainRate
from policies.errors import ExpectedError, Overloaded
from policies.fairness.queue import FairQueue
from policies.fairness.ticket import Ticket
from policies.filters import is_worth_waiting
from policies.nouns import ClusterView, Decision, Prompt, Request, ServiceClass
from policies.predict import uncached_tokens
from policies.promise import cost_s, fastest_decode_s, promised_ttft_s, would_take
from router.cluster import Cluster
from router.flights import Flight
from router.tool_calls import ToolSyntax

MOST_FAILED_LOOKS = 8
"""Decisions that may fail in one walk through a queue: each takes up to 2 ms of the event loop."""

MOST_PLACED = 32
"""Prompts that one walk may place; then the event loop has its turn."""

MOST_SEEN = 512
"""Waiting prompts that one walk may look at, 5 µs each where they need not be decided on."""

PAUSE_S = 0.002
"""Changes within this time are answered by one walk."""


@dataclass(frozen=True, slots=True)
class Found:
    """A decision and the view that it was made on. `is_free`: it chose a backend, and nobody else is to go first."""

    view: ClusterView
    decision: Decision
    is_free: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """A backend was found and counts the request already: whoever gets this ends the `flight`."""

    bid: Bid
    found: Found
    flight: Flight


@dataclass(eq=False, slots=True)
class Bid:
    """One prompt that looks for a backend, with what goes there (`prompt`), what the answer begins with (`echo`), and
    how it may call `tools`.

    `decide` chooses on what is known at that moment, avoiding some backends; `refusal` is the error where nobody can
    take it; `sent` hears to which backend it goes. An answer of `new_tokens` is expected. Of `due_at`, when the first
    token is promised (None: whenever it comes), and `cost_s`, the backend time that it is predicted to take, the first
    look tells. `way` tells which backends its carrier can reach. `tries` counts the backends that had it and failed.
    """

    request: Request
    prompt: Prompt
    service_class: ServiceClass
    new_tokens: int
    arrived_at: float
    decide: Callable[[Request, Collection[str]], tuple[ClusterView, Decision]]
    refusal: Callable[[Request, ClusterView, Decision], ExpectedError]
    sent: Callable[[str], None]
    echo: str = ""
    tools: ToolSyntax | None = None
    way: Hashable = None
    due_at: float | None = None
    cost_s: float | None = None
    avoiding: frozenset[str] = frozenset()
    tries: int = 0
    is_charged: bool = False
    waiting: asyncio.Future[Placed] | None = None

    def __repr__(self) -> str:
        state = "waits" if self.waiting else "charged" if self.is_charged else "new"
        return f"<Bid {self.request.id} of {self.request.tenant} in {self.request.service_class}: {state}>"

    @property
    def shape(self) -> Hashable:
        """Bids of one shape need the same kind of room: where one finds none, the others need not look."""
        request = self.request
        size = request.prompt_tokens.bit_length()
        return (request.pools, request.policy, request.needs, request.rank, size, self.avoiding, self.way)

    def measure(self, view: ClusterView, decision: Decision) -> None:
        """Predict `cost_s` and `due_at` from the first decision; later ones do not change what was promised."""
        if self.cost_s is None:
            self.cost_s = cost_s(self.request, view, decision, new_tokens=self.new_tokens)
            decode_s = fastest_decode_s(self.request, view, decision, new_tokens=self.new_tokens)
            promised_s = promised_ttft_s(self.service_class, decode_s)
            self.due_at = None if promised_s is None else self.arrived_at + promised_s

    def ticket(self) -> Ticket:
        """Its place in the fair queue."""
        request = self.request
        assert self.cost_s is not None, f"{self!r} was not measured"
        return Ticket(
            id=request.id,
            tenant=request.tenant,
            service_class=request.service_class,
            cost_s=self.cost_s,
            arrived_at=self.arrived_at,
            tokens=request.prompt_tokens,
        )


@dataclass(eq=False, slots=True)
class _Lane:
    """The queue of one model, with the bids in it and how many there are of each shape.

    `stuck` are shapes that found no room since the last change, `hungry` the pools that somebody waits for who has
    waited so long that nobody may pass.
    """

    queue: FairQueue
    bids: dict[str, Bid] = field(default_factory=dict)
    shapes: Counter[Hashable] = field(default_factory=Counter)
    stuck: set[Hashable] = field(default_factory=set)
    hungry: list[tuple[str, ...] | None] = field(default_factory=list)
    rate: DrainRate = field(default_factory=DrainRate)
    walk: asyncio.TimerHandle | None = None

    def lets(self, bid: Bid) -> bool:
        """May `bid` be placed at once, without passing anybody who is to go first?"""
        if not self.bids:
            return True
        return self.walk is None and bid.shape not in self.stuck and not self.is_held_back(bid.request)

    def enter(self, bid: Bid, now: float) -> None:
        """`bid`, whose shape just found no room, waits: at its place, or in front if its backend failed."""
        if bid.is_charged:
            self.queue.push_front(bid.ticket())
        else:
            self.queue.push(bid.ticket(), now)
        self.bids[bid.request.id] = bid
        self.shapes[bid.shape] += 1
        self.stuck.add(bid.shape)

    def leave(self, bid: Bid) -> None:
        """`bid`, whose ticket has left the queue, waits no longer."""
        del self.bids[bid.request.id]
        self.shapes[bid.shape] -= 1
        if not self.shapes[bid.shape]:
            del self.shapes[bid.shape]

    def all_stuck(self) -> bool:
        """Has every shape that waits found no room?"""
        return self.shapes.keys() <= self.stuck

    def is_held_back(self, request: Request) -> bool:
        """Would `request` take the room that a hungry one waits for?"""
        return any(_overlap(pools, request.pools) for pools in self.hungry)


class Dispatcher:
    """A fair queue for each model. A change that may have made room is answered by a walk through the queue, in order.

    Nobody who finds room is kept waiting by somebody of a better rank who finds none, unless that one has waited longer
    than the ageing time: then nobody behind it may take room in its pools, so that small prompts do not starve it.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Callable[[], Config],
        clock: Callable[[], float],
        *,
        on_waiting: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        self._cluster, self._config, self._clock, self._on_waiting = cluster, config, clock, on_waiting
        self._lanes: dict[str, _Lane] = {}
        self._configured: Config | None = None
        self._by_tenant: Counter[str] = Counter()
        self._by_class: Counter[str] = Counter()

    def __repr__(self) -> str:
        waiting = ", ".join(f"{model}: {len(lane.bids)}" for model, lane in self._lanes.items())
        return f"<Dispatcher waiting {waiting or 'nobody'}>"

    def look(self, bid: Bid) -> Found:
        """What the policy decides for `bid` now. Raises what its `refusal` says if no backend can take it at all."""
        view, decision = bid.decide(bid.request, bid.avoiding)
        if decision.chosen is None and not is_worth_waiting(decision):
            raise bid.refusal(bid.request, view, decision)
        bid.measure(view, decision)
        lane = self._lane(bid)
        if decision.chosen is None and lane.bids:
            lane.stuck.add(bid.shape)
        is_free = decision.chosen is not None and not self._is_full and lane.lets(bid)
        return Found(view, decision, is_free)

    def take(self, bid: Bid, found: Found) -> Placed:
        """Begin the flight that `found` chose, and charge it to the tenant and class once."""
        assert found.decision.chosen is not None, f"{bid!r} found no backend"
        if not bid.is_charged:
            self._lane(bid).queue.charge(bid.ticket(), self._clock())
            bid.is_charged = True
        return self._placed(bid, found)

    async def wait(self, bid: Bid, found: Found, *, seconds: float | None) -> Placed | None:
        """Queue for a backend, after `found` had none; None if none came within `seconds`. Raises Overloaded, or what
        `refusal` says as soon as no backend can take it any more.
        """
        lane, was_charged = self._lane(bid), bid.is_charged
        self._make_place(bid)
        bid.waiting = waiting = asyncio.get_running_loop().create_future()
        self._enter(lane, bid, backends=sum(1 for _ in would_take(found.view, found.decision)))
        try:
            await asyncio.wait((waiting,), timeout=seconds)
        except asyncio.CancelledError:
            if waiting.done() and waiting.exception() is None:
                self._cluster.end(waiting.result().flight)
                if not was_charged:
                    self.correct(bid, 0.0)
            raise
        finally:
            self._leave(lane, bid)
        return waiting.result() if waiting.done() else None

    def wait_s(self, bid: Bid, found: Found) -> float:
        """Seconds that `bid` is expected to wait in the queue if it joined it now."""
        lane, request = self._lane(bid), bid.request
        ahead_s = lane.queue.ahead_s(request.service_class, request.tenant, self._clock())
        backends = sum(1 for _ in would_take(found.view, found.decision))
        return (ahead_s + (bid.cost_s or 0.0)) / lane.rate.per_second(backends)

    def correct(self, bid: Bid, actual_s: float) -> None:
        """The request is over and took `actual_s` of a backend's time; what was charged is put right, once."""
        self._lane(bid).queue.correct(bid.ticket(), actual_s, self._clock())
        bid.is_charged = False

    def changed(self) -> None:
        """There may be room where there was none."""
        for lane in self._lanes.values():
            if lane.bids:
                self._walk_soon(lane)

    def check(self) -> None:
        """Every bid that waits has its ticket in the queue; nothing waits that nobody waits for."""
        for model, lane in self._lanes.items():
            lane.queue.check()
            assert len(lane.queue) == len(lane.bids), f"{self!r}: tickets and bids of {model} differ"
            assert all(bid.waiting is not None for bid in lane.bids.values()), f"{self!r}: a bid waits for nothing"

    def waiting(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """How many prompts wait, by tenant and by class; who is not there has none."""
        return self._by_tenant, self._by_class

    def is_idle(self) -> bool:
        """Does nobody wait, and is everybody who was charged put right?"""
        return not any(lane.bids or lane.queue.charged for lane in self._lanes.values())

    @property
    def _is_full(self) -> bool:
        """Does the router have as many requests at backends as it may?"""
        return self._cluster.in_flight >= self._config().server.max_concurrent

    def _lane(self, bid: Bid) -> _Lane:
        self._follow_config()
        model = bid.request.model
        if model not in self._lanes:
            config = self._config()
            weights = {name: tenant.weight for name, tenant in config.tenants.items()}
            self._lanes[model] = _Lane(FairQueue(config.classes, weights, config.ageing_s))
        return self._lanes[model]

    def _follow_config(self) -> None:
        config = self._config()
        if config is not self._configured:
            self._configured = config
            weights = {name: tenant.weight for name, tenant in config.tenants.items()}
            for lane in self._lanes.values():
                lane.queue.reconfigure(config.classes, weights, config.ageing_s)

    def _make_place(self, bid: Bid) -> None:
        """Where the queue is full the newest of the tenant that fills it most leaves; Overloaded if that is `bid`'s.

        So a flood of one tenant does not close the queue to the others.
        """
        waiting, most = self._by_tenant.total(), self._config().server.max_queued
        if waiting < most:
            return
        hint = "try again in a moment, or raise queue.most"
        full = Overloaded(f"{waiting} requests wait, which is the limit", hint=hint, retry_after_s=1.0)
        fullest, count = max(self._by_tenant.items(), key=lambda pair: pair[1], default=("", 0))
        if self._by_tenant[bid.request.tenant] + 1 >= count:
            raise full
        for lane in self._lanes.values():
            newest = next((one for one in reversed(lane.bids.values()) if one.request.tenant == fullest), None)
            if newest is not None:
                self._let_go(lane, newest, full)
                return

    def _enter(self, lane: _Lane, bid: Bid, *, backends: int) -> None:
        now = self._clock()
        lane.rate.waited(now, backends)
        lane.enter(bid, now)
        self._count(bid, 1)

    def _leave(self, lane: _Lane, bid: Bid) -> None:
        """Let `bid` wait no longer; it may have been let go already."""
        bid.waiting = None
        if bid.request.id in lane.bids:
            lane.queue.remove(bid.request.id)
            lane.leave(bid)
            self._count(bid, -1)
            # it may have been the one that nobody was to pass
            self._walk_soon(lane)
        if not lane.bids:
            lane.rate.emptied(self._clock())

    def _placed(self, bid: Bid, found: Found) -> Placed:
        chosen = next(backend for backend in found.view.backends if backend.name == found.decision.chosen)
        uncached, is_first_try = uncached_tokens(bid.request, chosen), not bid.avoiding
        flight = self._cluster.begin(chosen.name, bid.request, uncached, is_first_try=is_first_try)
        bid.sent(chosen.name)
        return Placed(bid, found, flight)

    def _count(self, bid: Bid, change: int) -> None:
        tenant, service_class = bid.request.tenant, bid.request.service_class
        self._by_tenant[tenant] += change
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._by_class[service_class] += change
        self._on_waiting(service_class, self._by_class[service_class])

    def _walk_soon(self, lane: _Lane) -> None:
        if lane.walk is None and lane.bids:
            lane.walk = asyncio.get_running_loop().call_later(PAUSE_S, self._walk, lane)

    def _walk(self, lane: _Lane) -> None:
        """Place whom there is room for, in fair order."""
        lane.walk = None
        lane.stuck.clear()
        lane.hungry.clear()
        self._follow_config()
        leaving: list[tuple[Bid, Placed | Exception]] = []
        failed = 0
        for ticket in islice(lane.queue.order(self._clock()), MOST_SEEN):
            if self._is_full or lane.all_stuck():
                break
            bid = lane.bids[ticket.id]
            if bid.shape not in lane.stuck and not lane.is_held_back(bid.request):
                if (outcome := self._tried(lane, bid)) is None:
                    failed += 1
                else:
                    leaving.append((bid, outcome))
            if len(leaving) == MOST_PLACED or failed == MOST_FAILED_LOOKS:
                break
        # the queue stands still while it is walked
        for bid, outcome in leaving:
            self._let_go(lane, bid, outcome)
        if len(leaving) == MOST_PLACED:
            self._walk_soon(lane)

    def _tried(self, lane: _Lane, bid: Bid) -> Placed | Exception | None:
        """Where `bid` goes now, or why it goes nowhere; None if it has to wait on."""
        try:
            view, decision = bid.decide(bid.request, bid.avoiding)
        except Exception as error:  # noqa: BLE001 - a policy's mistake is one request's failure, not the queue's
            return error
        if decision.chosen is not None:
            return self._placed(bid, Found(view, decision, is_free=True))
        if not is_worth_waiting(decision):
            return bid.refusal(bid.request, view, decision)
        lane.stuck.add(bid.shape)
        if self._clock() - bid.arrived_at > self._config().ageing_s:
            lane.hungry.append(bid.request.pools)
        return None

    def _let_go(self, lane: _Lane, bid: Bid, outcome: Placed | Exception) -> None:
        assert bid.waiting is not None, f"{bid!r} was let go by a queue that it is not in"
        lane.leave(bid)
        self._count(bid, -1)
        if isinstance(outcome, Exception):
            lane.queue.remove(bid.request.id)
            bid.waiting.set_exception(outcome)
            return
        lane.queue.take(bid.request.id, self._clock())
        lane.rate.left(bid.cost_s or 0.0)
        bid.is_charged = True
        bid.waiting.set_result(outcome)


def _overlap(pools: tuple[str, ...] | None, others: tuple[str, ...] | None) -> bool:
    return pools is None or others is None or not set(pools).isdisjoint(others)
