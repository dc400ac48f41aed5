"""Room for lines: which may be sent now, so that they use only what other requests leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from policies.learning.company import Company
from policies.nouns import Decision, Outcome, Request
from policies.spare import Spare, rests
from router.batches.line_places import LinePlaces
from router.batches.loop_share import LoopShare
from router.call.gateway import Gateway
from router.call.observer import Account
from router.waiters import Waiter, Waiters

LOOK_S = 0.01
"""Time between two looks for room while lines wait and none of them begins or ends."""

_LOOK_BACKENDS = 0.0005
"""The same for each backend: a look takes some 20 µs for each."""

_AT_ONCE = 4
"""Lines that begin in one turn of the event loop: another request waits for them."""

SHARED_S = 60.0
"""A backend is shared with other requests for so long after the last of them."""

MOST_WATCHED = 4096
"""Most other requests of which the first token is awaited."""

BEGUN_S = 0.25
"""A prompt of a line counts as computed after this time or the predicted one, whichever is shorter, if the first piece
of its answer has not told that before: many engines answer a line in one piece, at its end."""


class _Asked(NamedTuple):
    """The call `line` for `model` wants room. `places` is None until it was tried. Lines of one tenant with equal
    models and places find room together."""

    line: str
    model: str
    places: LinePlaces | None


_Line = Waiter[str, _Asked, frozenset[str]]
"""A line that waits, for the backends to which it may not go."""


class _Watched(NamedTuple):
    """Another request that was sent: where, how long its prompt is, and how many lines were there."""

    backend: str
    prompt_tokens: int
    lines: int
    rests: bool


@dataclass(slots=True)
class _Inside:
    """A line that was let in, its backend once it has one, and for how long that computes the prompt at most."""

    places: LinePlaces
    backend: str | None = None
    computed_s: float = BEGUN_S


@dataclass(slots=True)
class _Room:
    """How many further lines may be sent to some places now, and the backends to which they may not go."""

    lines: int
    avoiding: frozenset[str] = frozenset()


class LineRoom:
    """Lets lines in, tenants in turn, at most `most` at a time. Also a listener of telemetry: it hears how other
    requests fare. `slowdown` is the share by which these may begin later."""

    def __init__(
        self, gateway: Callable[[], Gateway], *, most: Callable[[], int], slowdown: Callable[[], float]
    ) -> None:
        self._gateway, self._most, self._slowdown = gateway, most, slowdown
        self.spare, self.share = Spare(), LoopShare(lambda: gateway().clock())
        self._company: dict[str, Company] = {}
        self._lines: dict[str, _Inside] = {}
        self._seen: dict[tuple[str, str], LinePlaces] = {}
        """By tenant and model, where rules have let lines go since there was none."""
        self._at: Counter[str] = Counter()
        self._computed: dict[str, dict[str, float]] = {}
        """By backend, the lines of which it computes the prompts, and when they were sent."""
        self._waiting = Waiters[str, _Asked, frozenset[str]](
            take_back=lambda waiter, _: self.leave(waiter.wish.line), left=lambda: None
        )
        self._watched: dict[str, _Watched] = {}
        self._shared_at: dict[str, float] = {}
        self._others_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    def __repr__(self) -> str:
        return f"<LineRoom {len(self._lines)} lines inside, {self.waiting} wait>"

    @property
    def inside(self) -> int:
        """Lines that were let in."""
        return len(self._lines)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def windows(self) -> float:
        """Lines that all backends together may have now, as far as other requests allow it."""
        return sum(self.spare.window(name) for name in self._gateway().cluster.names())

    async def enter(self, line: str, tenant: str, model: str, places: LinePlaces | None = None) -> frozenset[str]:
        """Return when there is room for the call `line`, which `leave` ends: the backends to which it may not go.
        `places` is what `leave` returned when it was tried before."""
        kind = model, places
        if self._timer is None or not self._waiting.has(tenant, kind):
            self._look_soon()
        return await self._waiting.wait(tenant, _Asked(line, model, places), kind=kind)

    def placed(self, line: str, backend: str) -> None:
        """The call `line` goes to `backend`; again if that failed."""
        self._take_away(line)
        self._lines[line].backend = backend
        self._at[backend] += 1
        self._computed.setdefault(backend, {})[line] = self._gateway().clock()

    def begun(self, line: str) -> None:
        """The first piece of the answer to `line` has come."""
        if (backend := self._lines[line].backend) is not None:
            self._computed[backend].pop(line, None)
            if self._waiting:
                self._look_soon()

    def leave(self, line: str) -> LinePlaces:
        """The call `line` has ended: where the rules let it go, as far as a decision has told."""
        self._take_away(line)
        places = self._lines.pop(line).places
        if self._waiting:
            self._look_soon()
        elif not self._lines:
            self._seen.clear()
        return places

    def _take_away(self, line: str) -> None:
        """It is at no backend any more."""
        backend = self._lines[line].backend
        if backend is not None:
            self._computed[backend].pop(line, None)
            self._at[backend] -= 1
            if not self._at[backend]:
                del self._at[backend], self._computed[backend]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # what other requests do

    def decided(self, request: Request, decision: Decision, at: float) -> None:
        backend = decision.chosen
        if (line := self._lines.get(request.id)) is not None:
            line.places = LinePlaces(line.places.model, request.pools)
            line.computed_s = min(BEGUN_S, decision.predicted_ttft_s or BEGUN_S)
            key = request.tenant, line.places.model
            self._seen[key] = self._seen.get(key, line.places).joined(line.places)
            return
        if backend is None:
            return
        self._shared_at[backend] = self._others_at = at
        if not self._lines and not self._waiting:
            return
        if len(self._watched) < MOST_WATCHED or request.id in self._watched:
            self._watched[request.id] = _Watched(
                backend, request.prompt_tokens, self._at[backend], rests(backend, self._shared_at[backend])
            )

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:  # noqa: ARG002
        seen = self._watched.pop(account.id, None)
        cluster = self._gateway().cluster
        if seen is None or account.first_at is None or seen.backend not in cluster:
            return
        company = self._company_of(cluster.backend(seen.backend).pool)
        company.add(
            account.first_at - account.started_at, prompt_tokens=seen.prompt_tokens, lines=seen.lines, rests=seen.rests
        )

    def missed(self, service_class: str, step: str) -> None:
        """Nothing is done here."""

    def _company_of(self, pool: str) -> Company:
        return self._company.setdefault(pool, Company())

    # which line is let in

    def _look_soon(self, seconds: float = 0.0) -> None:
        """Look in so many `seconds`, or when lines have had no more than their share of the event loop."""
        loop = asyncio.get_running_loop()
        if self._has_others():
            seconds = max(seconds, self.share.wait_s())
        at = loop.time() + seconds
        if self._timer is not None:
            if self._look_at <= at:
                return
            self._timer.cancel()
        self._look_at, self._timer = at, loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        gateway = self._gateway()
        most = 1 if self._has_others() else _AT_ONCE
        has_more = self._let_in(min(most, self._most() - len(self._lines)), gateway) == most
        if self._waiting:
            self._look_soon(0.0 if has_more else max(LOOK_S, _LOOK_BACKENDS * len(gateway.cluster.names())))

    def _let_in(self, most: int, gateway: Gateway) -> int:
        """Let in up to `most` lines; how many there was room for."""
        if most <= 0:
            return 0
        wanted = {self._places_of(waiting) for waiting in self._waiting.first()}
        rooms = {places: self._room(places, gateway) for places in wanted}

        def let_in(waiting: _Line) -> frozenset[str] | None:
            places = self._places_of(waiting)
            if rooms[places].lines <= 0:
                return None
            for other, room in rooms.items():
                room.lines -= other.meets(places)
            self._lines[waiting.wish.line] = _Inside(places)
            self.share.begin()
            return rooms[places].avoiding

        return self._waiting.serve(let_in, most)

    def _places_of(self, waiting: _Line) -> LinePlaces:
        """Where it may go. Only its call tells which rule it has; until then, where the others of its tenant go."""
        asked = waiting.wish
        return asked.places or self._seen.get((waiting.owner, asked.model)) or LinePlaces(asked.model)

    def _room(self, places: LinePlaces, gateway: Gateway) -> _Room:
        """How many further lines for `places` may be sent now, and where not."""
        now, config, model = gateway.clock(), gateway.config, places.model
        if gateway.cluster.model(model) is None and not gateway.models.may_come(model, gateway.config):
            # its call will say that there is no such model, or none at all, or what its alias stands for
            return _Room(1)
        if not any(self._may_have_room(name, now) for name in gateway.cluster.names()):
            return _Room(0)
        last = max(service_class.rank for service_class in config.classes.values())
        waits, avoiding = gateway.dispatcher.waits(model, last), set[str]()
        room = -sum(line.backend is None and line.places.meets(places) for line in self._lines.values())
        for backend in gateway.cluster.view(now, rank=last, model=model).backends:
            name, is_shared = backend.name, self._is_shared(backend.name, now)
            if model not in backend.models or not places.has(backend.pool):
                continue
            most = self._company_of(backend.pool).most_lines(self._slowdown()) if is_shared else None
            self.spare.tick(name, now, most=most, waits=waits)
            room += self.spare.room(
                backend, self._at[name], now, is_shared=is_shared, computed=self._computed_at(name, now)
            )
            if self.spare.avoids(backend, self._at[name], now, is_shared=is_shared):
                avoiding.add(name)
        return _Room(0 if waits else room, frozenset(avoiding))

    def _may_have_room(self, name: str, now: float) -> bool:
        """Whether it is worth a look: its view takes longer than this."""
        return not self._is_shared(name, now) or self.spare.may_have_room(name, now, self._computed_at(name, now))

    def _computed_at(self, backend: str, now: float) -> int:
        """The number of lines of which `backend` computes the prompts."""
        sent = self._computed.get(backend, {})
        return sum(now - at < self._lines[line].computed_s for line, at in sent.items())

    def _has_others(self) -> bool:
        """Whether other requests come to this router."""
        return self._is_recent(self._others_at, self._gateway().clock())

    def _is_shared(self, backend: str, now: float) -> bool:
        return self._is_recent(self._shared_at.get(backend), now)

    def _is_recent(self, at: float | None, now: float) -> bool:
        return at is not None and now - at < SHARED_S

    def follow(self) -> None:
        """Forget backends that are gone."""
        cluster = self._gateway().cluster
        self.spare.follow(cluster.names())
        for name in [name for name in self._shared_at if name not in cluster]:
            del self._shared_at[name]
