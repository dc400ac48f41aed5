"""Faults at random times on random parts, drawn with a seed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos import effects
from tests.chaos.effects import During, line, redis_line
from tests.chaos.system import System
from tests.chaos.wire import State

AT_ONCE = 2
"""Most faults at a time: of three routers and three shards one of each is always well."""

LASTS_S = (0.5, 6.0)
"""Seconds of a fault, to which the start of what was killed adds."""

PAUSE_S = (0.5, 5.0)
"""Seconds from the beginning of a fault to that of the next."""


@dataclass(frozen=True)
class Trouble:
    """A fault of one of the `count` parts of a kind; `weight` of them are drawn as often as one of weight 1."""

    name: str
    part: str
    during: During
    count: int = 3
    weight: int = 1


TROUBLES = (
    Trouble("router killed", "router", effects.router_killed, weight=3),
    Trouble("router ended", "router", effects.router_ended),
    Trouble("router stopped", "router", effects.router_stopped, weight=2),
    Trouble("shard killed", "shard", effects.killed, weight=3),
    Trouble("shard ended", "shard", effects.ended),
    Trouble("shard stopped", "shard", effects.stopped, weight=2),
    Trouble("link mute", "shard", line(State.MUTE)),
    Trouble("link slow", "shard", line(State.SLOW)),
    Trouble("link reset", "shard", line(State.RESET)),
    Trouble("link garbled", "shard", line(State.GARBAGE)),
    Trouble("redis killed", "redis", effects.redis_killed, count=1, weight=2),
    Trouble("redis stopped", "redis", effects.redis_stopped, count=1),
    Trouble("redis failed over", "redis", effects.redis_failed_over, count=1, weight=3),
    Trouble("redis slow", "redis", redis_line(State.SLOW), count=1),
    Trouble("redis mute", "redis", redis_line(State.MUTE), count=1),
    Trouble("redis reset", "redis", redis_line(State.RESET), count=1),
    Trouble("redis answers lost", "redis", redis_line(State.ANSWERS_LOST), count=1, weight=2),
    Trouble("usage disk full", "usage", effects.disk("usage"), count=1),
    Trouble("audit disk full", "audit", effects.disk("audit"), count=1),
    Trouble("batches disk full", "batches", effects.disk("batches"), count=1),
)


@dataclass
class Happened:
    """A fault that was caused, with its times on the monotonic clock."""

    name: str
    part: str
    number: int
    began_s: float
    ended_s: float = float("inf")

    def __str__(self) -> str:
        return f"{self.name} {self.number} for {self.ended_s - self.began_s:.1f} s"

    def touches(self, since_s: float, until_s: float) -> bool:
        """Whether it lasted at some time between the two."""
        return self.began_s <= until_s and self.ended_s >= since_s


@dataclass
class Timeline:
    """Causes faults of `troubles` in `system`, and remembers them in `happened`."""

    system: System
    rng: random.Random
    say: Callable[[str], None]
    troubles: tuple[Trouble, ...] = TROUBLES
    happened: list[Happened] = field(default_factory=list)
    _busy: set[tuple[str, int]] = field(default_factory=set)

    async def run(self, for_s: float) -> None:
        """Begin faults for `for_s` seconds, and wait until the last one is over."""
        until = time.monotonic() + for_s
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                await asyncio.sleep(self.rng.uniform(*PAUSE_S))
                trouble = self.rng.choices(self.troubles, [each.weight for each in self.troubles])[0]
                number, lasts_s = self.rng.randrange(trouble.count), self.rng.uniform(*LASTS_S)
                if len(self._busy) < AT_ONCE and (trouble.part, number) not in self._busy:
                    self._busy.add((trouble.part, number))
                    group.create_task(self._cause(trouble, number, lasts_s))

    async def _cause(self, trouble: Trouble, number: int, lasts_s: float) -> None:
        happened = Happened(trouble.name, trouble.part, number, time.monotonic())
        self.happened.append(happened)
        # the number of a part that is there once is a seed
        seed = number if trouble.count > 1 else len(self.happened)
        try:
            async with trouble.during(self.system, seed):
                await asyncio.sleep(lasts_s)
        finally:
            happened.ended_s = time.monotonic()
            self._busy.discard((trouble.part, number))
            self.say(str(happened))
