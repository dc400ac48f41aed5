"""Mirrors in force: requests are sent to another pool too, its answers are dropped, and times and lengths compared.

No client waits for a mirror and no tenant pays for one. A mirror is made only where a backend has room at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from policies.errors import ExpectedError
from policies.mirror import Mirror
from policies.nouns import Delta, ServiceClass
from policies.rules import Rule
from router.call.bid import Bid, Placed
from router.call.carrier import Ourselves
from router.call.dispatch import Dispatcher
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight

MOST_AT_ONCE = 64
"""Mirrors that run at once; further requests are not mirrored."""

MOST_BYTES = 2**20
"""Of a body that is mirrored: a mirror keeps it in memory when its call has ended."""

MOST_S = 600.0
"""After so many seconds a mirror is given up."""

How = Literal["answered", "failed", "left_out"]

_log = logging.getLogger("pointsman.mirrors")


class Side(NamedTuple):
    """Sums over the answers of one side of pairs that both answered; `failed` counts all."""

    failed: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0

    def plus(self, ended: _Ended) -> Side:
        """With one more answer."""
        return Side(self.failed, self.ttft_s + ended.ttft_s, self.seconds + ended.seconds, self.tokens + ended.tokens)


class Compared(NamedTuple):
    """The mirror `pool` of one rule since that rule is in force: `pairs` of answers, the sums of both sides, and the
    requests that were `left_out` because no backend of the pool had room."""

    rule: int
    pool: str
    share: float
    pairs: int
    own: Side
    mirror: Side
    left_out: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """The answer of one side of a pair: its seconds from when it was sent, and its tokens."""

    ttft_s: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class _Sums:
    pairs: int = 0
    own: Side = field(default_factory=Side)
    mirror: Side = field(default_factory=Side)
    left_out: int = 0


@dataclass(slots=True, eq=False)
class Mirrored:
    """One request with a mirror: what is known of each side."""

    rule: Rule
    own: _Ended | None = None
    mirror: _Ended | None = None
    sides: int = 0


class _Silent:
    """Takes an answer and drops it."""

    def __init__(self, flight: Flight, clock: Callable[[], float]) -> None:
        self._flight, self._clock = flight, clock

    def __repr__(self) -> str:
        return f"<_Silent {self._flight!r}>"

    def take(self, delta: Delta) -> bool:
        """Note when it came."""
        if not delta.is_repeat:
            self._flight.heard(delta, self._clock())
        return True

    async def ready(self) -> None:
        """At once."""


class Mirrors:
    """The mirrors of the rules in force. `on_ended(rule, pool, how)` hears of each request that was to be mirrored."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        cluster: Cluster,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        on_ended: Callable[[int, str, How], None],
    ) -> None:
        self._dispatcher, self._cluster, self._clock, self._rng = dispatcher, cluster, clock, rng
        self._on_ended = on_ended
        self._running: set[asyncio.Task[None]] = set()
        self._sums: dict[Rule, _Sums] = {}
        self._rules: dict[Rule, int] = {}
        self._carrier = Ourselves()

    def __repr__(self) -> str:
        return f"<Mirrors: {len(self._running)} run>"

    def follow(self, rules: tuple[Rule, ...]) -> None:
        """Have the mirrors of `rules`. A rule that stays as it is keeps what is known of it."""
        self._rules = {rule: number for number, rule in enumerate(rules, start=1) if rule.mirror is not None}
        self._sums = {rule: self._sums.get(rule) or _Sums() for rule in self._rules}

    def begin(self, rule: Rule, mirror: Mirror, bid: Bid, placed: Placed, last: ServiceClass) -> Mirrored | None:
        """Perhaps send the request of `bid`, which is `placed`, to the mirror too, behind all of the class `last`."""
        if self._rng.random() >= mirror.share or rule not in self._rules:
            return None
        copy = self._placed(mirror, bid, placed, last)
        if copy is None:
            self._sums[rule].left_out += 1
            self._on_ended(self._rules[rule], mirror.pool, "left_out")
            return None
        mirrored = Mirrored(rule)
        task = asyncio.create_task(self._run(mirror, copy, mirrored), name=f"mirror of {bid.request.id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return mirrored

    def ended(self, mirrored: Mirrored, flight: Flight, by: BaseException | None) -> None:
        """The request itself has ended, with `flight` as its last. If its client left it is not compared."""
        if by is not None and not isinstance(by, ExpectedError):
            return
        mirrored.own = _ended(flight, self._clock()) if by is None else None
        self._compare(mirrored)

    def compared(self) -> list[Compared]:
        """Each mirror, in the order of the file."""
        found = []
        for rule, number in self._rules.items():
            assert rule.mirror is not None, "only rules with mirrors are kept"
            sums, mirror = self._sums[rule], rule.mirror
            found.append(Compared(number, mirror.pool, mirror.share, sums.pairs, sums.own, sums.mirror, sums.left_out))
        return found

    async def close(self) -> None:
        """End all mirrors."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._running) <= MOST_AT_ONCE, f"{self!r}: too many at once"

    def _placed(self, mirror: Mirror, bid: Bid, placed: Placed, last: ServiceClass) -> Placed | None:
        """A flight for a copy of `bid` at a backend of the mirror with room; None if none has, or others wait."""
        prompt = bid.prompt
        size = 8 * len(prompt.token_ids) if prompt.native is None else len(prompt.native.raw)
        if len(self._running) >= MOST_AT_ONCE or size > MOST_BYTES:
            return None
        request = replace(
            bid.request,
            id=f"{bid.request.id}-mirror",
            pools=(mirror.pool,),
            rank=last.rank + 1,
            preemptible=True,
            may_transfer=False,
            may_fetch=False,
        )
        copy = replace(bid, request=request, so_far=None, failed=frozenset(), avoiding=frozenset(), waiting=None)
        try:
            return self._dispatcher.second(copy, placed, within_s=math.inf)
        except ExpectedError:
            return None

    async def _run(self, mirror: Mirror, copy: Placed, mirrored: Mirrored) -> None:
        """Let the mirror answer, and drop the answer."""
        flight: Flight = copy.flight
        how: How = "failed"
        try:
            with self._cluster.flying(flight):
                backend = self._cluster.backend_of(flight)
                async with asyncio.timeout(MOST_S):
                    await self._carrier.carry(copy, backend, copy.bid.prompt, _Silent(flight, self._clock))
            how = "answered"
            mirrored.mirror = _ended(flight, self._clock())
        except (ExpectedError, TimeoutError) as error:
            _log.info("the mirror %s failed: %s", copy.bid.request.id, error)
        finally:
            if (number := self._rules.get(mirrored.rule)) is not None:
                self._on_ended(number, mirror.pool, how)
            self._compare(mirrored)

    def _compare(self, mirrored: Mirrored) -> None:
        """Once both sides have ended, add them to the sums of the rule, if that is still in force."""
        mirrored.sides += 1
        sums = self._sums.get(mirrored.rule)
        if mirrored.sides < 2 or sums is None:
            return
        own, other = mirrored.own, mirrored.mirror
        if own is not None and other is not None:
            sums.pairs += 1
            sums.own, sums.mirror = sums.own.plus(own), sums.mirror.plus(other)
        else:
            sums.own = sums.own._replace(failed=sums.own.failed + (own is None))
            sums.mirror = sums.mirror._replace(failed=sums.mirror.failed + (other is None))


def _ended(flight: Flight, now: float) -> _Ended | None:
    """What `flight` took; None if it gave no answer."""
    if not flight.answered:
        return None
    first_at, last_at = flight.first_at or now, flight.last_at or now
    tokens = flight.drawn_tokens if flight.usage is None else flight.usage.completion_tokens
    return _Ended(first_at - flight.sent_at, last_at - flight.sent_at, tokens)
