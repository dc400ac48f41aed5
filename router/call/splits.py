"""Splits in force: which pool a request goes to, how requests ended there, and which pools lost their share."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policies.nouns import ServiceClass
from policies.rules import Rule
from policies.split import CHANCE_OF_LATEST, LATEST, Split, Tally, why_worse
from router.fleet.cluster.flights import Flight

MINUTES = 10
"""The requests of so many minutes are compared."""

How = Literal["kept", "missed", "failed"]

_log = logging.getLogger("pointsman.splits")


class Standing(NamedTuple):
    """One pool of one split: its `share` in force, how its requests of the last minutes ended, and why it has lost its
    share; None if it has not."""

    rule: int
    pool: str
    share: float
    tally: Tally
    lost: str | None


@dataclass(slots=True)
class _Minutes:
    """Tallies of the last minutes, each with the number of its minute, and how the latest requests ended."""

    tallies: deque[tuple[int, Tally]] = field(default_factory=lambda: deque(maxlen=MINUTES))
    latest: deque[How] = field(default_factory=lambda: deque(maxlen=LATEST[-1]))

    def add(self, how: How, now: float) -> None:
        """A request ended at `now`."""
        tally = self._of(now)
        tally.ended += 1
        tally.failed += how == "failed"
        tally.missed += how == "missed"
        self.latest.append(how)

    def _of(self, now: float) -> Tally:
        """The tally of the present minute."""
        minute = int(now // 60)
        if not self.tallies or self.tallies[-1][0] != minute:
            self.tallies.append((minute, Tally()))
        return self.tallies[-1][1]

    def whole(self, now: float) -> Tally:
        """The sum of the last MINUTES."""
        whole, oldest = Tally(), int(now // 60) - MINUTES
        for minute, tally in self.tallies:
            if minute > oldest:
                whole.add(tally)
        return whole

    def last(self, count: int) -> Tally:
        """The tally of the `count` latest requests, or of all if they are fewer."""
        ends = list(self.latest)[-count:]
        return Tally(len(ends), ends.count("failed"), ends.count("missed"))


@dataclass(slots=True)
class _Running:
    """What happened to one split since it is in force."""

    pools: dict[str, _Minutes]
    lost: dict[str, str] = field(default_factory=dict)


def has_missed(flight: Flight, arrived_at: float, service_class: ServiceClass) -> bool:
    """Did the answer of `flight`, to a request that arrived at `arrived_at`, miss a target of its class?"""
    if flight.first_at is None or flight.last_at is None:
        # it came in one piece
        return False
    if service_class.ttft_s is not None and flight.first_at - arrived_at > service_class.ttft_s:
        return True
    later, decoded_s = flight.later_tokens, flight.last_at - flight.first_at
    return service_class.tpot_s is not None and later > 0 and decoded_s / later > service_class.tpot_s


class Splits:
    """The splits of the rules in force. A rule that stays as it is when the file changes keeps what is known of it."""

    def __init__(
        self, clock: Callable[[], float], *, on_ended: Callable[[int, str, How], None], on_lost: Callable[[], None]
    ) -> None:
        self._clock, self._on_ended, self._on_lost = clock, on_ended, on_lost
        self._running: dict[Rule, _Running] = {}
        self._rules: Mapping[Rule, int] = {}

    def __repr__(self) -> str:
        return f"<Splits: {sum(len(running.lost) for running in self._running.values())} shares lost>"

    def follow(self, rules: tuple[Rule, ...]) -> None:
        """Have the splits of `rules`."""
        self._rules = {rule: number for number, rule in enumerate(rules, start=1) if rule.split is not None}
        self._running = {
            rule: self._running.get(rule) or _Running({pool: _Minutes() for pool in rule.pools or ()})
            for rule in self._rules
        }

    def pool_of(self, rule: Rule, key: str) -> str:
        """The pool for requests of `rule`, which has a split, with `key`."""
        assert rule.split is not None, f"{rule!r} has no split"
        running = self._running.get(rule)
        return rule.split.pool_of(key, without=running.lost if running else ())

    def ended(self, rule: Rule, pool: str, how: How, service_class: ServiceClass) -> None:
        """A request of `rule` ended at `pool`, or was taken from there because a backend failed."""
        running = self._running.get(rule)
        if running is None or rule.split is None or pool not in running.pools:
            # the file has changed meanwhile
            return
        now = self._clock()
        running.pools[pool].add(how, now)
        self._on_ended(self._rules[rule], pool, how)
        if how != "kept" and rule.split.rolls_back and pool != rule.split.stable and pool not in running.lost:
            self._judge(rule, rule.split, running, pool, service_class, now)

    def restore(self) -> int:
        """Give every pool its share again, and begin to compare anew; returns how many had lost it."""
        lost = sum(len(running.lost) for running in self._running.values())
        self._running = {rule: _Running({pool: _Minutes() for pool in rule.pools or ()}) for rule in self._running}
        return lost

    def standings(self) -> Iterator[Standing]:
        """Every pool of every split, in the order of the file."""
        now = self._clock()
        for rule, running in self._running.items():
            assert rule.split is not None, "only rules with splits are kept"
            lost = sum(share for pool, share in rule.split.shares if pool in running.lost)
            for pool, share in rule.split.shares:
                in_force = 0.0 if pool in running.lost else share + (lost if pool == rule.split.stable else 0.0)
                tally = running.pools[pool].whole(now)
                yield Standing(self._rules[rule], pool, in_force, tally, running.lost.get(pool))

    def _judge(
        self, rule: Rule, split: Split, running: _Running, pool: str, service_class: ServiceClass, now: float
    ) -> None:
        canary, stable = running.pools[pool], running.pools[split.stable].whole(now)
        may_miss = 1 - min(service_class.ttft_quantile, service_class.tpot_quantile)
        reasons = (
            why_worse(canary.whole(now), stable, may_miss=may_miss),
            *(why_worse(canary.last(count), stable, may_miss=may_miss, chance=CHANCE_OF_LATEST) for count in LATEST),
        )
        reason = next(filter(None, reasons), None)
        if reason is None:
            return
        running.lost[pool] = reason
        number = self._rules[rule]
        _log.warning("rule %d: pool %s loses its share to %s: %s", number, pool, split.stable, reason)
        self._on_lost()
