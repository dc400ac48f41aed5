"""From a prompt to a backend with room: at once, after a wait in the queue, or by the steps of `on_miss`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from policies.errors import ContextExceeded, ExpectedError, NoBackend, Overloaded, Unavailable
from policies.nouns import Request
from policies.on_miss import Degrade, Queue, Shed, Spill, Step
from policies.predict import fastest_prefill_s
from policies.quantities import rounded_seconds
from router.call.bid import Bid, Found, Placed
from router.call.dispatch import Dispatcher


async def _as_it_is(bid: Bid, _: str) -> Bid:
    return bid


class Placer(msgspec.Struct, frozen=True):
    """Finds a backend for one prompt within what its class promises.

    `steps` are those of its class for when the promise is missed. `degraded` makes of a bid one for another model;
    `on_step` hears of each step that is tried, by name, `on_shed` of a bid that is refused, with the last look at it.
    """

    dispatcher: Dispatcher
    clock: Callable[[], float]
    steps: tuple[Step, ...] = ()
    degraded: Callable[[Bid, str], Awaitable[Bid]] = _as_it_is
    on_step: Callable[[str], None] = lambda _: None
    on_shed: Callable[[Bid, Found], None] = lambda *_: None

    async def place(self, bid: Bid) -> Placed:
        """A backend for `bid`, where its flight has begun.

        While the promise can be kept, that is the first backend that has room; once it cannot, each step is tried in
        its turn. After the last step, or without any, the bid waits for any backend. If no backend is well, or none has
        what it needs, the next step that leads elsewhere is taken at once. Raises Overloaded where a step sheds or the
        queue is full, and the bid's `refusal` if no backend can take it at all, or none is well for too long.
        """
        for at, step in enumerate(self.steps):
            leads_on = any(isinstance(later, Spill | Degrade) for later in self.steps[at:])
            try:
                found = self.dispatcher.look(bid)
                none_is_there = leads_on and found.is_outage
                if not none_is_there and (placed := await self._in_time(bid, found, step)) is not None:
                    return placed
            except (NoBackend, ContextExceeded):
                if not leads_on:
                    raise
                none_is_there = True
            if none_is_there and isinstance(step, Spill | Degrade):
                self._try(step)
            match step:
                case Spill(pool):
                    bid.request = _spilled(bid, pool)
                case Degrade(model):
                    bid = await self.degraded(bid, model)
                case Shed(status):
                    raise self._shed(bid, status)
        return await self.whenever(bid)

    async def elsewhere(self, bid: Bid) -> Placed:
        """The next backend for `bid` after one has failed, however late; a pool to spill to if no other is left.

        Without one the same again, if it is ill by now: once it is well, as long as the promise lets `bid` wait. Raises
        as `place` does.
        """
        for step in self.steps:
            if isinstance(step, Spill) and (spilled := _spilled(bid, step.pool)) is not bid.request:
                with suppress(NoBackend):
                    if not self.dispatcher.look(bid).is_outage:
                        return await self.whenever(bid)
                self._try(step)
                bid.request = spilled
        try:
            return await self.whenever(bid)
        except NoBackend:
            if not self.dispatcher.forgive(bid):
                raise
            placed = await self._by(self._last_at(bid), bid, self.dispatcher.look(bid))
            if placed is None:
                raise
            return placed

    async def whenever(self, bid: Bid) -> Placed:
        """The next backend that has room for `bid`, however late. Raises as `place` does."""
        found = self.dispatcher.look(bid)
        return self.dispatcher.take(bid, found) if found.is_free else await self.dispatcher.waited(bid, found)

    async def _in_time(self, bid: Bid, found: Found, step: Step) -> Placed | None:
        """A backend that keeps the promise; else one for which `step` lets it wait; else None, and `step` is tried."""
        placed = await self._by(bid.due_at, bid, found)
        if placed is None:
            self._try(step)
            if isinstance(step, Queue):
                assert bid.due_at is not None, "what is promised at no time waits for any backend"
                last_at = max(bid.arrived_at + step.seconds, bid.due_at)
                placed = await self._by(last_at, bid, self.dispatcher.look(bid))
        return placed

    def _last_at(self, bid: Bid) -> float | None:
        """When the first token of `bid` has to come at the latest for it not to be shed; None: whenever it comes."""
        if bid.due_at is None or not any(isinstance(step, Shed) for step in self.steps):
            return None
        waits = (bid.arrived_at + step.seconds for step in self.steps if isinstance(step, Queue))
        return max(bid.due_at, *waits, bid.arrived_at)

    def _try(self, step: Step) -> None:
        self.on_step(type(step).__name__.lower())

    async def _by(self, last_at: float | None, bid: Bid, found: Found) -> Placed | None:
        """A backend that begins to answer by `last_at`; None if there will be none, as soon as that is foreseen."""
        if found.is_free:
            return self.dispatcher.take(bid, found) if last_at is None or self._first_at(found) <= last_at else None
        if last_at is None:
            return await self.dispatcher.wait(bid, found, seconds=None)
        patience_s = last_at - self.clock() - fastest_prefill_s(bid.request, found.view, found.decision)
        if patience_s > 0 and self.dispatcher.wait_s(bid, found) <= patience_s:
            placed = await self.dispatcher.wait(bid, found, seconds=patience_s)
            if placed is not None:
                return placed
        return None if found.decision.awaits is None else self._at_any(bid, last_at)

    def _at_any(self, bid: Bid, last_at: float) -> Placed | None:
        """A backend that has room and begins to answer by `last_at`, although `bid` preferred to wait for another."""
        bid.takes_any = True
        found = self.dispatcher.look(bid)
        return self.dispatcher.take(bid, found) if found.is_free and self._first_at(found) <= last_at else None

    def _first_at(self, found: Found) -> float:
        return self.clock() + (found.decision.predicted_ttft_s or 0.0)

    def _shed(self, bid: Bid, status: int) -> ExpectedError:
        found, now = self.dispatcher.look(bid), self.clock()
        if found.is_outage:
            return bid.refusal(bid.request, found.view, found.decision)
        prefill_s = fastest_prefill_s(bid.request, found.view, found.decision)
        first_s = found.decision.predicted_ttft_s if found.is_free else self.dispatcher.wait_s(bid, found) + prefill_s
        due_s = now if bid.due_at is None else bid.due_at
        late_s = max(0.0, now + (first_s or 0.0) - due_s)
        self.on_shed(bid, found)
        kind = Overloaded if status == 429 else Unavailable
        late, name = rounded_seconds(late_s), bid.request.service_class
        return kind(
            f"the first token would come {late} later than class '{name}' promises",
            hint="try again later, or ask for a class that waits",
            retry_after_s=max(1.0, late_s),
        )


def _spilled(bid: Bid, pool: str) -> Request:
    """What `bid` asks, of the backends of `pool` too."""
    pools = bid.request.pools
    return bid.request if pools is None or pool in pools else replace(bid.request, pools=(*pools, pool))
