"""Room for lines: which may be sent now, so that they use only what other requests leave."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from policies.learning.company import Company
from policies.nouns import Decision, Outcome, Request
from policies.spare import Spare, rests
from router.call.gateway import Gateway
from router.call.observer import Account

LOOK_S = 0.005
"""Time between two looks for room while lines wait."""

_LOOK_BACKENDS = 0.0005
"""The same for each backend: a look takes some 20 µs for each."""

SHARED_S = 60.0
"""A backend is shared with other requests for so long after the last of them."""

MOST_WATCHED = 4096
"""Most other requests of which the first token is awaited."""


BEGUN_S = 0.25
"""A prompt of a line counts as computed after this time, if the first piece of its answer has not told that before."""


class _Watched(NamedTuple):
    """Another request that was sent: where, how long its prompt is, and how many lines were there."""

    backend: str
    prompt_tokens: int
    lines: int
    rests: bool


class _Waiter(NamedTuple):
    line: str
    model: str
    entered: asyncio.Future[None]


class LineRoom:
    """Lets lines in, tenants in turn, at most `most` at a time. Also a listener of telemetry: it hears how other
    requests fare. `slowdown` is the share by which these may begin later."""

    def __init__(
        self, gateway: Callable[[], Gateway], *, most: Callable[[], int], slowdown: Callable[[], float]
    ) -> None:
        self._gateway, self._most, self._slowdown = gateway, most, slowdown
        self.spare = Spare()
        self._company: dict[str, Company] = {}
        self._lines: dict[str, str | None] = {}
        """The line calls that are inside, and the backends where they are."""
        self._models: dict[str, str] = {}
        self._at: Counter[str] = Counter()
        self._computed: dict[str, dict[str, float]] = {}
        """By backend, the lines of which it computes the prompts, and when they were sent."""
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._watched: dict[str, _Watched] = {}
        self._shared_at: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LineRoom {len(self._lines)} lines inside, {self.waiting} wait>"

    @property
    def inside(self) -> int:
        """Lines that were let in."""
        return len(self._lines)

    @property
    def waiting(self) -> int:
        """Lines that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def windows(self) -> float:
        """Lines that all backends together may have now, as far as other requests allow it."""
        return sum(self.spare.window(name) for name in self._gateway().cluster.names())

    async def enter(self, line: str, tenant: str, model: str) -> None:
        """Return when there is room for the call `line`, which `leave` ends."""
        waiter = _Waiter(line, model, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._look_soon(0.0)
        try:
            await waiter.entered
        except asyncio.CancelledError:
            if line in self._lines:
                # it was let in in the same moment
                self.leave(line)
            else:
                self._forget(tenant, waiter)
            raise

    def placed(self, line: str, backend: str) -> None:
        """The call `line` goes to `backend`; again if that failed."""
        self._take_away(line)
        self._lines[line] = backend
        self._at[backend] += 1
        self._computed.setdefault(backend, {})[line] = self._gateway().clock()

    def begun(self, line: str) -> None:
        """The first piece of the answer to `line` has come."""
        if (backend := self._lines[line]) is not None:
            self._computed[backend].pop(line, None)
            if self._waiting:
                self._look_soon(0.0)

    def leave(self, line: str) -> None:
        """The call `line` has ended."""
        self._take_away(line)
        del self._lines[line], self._models[line]
        if self._waiting:
            self._look_soon(0.0)

    def _take_away(self, line: str) -> None:
        """It is at no backend any more."""
        backend = self._lines[line]
        if backend is not None:
            self._computed[backend].pop(line, None)
            self._at[backend] -= 1
            if not self._at[backend]:
                del self._at[backend], self._computed[backend]

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    # what other requests do

    def decided(self, request: Request, decision: Decision, at: float) -> None:
        """See Listener."""
        backend = decision.chosen
        if backend is None or request.id in self._lines:
            return
        self._shared_at[backend] = at
        if not self._lines and not self._waiting:
            return
        if len(self._watched) < MOST_WATCHED or request.id in self._watched:
            self._watched[request.id] = _Watched(
                backend, request.prompt_tokens, self._at[backend], rests(backend, self._shared_at[backend])
            )

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:  # noqa: ARG002
        """See Listener."""
        seen = self._watched.pop(account.id, None)
        cluster = self._gateway().cluster
        if seen is None or account.first_at is None or seen.backend not in cluster:
            return
        company = self._company_of(cluster.backend(seen.backend).pool)
        company.add(
            account.first_at - account.started_at, prompt_tokens=seen.prompt_tokens, lines=seen.lines, rests=seen.rests
        )

    def missed(self, service_class: str, step: str) -> None:
        """See Listener."""

    def _company_of(self, pool: str) -> Company:
        return self._company.setdefault(pool, Company())

    # which line is let in

    def _look_soon(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        gateway = self._gateway()
        free = self._most() - len(self._lines)
        models = {waiter.model for queue in self._waiting.values() for waiter in queue}
        rooms = {model: self._room(model, gateway) for model in models} if free > 0 else {}
        is_changed = True
        while is_changed and free > 0:
            is_changed = False
            for tenant in list(self._waiting):
                waiter = next((each for each in self._waiting[tenant] if rooms[each.model] > 0), None)
                if waiter is None or free <= 0:
                    continue
                rooms[waiter.model] -= 1
                free -= 1
                is_changed = True
                self._waiting.move_to_end(tenant)
                self._forget(tenant, waiter)
                if not waiter.entered.done():
                    self._lines[waiter.line], self._models[waiter.line] = None, waiter.model
                    waiter.entered.set_result(None)
        if self._waiting:
            self._look_soon(max(LOOK_S, _LOOK_BACKENDS * len(gateway.cluster.names())))

    def _room(self, model: str, gateway: Gateway) -> int:
        """How many further lines for `model` may be sent now."""
        now, config = gateway.clock(), gateway.config
        if gateway.cluster.model(model) is None and not gateway.awaits_backends():
            # its call will say that there is no such model
            return 1
        last = max(service_class.rank for service_class in config.classes.values())
        views = [
            backend for backend in gateway.cluster.view(now, rank=last, model=model).backends if model in backend.models
        ]
        waits = gateway.dispatcher.waits(model, last)
        room = -sum(self._models[line] == model for line, where in self._lines.items() if where is None)
        for backend in views:
            name, is_shared = backend.name, self._is_shared(backend.name, now)
            most = self._company_of(backend.pool).most_lines(self._slowdown()) if is_shared else None
            self.spare.tick(name, now, most=most, waits=waits)
            room += self.spare.room(
                backend, self._at[name], now, is_shared=is_shared, computed=self._computed_at(name, now)
            )
        return 0 if waits else room

    def _computed_at(self, backend: str, now: float) -> int:
        """The number of lines of which `backend` computes the prompts."""
        return sum(now - at < BEGUN_S for at in self._computed.get(backend, {}).values())

    def _is_shared(self, backend: str, now: float) -> bool:
        at = self._shared_at.get(backend)
        return at is not None and now - at < SHARED_S

    def _forget(self, tenant: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(tenant)
        if queue is None or waiter not in queue:
            return
        queue.remove(waiter)
        if not queue:
            del self._waiting[tenant]

    def follow(self) -> None:
        """Forget backends that are gone."""
        cluster = self._gateway().cluster
        self.spare.follow(cluster.names())
        for name in [name for name in self._shared_at if name not in cluster]:
            del self._shared_at[name]
