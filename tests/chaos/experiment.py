"""One experiment: load, faults, recovery, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from router.call.bid import MOST_TRIES
from router.operate.diagnose.logged import LoggedRequest, Visit
from router.operate.plan.recent import MOST_KEPT
from tests.chaos.faults import Allowed, Fault, Forgotten
from tests.chaos.load import TENANTS, End, Load, Request, Shape
from tests.chaos.system import Held, System

IDLE_WITHIN_S = 20.0
"""Seconds after the last answer within which nothing may be left of any request."""

MORE_DESCRIPTORS = 4
"""Descriptors that a router may keep in addition, such as one of a connection that it tries again just now."""

MOST_POOLED = 100
"""Idle connections to backends and to Redis that a router may keep for later."""

MORE_THREADS = 8
"""Threads of pools that grow with use."""

MORE_MB = 64.0
"""Memory that a router may keep in addition: after large bodies the allocator returns less than was freed."""

MORE_OBJECTS = 300
"""Objects of one of our classes that each process may keep in addition: histories of up to 256 decisions fill up."""

KEPT = {
    f"{LoggedRequest.__module__}.{LoggedRequest.__qualname__}": 1,
    # a request is hedged in each of its tries at most
    f"{Visit.__module__}.{Visit.__qualname__}": 2 * MOST_TRIES,
}
"""What is kept of the newest requests, to compute the number of backends that are needed: most of each request."""


@dataclass(frozen=True)
class Times:
    """How long the parts of an experiment take, in seconds. It fails if it has not recovered within `recovery`."""

    before: float = 0.7
    fault: float = 1.5
    after: float = 0.5
    recovery: float = 10.0


@dataclass
class Result:
    """What was seen. Without `violations` all invariants hold."""

    faults: tuple[str, ...]
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    recovered_s: float | None = None
    """Seconds from the end of the fault until every backend served and no request failed any more."""
    longest_s: float = 0.0
    more_mb: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    """Of the requests that were refused."""
    had_no_effect: bool = False
    """Whether the routers noticed nothing of a fault, which is a violation too."""

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        recovered = "never" if self.recovered_s is None else f"{self.recovered_s:.1f} s"
        parts = (f"{ends}; longest {self.longest_s:.1f} s; recovered {recovered}", *self.violations)
        return "\n  ".join((" + ".join(self.faults) + ": " + parts[0], *parts[1:]))


async def run(system: System, faults: tuple[Fault, ...], times: Times, shape: Shape) -> Result:
    """Send load, cause `faults` at once, end them, wait for recovery; then compare everything with before."""
    experiment = Experiment(
        system, faults, times, replace(shape, model=system.plan.model, knows_answers=system.plan.backends == "server")
    )
    return await experiment.run()


_ACCEPTED = {Allowed.CUT: End.CUT, Allowed.REFUSED: End.REFUSED, Allowed.DISCONNECTED: End.DISCONNECTED}


class Experiment:
    """One experiment with a running system, which it leaves idle."""

    def __init__(self, system: System, faults: tuple[Fault, ...], times: Times, shape: Shape) -> None:
        self._system, self._faults, self._times, self._shape = system, faults, times, shape
        self._load = Load(system.doors, shape, system.keys, system.numbers)
        self._result = Result(tuple(fault.name for fault in faults))
        self._idle_within_s, self._look_every_s = IDLE_WITHIN_S, 0.1
        self._allowed = Allowed.NOTHING
        self._forgotten = Forgotten.NOTHING
        for fault in faults:
            self._allowed |= fault.allowed
            self._forgotten |= fault.forgotten
        if sum(fault.part == "server" for fault in faults) == len(system.servers):
            self._allowed |= Allowed.REFUSED

    async def run(self) -> Result:
        """What was seen."""
        system, times = self._system, self._times
        before = await self._idle()
        usage, budgets, logged = await system.usage(), system.budgets(), system.log_size()
        metrics = await system.metrics()
        async with self._load.running():
            await asyncio.sleep(times.before)
            async with AsyncExitStack() as stack:
                for number, fault in enumerate(self._faults):
                    await stack.enter_async_context(fault.during(system, number))
                await asyncio.sleep(max(times.fault, *(fault.least_s for fault in self._faults)))
            ended_at = time.monotonic()
            await self._recover(ended_at)
        after = await self._idle(None if self._forgotten & Forgotten.HELD else before)
        self._result.ends = Counter(request.end.value for request in self._load.requests if request.end)
        self._result.statuses = Counter(request.status for request in self._load.requests if request.end is End.REFUSED)
        self._result.longest_s = max(request.took_s for request in self._load.requests)
        self._clients()
        await self._ledger(usage, budgets)
        self._leftovers(before, after)
        self._evidence(metrics, await system.metrics())
        self._log(system.logged_since(logged))
        return self._result

    @property
    def _probes(self) -> Counter[str]:
        """Tasks of gRPC's own that a probe of a shard has while it runs: a router may probe all of them."""
        return Counter({"_AioCall._handle_status_once_received": len(self._system.servers) * len(self._system.routers)})

    def _violation(self, text: str) -> None:
        self._result.violations.append(text)

    async def _recover(self, ended_at: float) -> None:
        """Wait until every backend has served since `ended_at` and requests are answered again."""
        until = ended_at + self._times.recovery
        while True:
            await asyncio.sleep(0.05)
            requests = self._load.requests
            since = [request for request in requests if request.began_s > ended_at and request.end]
            failures = [request.began_s for request in since if request.end is not End.WHOLE]
            bad_until = max(failures, default=ended_at)
            served: dict[str, float] = {}
            for request in since:
                if request.end is End.WHOLE and request.began_s > bad_until:
                    served.setdefault(f"{request.router} {request.backend}", request.began_s)
            if len(served) == len(self._system.servers) * len(self._system.routers):
                self._result.recovered_s = max(served.values()) - ended_at
                await asyncio.sleep(self._times.after)
                return
            if time.monotonic() > until:
                self._violation(f"not recovered after {self._times.recovery} s; served by {sorted(served)}")
                return

    async def _idle(self, before: Held | None = None) -> Held | None:
        """What the routers hold once nothing is left of any request, and nothing more than `before`.

        None if something remains. A connection that broke is closed a little later at one end than at the other.
        """
        until = time.monotonic() + self._idle_within_s
        while True:
            held, left = await self._system.held()
            if before is not None and (tasks := held.tasks - before.tasks - self._probes):
                left.append(f"tasks {dict(tasks)}")
            if before is not None and not self._forgotten & Forgotten.HELD:
                left += more_than(before, held)
            if computed := await self._system.open_at_servers():
                left.append(f"{computed} answers are still computed")
            reserved = self._system.reservations()
            # those of a router that died lapse after a minute
            if reserved and not self._forgotten & Forgotten.BUDGETS:
                left.append(f"{reserved} reservations in Redis")
            try:
                left += self._left_in(await self._system.metrics())
            except aiohttp.ClientError as error:
                left.append(f"no metrics: {error}")
            if not left:
                return held
            if time.monotonic() > until:
                self._violation(f"left after {self._idle_within_s:g} s: {'; '.join(left)}")
                return None
            await asyncio.sleep(self._look_every_s)

    def _left_in(self, of_routers: list[dict[str, float]]) -> list[str]:
        """What the metrics of the routers still count, and backends that are not well."""
        left = []
        for metrics in of_routers:
            healthy = [value for name, value in metrics.items() if name.startswith("pointsman_backend_healthy")]
            if healthy != [1.0] * len(self._system.servers):
                left.append(f"health of the backends {healthy}")
            left += [
                f"{name} is {value:g}"
                for name, value in metrics.items()
                if value and name.startswith(("pointsman_queued", "pointsman_backend_in_flight"))
            ]
        return left

    def _clients(self) -> None:
        accepted = {End.WHOLE, *(end for allowed, end in _ACCEPTED.items() if self._allowed & allowed)}
        others = [request for request in self._load.requests if request.end not in accepted]
        if others:
            self._violation(f"{len(others)} requests ended as they must not, such as {others[:4]}")
        late = [
            request for request in self._load.requests if request.took_s > self._shape.timeout_s + self._shape.grace_s
        ]
        if late:
            self._violation(f"{len(late)} requests waited too long, such as {late[:4]}")

    async def _ledger(self, usage: Counter[str], budgets: dict[str, float]) -> None:
        """The routers' counts, and Redis' budgets, are what clients were told, and at most what the others may cost."""
        counted, charged = await self._system.usage(), self._system.budgets()
        for tenant in TENANTS:
            requests = [request for request in self._load.requests if request.tenant == tenant]
            whole = [request.usage for request in requests if request.end is End.WHOLE and request.usage]
            others = [request for request in requests if request.end is not End.WHOLE]
            least = {
                "finished": len(whole),
                "prompt_tokens": sum(prompt for prompt, _ in whole),
                "completion_tokens": sum(answer for _, answer in whole),
            }
            more = {
                "finished": sum(request.end is End.DISCONNECTED for request in others),
                "prompt_tokens": sum(map(_most_prompt_tokens, others)),
                "completion_tokens": self._shape.most * len(others),
            }
            if not self._forgotten & Forgotten.HELD:
                for what, amount in least.items():
                    name = f"{tenant} {what}"
                    self._within(f"usage of {name}", counted[name] - usage[name], amount, more[what])
            if not self._forgotten & Forgotten.BUDGETS:
                cost, more_cost = (part["prompt_tokens"] + 4 * part["completion_tokens"] for part in (least, more))
                self._within(f"budget of {tenant}", charged[tenant] - budgets[tenant], cost, more_cost)

    def _within(self, what: str, amount: float, least: float, more: float) -> None:
        if not least - 0.01 <= amount <= least + more + 0.01:
            self._violation(f"{what} rose by {amount:g}; clients received {least:g} and at most {more:g} more")

    def _leftovers(self, before: Held | None, after: Held | None) -> None:
        if before is None or after is None or self._forgotten & Forgotten.HELD:
            return
        self._result.more_mb = after.resident_mb - before.resident_mb
        if objects := objects_left(before, after, len(self._load.requests)):
            self._violation(f"objects are left: {objects}")
        if self._result.more_mb > MORE_MB * after.processes:
            self._violation(f"{self._result.more_mb:g} more MB than before")

    def _evidence(self, before: list[dict[str, float]], after: list[dict[str, float]]) -> None:
        """A fault that the routers must have noticed and have not was none."""
        for fault in self._faults:
            rise = _sum(after, fault.evidence) - _sum(before, fault.evidence)
            if fault.evidence and not self._forgotten & Forgotten.HELD and rise <= 0:
                self._result.had_no_effect = True
                self._violation(f"{fault.name} had no effect: {fault.evidence} did not rise")

    def _log(self, text: str) -> None:
        if "Traceback" in text:
            first = text.partition("Traceback")[2]
            # the exception itself stands behind the lines of the stack
            said = re.search(r"^\w.*$", first, re.MULTILINE)
            count = text.count("Traceback (")
            self._violation(f"{count} tracebacks in the log, the first of {said[0] if said else ''}:\n{first[-3000:]}")


def more_than(before: Held, after: Held) -> list[str]:
    """Threads, descriptors and idle connections beyond those that each process may keep in addition."""
    return [
        f"{more} more {what} than before"
        for what, more, most in (
            ("threads", after.threads - before.threads, MORE_THREADS),
            ("descriptors", after.descriptors - before.descriptors, MORE_DESCRIPTORS),
            ("connections", after.pooled, MOST_POOLED),
        )
        if more > most * after.processes
    ]


def objects_left(before: Held, after: Held, requests: int) -> dict[str, int]:
    """Class -> objects that are left of `requests` in addition, where they are more than may be kept.

    Of the newest requests a process keeps up to MOST_KEPT, and none that was not sent.
    """
    left = {}
    for name, more in (after.objects - before.objects).items():
        of_request = KEPT.get(name, 0)
        too_many = of_request and after.objects[name] > of_request * MOST_KEPT * after.processes
        if too_many or more > MORE_OBJECTS * after.processes + of_request * requests:
            left[name] = more
    return left


def _most_prompt_tokens(request: Request) -> int:
    """More tokens than the prompt can have: an estimate of its length may be high."""
    return 2 * len(request.question) + 50


def _sum(metrics: list[dict[str, float]], prefix: str) -> float:
    """Of all routers' metrics that begin so."""
    return sum(value for each in metrics for name, value in each.items() if name.startswith(prefix))


def summary(result: Result) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "faults": list(result.faults),
        "ends": dict(result.ends),
        "statuses": dict(result.statuses),
        "violations": result.violations,
        "recovered_s": result.recovered_s,
        "longest_s": result.longest_s,
        "more_mb": result.more_mb,
    }
