"""Logs for tests of the diagnosis: simulated routers, with one fault each, and the truth about it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import CacheListener
from policies.learning.cost import Latency
from policies.sla.config import Config
from router.operate.diagnose.diagnosis import diagnosis_of
from router.operate.diagnose.logged import LogContents, LoggedRequest, Visit, read_logs
from router.operate.diagnose.nouns import Diagnosis
from shards.nouns import Submission
from shards.sched.limits import Refusal
from simulation.arrivals import Arrival
from simulation.backend import SimulatedBackend
from simulation.changes import Change
from simulation.engine import SimulatedEngine
from simulation.fleet import Fleet
from simulation.run import Run, simulate
from simulation.speed import Machine
from tests.simulation.scene import EVEN, a_config, a_fleet, ready

FILE = """
classes: {chat: {ttft_p95: 500ms, tpot_p95: 40ms}}
tenants:
  acme: {keys: ["${env:A}"]}
  labs: {keys: ["${env:L}"]%s}
policies: {steady: {score: {expected_ttft: 1, cache_thrift: 4, balance: 1}}}
rules: [{class: chat, policy: %s}]
"""
"""With a policy of its own, so that a better default does not change the faults."""
CHUNK = 512
LARGE = Machine(EVEN, kv_tokens=896_000)


def a_file(*, shares: bool = False, policy: str = "steady") -> Config:
    """Two shards for two tenants, which share a cache domain or do not."""
    return a_config(FILE % (", cache: {share_with: [acme]}" if shares else "", policy))


def questions(
    count: int, *, documents: int, gap_s: float, chunks: int = 6, tenants: Sequence[str] = ("acme",), seed: int = 1
) -> list[Arrival]:
    """`count` questions about random documents, `gap_s` apart, from `tenants` in turn."""
    rng = random.Random(seed)
    return [
        Arrival(
            number,
            round(number * gap_s, 3),
            chunks * CHUNK + rng.randrange(100, 300),
            20,
            chunks=tuple(100 * document + chunk for chunk in range(chunks)),
            tenant=tenants[number % len(tenants)],
        )
        for number in range(count)
        for document in [rng.randrange(documents)]
    ]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation and its log."""

    run: Run
    contents: LogContents

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the log."""
        return diagnosis_of(self.contents)

    @property
    def sizes(self) -> dict[str, int]:
        """Backend -> the tokens of its cache."""
        return {backend.name: self.run.fleet.machines[backend.pool].kv_tokens for backend in self.run.backends}

    def cached(self) -> dict[str, int]:
        """Request -> the tokens of its prompt that its engine had cached."""
        ids = {call.arrival.number: call.usage.cached_tokens for call in self.run.calls}
        return {f"{number:024x}": tokens for number, tokens in ids.items()}


def simulated(
    path: Path,
    config: Config,
    coming: Iterable[Arrival],
    *,
    fleet: Fleet | None = None,
    changes: Sequence[Change] = (),
) -> Simulated:
    """The simulation of `coming` on large caches, or on `fleet`, and its log at `path`."""
    fleet = fleet or a_fleet(config, LARGE)
    run = simulate(config, fleet, ready(config, fleet, coming), changes=changes, log=path)
    return Simulated(run, read_logs([path]))


@dataclass(frozen=True, slots=True)
class Late(CacheListener):
    """Passes cache events on `late_s` seconds late."""

    to: CacheListener
    late_s: float

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        asyncio.get_running_loop().call_later(self.late_s, self.to.store, backend, keys, tier)

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        asyncio.get_running_loop().call_later(self.late_s, self.to.evict, backend, keys, tier)

    def clear(self, backend: str) -> None:
        self.to.clear(backend)


@dataclass(frozen=True)
class LateFleet(Fleet):
    """Backends whose cache events come late."""

    late_s: float = 0.0

    def backends(self, config: Config, listener: CacheListener, clock: Callable[[], float]) -> list[SimulatedBackend]:
        return super().backends(config, Late(listener, self.late_s), clock)


@dataclass(frozen=True)
class ForgetfulFleet(Fleet):
    """Backends that lose their whole cache at every `every`-th request, and do not report it."""

    every: int = 5

    def backends(self, config: Config, listener: CacheListener, clock: Callable[[], float]) -> list[SimulatedBackend]:
        made = super().backends(config, listener, clock)
        for backend in made:
            backend.engine.submit = forgetting(backend.engine, self.every)  # type: ignore[method-assign]
        return made


def forgetting(engine: SimulatedEngine, every: int) -> Callable[..., Refusal | None]:
    """`engine.submit`, which empties the cache of an idle engine at every `every`-th request without an event."""
    submit, numbers = engine.submit, itertools.count(1)

    def submit_and_forget(submission: Submission, token_ids: bytes, **times: Any) -> Refusal | None:
        if next(numbers) % every == 0 and not engine.has_requests:
            engine._pool.clear()
            engine.drain_events()
        return submit(submission, token_ids, **times)

    return submit_and_forget


def a_visit(sent_s: float, backend: str = "b0", **fields: object) -> Visit:
    """A visit of a backend that answered at once."""
    usual: dict[str, object] = {
        "first_s": sent_s + 0.1,
        "last_s": sent_s + 1.0,
        "held": {},
        "dropped": {},
        "is_whole": True,
    }
    usual |= {"queue_s": 0.0, "cache_tokens": None, "max_requests": None}
    usual |= {"predicted_ttft_s": 0.1, "speed": Latency(), "pace": (1.0, 1.0)}
    return Visit(backend=backend, sent_s=sent_s, **{**usual, **fields})  # type: ignore[arg-type]


def a_request(at_s: float, **fields: object) -> LoggedRequest:
    """A request that arrives at `at_s` and ends a second later."""
    visits: Sequence[Visit] = fields.pop("visits", ())  # type: ignore[assignment]
    keys: Sequence[int] = fields.get("keys", ())  # type: ignore[assignment]
    first_s = visits[-1].first_s if visits else None
    usual: dict[str, object] = {"tenant": "acme", "service_class": "chat", "prompt_tokens": len(keys) * CHUNK + 100}
    usual |= {"new_tokens": 10, "cached_tokens": 0, "ended_s": at_s + 1.0, "keys": (), "shared_keys": keys}
    usual |= {"key_tokens": CHUNK, "ttft_s": None if first_s is None else first_s - at_s}
    usual |= {"ttft_target_s": None, "tpot_target_s": None}
    return LoggedRequest(id=f"r{at_s:g}", at_s=at_s, visits=tuple(visits), **{**usual, **fields})  # type: ignore[arg-type]
