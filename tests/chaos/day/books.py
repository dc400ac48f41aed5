"""What clients were told, the decision logs, the budgets in Redis and the usage in SQLite: they must be one."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from router.call.bid import MOST_TRIES
from router.operate.usage.database import UsageDatabase
from tests.chaos.day.side_clients import BATCH_SEEDS
from tests.chaos.load import TENANTS, End, Request

UNCACHED, CACHED, OUTPUT = 200, 20, 600
"""Thousandths of a unit for a token, as `system.BOOKS` has the prices."""

FORGOTTEN_S = 0.5
"""A router that is killed forgets requests that ended so shortly before: it counts and writes them together."""

LINES_AT_ONCE = 8
"""Lines of batches that a killed router can forget: four run at once, and as many have just ended."""

MOST_LINE_TOKENS, MOST_LINE_ANSWER = 100, 8
CONTEXT = 2560


def cost_of(prompt: int, cached: int, answer: int) -> int:
    """The price in thousandths of a unit."""
    return UNCACHED * (prompt - cached) + CACHED * cached + OUTPUT * answer


@dataclass
class Books:
    """All accounts of a day. `kills` are the numbers of routers that were killed, with the monotonic times."""

    requests: list[Request]
    logged: dict[str, dict[str, Any]]
    """The lines of the decision logs by request."""
    usage: Counter[str]
    budgets: Counter[str]
    """Cost by tenant, in thousandths of a unit."""
    started: Counter[int]
    """Seed -> how often shards began a request with it."""
    results: dict[str, list[dict[str, Any]]]
    """The lines of the results of batches, by tenant."""
    kills: list[tuple[int, float]]
    most_answer: int
    objections: list[str] = field(default_factory=list)

    def examine(self) -> Iterator[str]:
        """What is not as it must be."""
        yield from self.objections
        uncertain = {id(request) for request in self.requests if self.is_uncertain(request)}
        for request in self.requests:
            if request.end is End.WHOLE and request.id and id(request) not in uncertain:
                yield from self._told(request)
        yield from self._sums(uncertain)
        yield from self._executions()

    def is_uncertain(self, request: Request) -> bool:
        """Whether a router may have forgotten it, because it was killed."""
        return any(
            request.router == router and request.began_s <= at <= request.ended_s + FORGOTTEN_S
            for router, at in self.kills
        )

    def _told(self, request: Request) -> Iterator[str]:
        """A whole answer is in a decision log, at the price of what its client was told."""
        line = self.logged.get(request.id)
        assert request.usage is not None
        if line is None:
            yield f"{request!r} is in no decision log"
            return
        told = cost_of(request.usage[0], request.cached, request.usage[1])
        if (line["outcome"], line.get("cost")) != ("finished", told):
            yield f"{request!r} was told {request.usage}, {request.cached} cached, {told} in all; the log has {line}"

    def _sums(self, uncertain: set[int]) -> Iterator[str]:
        for tenant in TENANTS:
            lines = [line for line in self.logged.values() if line["tenant"] == tenant]
            in_log = sum(line.get("cost") or 0 for line in lines)
            doubted = [each for each in self.requests if each.tenant == tenant and id(each) in uncertain]
            most = sum(map(self._most_cost, doubted))
            most += len(self.kills) * LINES_AT_ONCE * cost_of(MOST_LINE_TOKENS, 0, MOST_LINE_ANSWER)
            in_usage, in_redis = self.usage[tenant], self.budgets[tenant]
            if max(in_log, in_usage, in_redis) - min(in_log, in_usage, in_redis) > most:
                yield (
                    f"{tenant}: {in_redis} in budgets, {in_usage} in usage, {in_log} in decision logs; they may differ "
                    f"by {most} because of {len(self.kills)} kills"
                )
            told = self._told_to(tenant, uncertain)
            if min(in_log, in_usage, in_redis) < told:
                yield f"{tenant}: clients were told {told}; budgets have {in_redis}, usage {in_usage}, logs {in_log}"

    def _told_to(self, tenant: str, uncertain: set[int]) -> int:
        """What all clients of `tenant` were told, less what a killed router may have forgotten."""
        told = sum(
            cost_of(request.usage[0], request.cached, request.usage[1])
            for request in self.requests
            if request.tenant == tenant
            and request.end is End.WHOLE
            and request.usage is not None
            and id(request) not in uncertain
        )
        lines = sum(map(_cost_of_line, self.results[tenant]))
        forgotten = len(self.kills) * LINES_AT_ONCE * cost_of(MOST_LINE_TOKENS, 0, MOST_LINE_ANSWER)
        return told + max(0, lines - forgotten)

    def _most_cost(self, request: Request) -> int:
        if request.usage is not None and request.end is End.WHOLE:
            return cost_of(request.usage[0], request.cached, request.usage[1])
        named = 600 if "documents" in request.fields else 0
        return cost_of(min(CONTEXT, 2 * len(request.question) + 50 + named), 0, self.most_answer)

    def _executions(self) -> Iterator[str]:
        """No shard began a request more often than its router tried."""
        for request in self.requests:
            line = self.logged.get(request.id) if request.id else None
            # without a line it may have been continued, which does not count as one of the tries
            tries = 2 * MOST_TRIES if line is None else sum("backend" in each for each in line["tries"])
            seeds = [request.number]
            if request.kind.startswith("messages"):
                # made of the id, if the client gives none
                seeds = [xxh3_64_intdigest(request.id.encode())] if request.id else []
            began = sum(self.started[seed] for seed in seeds)
            if began > tries:
                yield f"{request!r} began {began} times at shards, and its router tried {tries} times"

    @property
    def retried(self) -> int:
        """Requests that ended well after more than one try."""
        return sum(line["outcome"] == "finished" and len(line["tries"]) > 1 for line in self.logged.values())

    @property
    def summary(self) -> str:
        """The sums of all accounts."""
        rows = []
        uncertain = {id(request) for request in self.requests if self.is_uncertain(request)}
        for tenant in TENANTS:
            in_log = sum(line.get("cost") or 0 for line in self.logged.values() if line["tenant"] == tenant)
            rows.append(
                f"{tenant}: {self.budgets[tenant] / 1e9:.9f} USD in budgets, {self.usage[tenant] / 1e9:.9f} in usage, "
                f"{in_log / 1e9:.9f} in decision logs; clients were told at least "
                f"{self._told_to(tenant, uncertain) / 1e9:.9f}"
            )
        lines = sum(seed >= BATCH_SEEDS for seed in self.started.elements() if seed < 2 * BATCH_SEEDS)
        rows.append(f"{len(uncertain)} requests at routers that were killed; {lines} lines of batches began at shards")
        return "\n".join(rows)


def _cost_of_line(line: Mapping[str, Any]) -> int:
    usage = ((line.get("response") or {}).get("body") or {}).get("usage")
    if not usage:
        return 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return cost_of(usage["prompt_tokens"], cached, usage["completion_tokens"])


def decisions(files: Iterable[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The lines of decision logs by request, and objections. The last line of a router that was killed may be cut."""
    found: dict[str, dict[str, Any]] = {}
    objections = []
    for file in files:
        for text in file.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["request"] in found:
                objections.append(f"request {line['request']} is in decision logs twice")
            found[line["request"]] = line
    return found, objections


def usage_in(folder: Path) -> tuple[Counter[str], list[str]]:
    """Cost by tenant in the database in `folder`, and objections."""
    left = list((folder / "usage.sqlite.journal").iterdir())
    with tempfile.TemporaryDirectory() as copies:
        for file in folder.glob("usage.sqlite*"):
            if file.is_file():
                shutil.copy(file, copies)
        database = UsageDatabase(str(Path(copies) / "usage.sqlite"))
        sums = {row["tenant"]: row["cost"] for row in database.sums(("tenant",))}
        database.close()
    return Counter(sums), [f"journals of usage are left: {left}"] if left else []


def started_in(files: Iterable[Path]) -> Counter[int]:
    """How often each seed is in the lists of the shards."""
    counts: defaultdict[int, int] = defaultdict(int)
    for file in files:
        if file.exists():
            for line in file.read_text().split():
                if line.isdigit():
                    counts[int(line)] += 1
    return Counter(counts)
