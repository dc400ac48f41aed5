"""Some minutes of random faults under load, and the proof afterwards that nothing was lost, counted twice or left."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from router.operate.audit.chain import Chain
from router.operate.audit.reader import checked
from router.shared.store.redis import LEASE_S
from tests.chaos.day.books import Books, decisions, started_in, usage_in
from tests.chaos.day.mixed_load import LONG_TOKENS, MixedLoad
from tests.chaos.day.side_clients import Refused, SideClients
from tests.chaos.day.starvation import Starvation
from tests.chaos.day.timeline import TROUBLES, Happened, Timeline, Trouble
from tests.chaos.experiment import Experiment, Times
from tests.chaos.load import End, Request, Shape
from tests.chaos.system import Plan, System

HEALTH = (
    "{probe_every: 1s, retry: 300ms, slow_start: 1s, "
    "first_byte: 5s..30s, first_token: 5s..40s, between_tokens: 10s..30s}"
)
PLAN = Plan(backends="shard", count=3, routers=3, health=HEALTH, outage="10s", keeps_books=True, prefill_s=0.01)
LOAD = Shape(per_s=2.5, most=12, timeout_s=240.0, grace_s=5.0, model=PLAN.model, knows_answers=False)

CALM_S = 15.0
"""Seconds of load behind the last fault: what begins in the second half of them must be answered."""

BATCHES_END_WITHIN_S = 120.0
LOOK_EVERY_S = 1.0
BLAMED_S = 25.0
"""Seconds behind a fault within which it explains that a router calls a backend ill: probes and their timeouts."""

LEAST_WHOLE = 0.7
"""Share of the requests that must be answered in spite of all faults, of those that clients and routers stayed for."""


@dataclass
class Ill:
    """A router that did not use a shard at `at_s`."""

    router: int
    shard: int
    at_s: float


@dataclass
class Day(Experiment):
    """One day of `minutes`, with a seed. `run` returns the objections; nothing if all is well."""

    system: System
    seed: int
    minutes: float
    say: Callable[[str], None] = print
    troubles: tuple[Trouble, ...] = TROUBLES
    ill: list[Ill] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    starvation: Starvation = field(default_factory=Starvation)
    starved: int = 0
    """How often a shard was called ill that had no CPU, or by a router that had none."""

    def __post_init__(self) -> None:
        super().__init__(self.system, (), Times(), LOAD)
        self._rng = random.Random(self.seed)
        self._load = MixedLoad(
            self.system.doors, LOAD, self.system.keys, self.system.numbers, rng=random.Random(self._rng.random())
        )
        self._side = SideClients(self.system, random.Random(self._rng.random()))
        self._timeline = Timeline(self.system, random.Random(self._rng.random()), self.say, self.troubles)
        # reservations of a router that was killed lapse
        self._idle_within_s, self._look_every_s = LEASE_S + 30.0, 1.0

    async def day(self) -> list[str]:
        """Live through it."""
        await self._side.put_documents()
        async with self._load.running():
            await asyncio.sleep(5)
        before = await self._idle()
        async with self._load.running(), self._beside(self._look()), self._beside(self._side.run()):
            await self._timeline.run(60 * self.minutes)
            over_s = time.monotonic()
            self.say("no more faults")
            await asyncio.sleep(CALM_S)
        self._clients_after(over_s)
        for open_batch in await self._side.until_batches_end(BATCHES_END_WITHIN_S):
            self._violation(open_batch)
        after = await self._idle(before)
        self._leftovers(before, after)
        await self._left_at_shards()
        await self._side_clients()
        self._illness()
        self._texts()
        await self._books()
        self._log(self.system.logged_since([0] * len(self.system.routers)))
        return self._result.violations

    @asynccontextmanager
    async def _beside(self, work: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(work)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @property
    def happened(self) -> list[Happened]:
        """The faults so far."""
        return self._timeline.happened

    def _clients_after(self, over_s: float) -> None:
        stayed = [request for request in self._load.requests if request.end is not End.LEFT]
        for request in stayed:
            if request.end in (End.WRONG, End.HUNG, None):
                self._violation(f"{request!r} of router {request.router}")
            elif request.end is End.DISCONNECTED and not self._router_was_away(request):
                self._violation(f"{request!r}, and router {request.router} was there")
            elif request.end in (End.REFUSED, End.CUT) and not request.error:
                self._violation(f"{request!r} without a reason")
            elif request.end is not End.WHOLE and request.began_s > over_s + CALM_S / 2:
                self._violation(f"{request!r}, when all was well again")
        whole = sum(request.end is End.WHOLE for request in stayed)
        reached = sum(request.end is not End.DISCONNECTED for request in stayed)
        if whole < LEAST_WHOLE * reached:
            self._violation(f"only {whole} of {reached} requests were answered that a router had")

    def _router_was_away(self, request: Request) -> bool:
        return any(
            each.part == "router" and each.number == request.router
            # a connection that was kept for later may break at its next use
            for each in self.happened
            if each.name in ("router killed", "router ended") and each.touches(request.began_s - 1, request.ended_s)
        )

    async def _look(self) -> None:
        """Note which shards routers call ill, again and again."""
        while True:
            began = time.monotonic()
            for number, server in enumerate(self.system.servers):
                if server.is_started:
                    self.starvation.look(("shard", number), server.pid)
            for number, router in enumerate(self.system.routers):
                if router.program.is_started:
                    self.starvation.look(("router", number), router.program.pid)
                with suppress(aiohttp.ClientError, OSError, TimeoutError, AssertionError):
                    async with asyncio.timeout(2):
                        text = await self.system.get(f"{router.admin}/metrics")
                    for line in text.splitlines():
                        if line.startswith("pointsman_backend_healthy{") and line.endswith(" 0.0"):
                            shard = int(line.partition("own-")[2].partition('"')[0])
                            self.ill.append(Ill(number, shard, time.monotonic()))
            await asyncio.sleep(LOOK_EVERY_S)
            if time.monotonic() - began > LOOK_EVERY_S + 8:
                self.stalls.append(time.monotonic())

    def _illness(self) -> None:
        """A shard is called ill only behind a fault of it, its link, or the router; or if the machine left one of them
        without a CPU."""
        told: set[tuple[int, int]] = set()
        for seen in self.ill:
            if (seen.router, seen.shard) in told:
                continue
            parts = {("shard", seen.shard), ("router", seen.router)}
            explained = any(
                each.touches(seen.at_s - BLAMED_S, seen.at_s) and (each.part, each.number) in parts
                for each in self.happened
            )
            if not explained and self.starvation.is_starved(parts, seen.at_s):
                self.starved += 1
                continue
            if not explained and not any(abs(stall - seen.at_s) < BLAMED_S for stall in self.stalls):
                told.add((seen.router, seen.shard))
                since = [
                    f"{each.name} {each.number} until {each.ended_s - seen.at_s:.1f} s"
                    for each in self.happened
                    if each.touches(seen.at_s - 60, seen.at_s)
                ]
                at = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + seen.at_s))
                self._violation(f"router {seen.router} called shard {seen.shard}, which was well, ill at {at}: {since}")

    async def _left_at_shards(self) -> None:
        for server in self.system.servers:
            seen = await self.system.look_into(server.pid)
            if any(seen["shard"].values()):
                self._violation(f"{server.name} still holds {seen['shard']}")

    def _texts(self) -> None:
        """The same question always gets the same answer, also if several shards computed it."""
        answers: dict[tuple[str, ...], Counter[str]] = {}
        for request in self._load.requests:
            if request.end is End.WHOLE:
                answers.setdefault(MixedLoad.same(request), Counter())[request.text] += 1
        for same, texts in answers.items():
            if len(texts) > 1:
                self._violation(f"{same[1][-40:]} {same[2:]} has several answers: {texts.most_common(3)}")

    async def _side_clients(self) -> None:
        side = self._side
        for refusal, count in side.refusals.items():
            if refusal.startswith("list_models: 5"):
                self._violation(f"{count} lists of models were refused: {refusal}")
        for missing in await side.missing_documents():
            self._violation(f"document {missing} was accepted and is not there")
        self._results: dict[str, list[dict[str, Any]]] = {"acme": [], "labs": []}
        for batch in side.batches:
            try:
                rows = await side.results(batch)
            except Refused as refused:
                self._violation(f"the results of batch {batch.id} cannot be had: {refused}")
                continue
            self._results[batch.tenant] += rows
            names = Counter(row["custom_id"] for row in rows)
            if names != Counter(batch.lines):
                self._violation(f"batch {batch.id} has the results {names}")

    async def _books(self) -> None:
        """Compare all accounts, when the routers have ended."""
        system = self.system
        assert system.disks is not None
        budgets = Counter({tenant: round(1000 * used) for tenant, used in system.budgets().items()})
        for router in system.routers:
            await asyncio.to_thread(router.program.stop)
        logged, doubled = decisions(system.disk.glob("decisions-*.jsonl*"))
        usage, left = usage_in(system.disks.outside("usage"))
        kills = [(each.number, each.began_s) for each in self.happened if each.name == "router killed"]
        self.books = Books(
            self._load.requests,
            logged,
            usage,
            budgets,
            started_in(system.folder.glob("shard-*.started")),
            self._results,
            kills,
            LOAD.most,
            [*doubled, *left],
        )
        for objection in self.books.examine():
            self._violation(objection)
        self._audits()

    def _audits(self) -> None:
        """Each operation that was done is in an audit log, once."""
        assert self.system.disks is not None
        done, tried = (self._side.operations[what] for what in ("done", "tried"))
        records = 0
        for number in range(len(self.system.routers)):
            for found in checked(self.system.disks.outside("audit") / f"router-{number}.log", Chain(None)):
                if found.problem:
                    self._violation(f"audit log of router {number}: line {found.number} {found.problem}")
                records += found.record.get("event") == "call"
        if not done <= records <= tried:
            self._violation(f"{done} of {tried} operations were done, and audit logs have {records}")

    @property
    def _long_prompts(self) -> str:
        long = [request for request in self._load.requests if len(request.question) > LONG_TOKENS]
        took = sorted(request.took_s for request in long if request.end is End.WHOLE)
        median = f"{took[len(took) // 2]:.1f} s" if took else "-"
        return f"{len(long)} long prompts, {len(took)} answered, median {median}"

    @property
    def summary(self) -> str:
        """What happened, in a few lines."""
        requests = self._load.requests
        ends = Counter(request.end.value for request in requests if request.end)
        faults = Counter(each.name for each in self.happened)
        statuses = Counter(request.status for request in requests if request.end is End.REFUSED)
        longest = max(requests, key=lambda request: request.took_s)
        side = self._side
        lines = [
            f"{len(self.happened)} faults: " + ", ".join(f"{count} {name}" for name, count in faults.most_common()),
            f"{len(requests)} requests: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()),
            f"refused with {dict(statuses)}; the longest: {longest!r}",
            f"{len(side.batches)} batches, {sum(map(len, side.added.values()))} documents added",
            f"operations {dict(side.operations)}; refused beside the load: {dict(side.refusals.most_common(6))}",
            f"{self._long_prompts}; {self.books.retried} requests were answered by a second backend or a later one",
            f"{self.starved} times a shard was called ill while it or the router had no CPU",
            self.books.summary,
        ]
        return "\n".join(lines)
