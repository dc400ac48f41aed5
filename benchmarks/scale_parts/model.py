"""What a cell of routers costs, from measured unit costs: messages, bytes, CPU and memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

EVERY_S, AT_FULL_PACE, AGAIN_S, WHOLE_S = 0.015, 8, 1.0, 8.0
"""As in ReplicaOptions."""

INDEX_BYTES, LEARNT_BYTES = 256 * 2**20, 2**20
"""Most bytes of the prefix index, and of the learned blocks of one backend."""

DECISIONS = ((2, 0.09e-3), (10, 0.19e-3), (100, 0.57e-3), (1000, 1.44e-3), (5000, 2.38e-3))
"""Seconds of a decision by the number of backends (docs/performance.md); the first is part of `request_s`."""

CHANGES = 3
"""How often one request changes the running requests at its backend: sent, first token, end."""

BUSY = 0.7
"""Share of a core that routers and Redis may use: beyond it, queues of milliseconds form."""


@dataclass(frozen=True)
class Costs:
    """Unit costs: seconds of CPU, bytes of messages and memory. Names with `redis` are Redis', the others a router's.

    `turn_s` is one exchange, `scan_s` what it takes for each backend, `write_s` an entry written, `entry_s` one read.
    `sent_s`, `learnt_s` with `learnt_block_s`, and `change_s` are for hearing one of another router;
    `event_block_s` for one block in a cache event. `quota_s` is reserving and settling one request. A prompt is looked
    up in the learned blocks of each backend in `lookup_s`, and of each that holds a part of it in `holder_s` more.
    """

    turn_s: float
    scan_s: float
    write_s: float
    entry_s: float
    sent_s: float
    learnt_s: float
    learnt_block_s: float
    change_s: float
    event_block_s: float
    quota_s: float
    lookup_s: float
    holder_s: float
    redis_exchange_s: float
    redis_write_s: float
    redis_read_s: float
    redis_in_byte_s: float
    redis_out_byte_s: float
    redis_quota_s: float
    sent_bytes: float
    learnt_bytes: float
    learnt_block_bytes: float
    change_bytes: float
    entry_bytes: float
    exchange_in_bytes: float
    exchange_out_bytes: float
    backend_bytes: float
    indexed_block_bytes: float
    learnt_known_block_bytes: float
    base_bytes: float
    report_s: float = 28e-6
    """One report of a shard, as measured for the link (docs/performance.md)."""
    request_s: float = 0.75e-3
    """One short request of a router's own, likewise."""
    stream_event_s: float = 0.09e-3
    """Each event of a paced stream, likewise."""
    cold: float = 1.8
    """CPU for what a router hears, in a process that does other work in between and sleeps, as a multiple of that in a
    loop, where the other costs are measured: 1.4 to 2.0 in runs of `real`."""


@dataclass(frozen=True)
class Fleet:
    """One cell: its routers, backends and requests per second together.

    Prompts have `blocks` blocks, of which `new_blocks` are not cached where they go; answers have `events` stream
    events and take `busy_s`. `learns`: backends have no cache events; else each sends `reports_per_s` reports to each
    router. Each backend's cache has `cache_blocks`, and `holders` of them a part of a prompt. `limited`: the share of
    requests of tenants with limits.
    """

    routers: int
    backends: int
    requests_per_s: float
    blocks: int = 64
    new_blocks: int = 16
    events: int = 33
    busy_s: float = 5.0
    learns: bool = True
    reports_per_s: float = 10.0
    cache_blocks: int = 16_384
    holders: int = 8
    limited: float = 1.0


@dataclass(frozen=True)
class Needs:
    """What a cell takes. Shares are of one core; bytes and messages are per second but for `router_bytes`.

    `own` is a router's share for its own requests, the others for sharing: `exchange` and `entries` of messages as
    such, `news` and `changes` of their contents, `events` of cache events, which do not come from other routers.
    """

    interval_s: float
    exchanges: float
    entries_written: float
    entries_read: float
    bytes_in: float
    bytes_out: float
    own: float
    exchange: float
    entries: float
    news: float
    changes: float
    events: float
    redis_news: float
    redis_quotas: float
    router_bytes: float
    known: float
    """Share of all cached blocks that a router has room to know."""

    @property
    def sharing(self) -> float:
        """A router's share of a core for all that other routers and backends report."""
        return self.exchange + self.entries + self.news + self.changes + self.events

    @property
    def router(self) -> float:
        """A router's share of a core."""
        return self.own + self.sharing


def needs(fleet: Fleet, costs: Costs) -> Needs:
    """The needs of `fleet`."""
    routers, rate = fleet.routers, fleet.requests_per_s
    interval_s = EVERY_S * max(1.0, routers / AT_FULL_PACE)
    turns = 1 / interval_s
    # an exchange writes one entry if anything happened at this router since the last one
    happens = CHANGES * rate / routers
    written = max(1 / AGAIN_S, turns * -math.expm1(-happens * interval_s))
    learnt_bytes = costs.learnt_bytes + fleet.blocks * costs.learnt_block_bytes if fleet.learns else 0.0
    running = min(fleet.backends, rate / routers * fleet.busy_s)
    whole_changes = running / WHOLE_S  # of each router per second
    changes = CHANGES * rate / routers + whole_changes
    entries_written = routers * written
    # of entries; every router reads all of them
    bytes_in = rate * (costs.sent_bytes + learnt_bytes) + routers * (
        changes * costs.change_bytes + written * costs.entry_bytes
    )
    others = (routers - 1) / routers
    heard_s = costs.sent_s + ((costs.learnt_s + fleet.blocks * costs.learnt_block_s) if fleet.learns else 0.0)
    events = 0.0
    if not fleet.learns:
        # each new block is reported twice, when it is stored and when it is evicted
        events = fleet.backends * fleet.reports_per_s * costs.report_s
        events += costs.cold * rate * 2 * fleet.new_blocks * costs.event_block_s
    if fleet.learns:
        wanted = fleet.backends * fleet.cache_blocks * costs.learnt_known_block_bytes
        room = float(fleet.backends * LEARNT_BYTES)
    else:
        wanted, room = fleet.backends * fleet.cache_blocks * costs.indexed_block_bytes, float(INDEX_BYTES)
    own_s = costs.request_s + fleet.events * costs.stream_event_s + fleet.limited * costs.quota_s
    own_s += decision_s(fleet.backends) - DECISIONS[0][1]
    if fleet.learns:
        own_s += fleet.backends * costs.lookup_s + min(fleet.backends, fleet.holders) * costs.holder_s
    return Needs(
        interval_s=interval_s,
        exchanges=routers * turns,
        entries_written=entries_written,
        entries_read=routers * entries_written,
        bytes_in=bytes_in + routers * turns * costs.exchange_in_bytes,
        bytes_out=routers * bytes_in + routers * turns * costs.exchange_out_bytes,
        own=rate / routers * own_s,
        exchange=costs.cold * (turns * (costs.turn_s + fleet.backends * costs.scan_s) + written * costs.write_s),
        entries=costs.cold * entries_written * costs.entry_s,
        news=costs.cold * others * rate * heard_s,
        changes=costs.cold * others * routers * changes * costs.change_s,
        events=events,
        redis_news=routers * turns * costs.redis_exchange_s
        + entries_written * (costs.redis_write_s + routers * costs.redis_read_s)
        + bytes_in * (costs.redis_in_byte_s + routers * costs.redis_out_byte_s),
        redis_quotas=fleet.limited * rate * costs.redis_quota_s,
        router_bytes=costs.base_bytes + fleet.backends * costs.backend_bytes + min(wanted, room),
        known=min(1.0, room / wanted),
    )


def decision_s(backends: int) -> float:
    """Seconds of a decision among so many backends: straight lines between DECISIONS on logarithmic axes."""
    (first, least), *_, (last, most) = DECISIONS
    if not first < backends < last:
        return least if backends <= first else most
    for (few, few_s), (many, many_s) in pairwise(DECISIONS):
        if backends <= many:
            slope = math.log(many_s / few_s) / math.log(many / few)
            return float(few_s * (backends / few) ** slope)
    raise AssertionError("it lies between two of them")


def most_requests(fleet: Fleet, costs: Costs, *, busy: float = BUSY) -> float:
    """The requests per second at which a router of `fleet` is `busy`: its rate is not read."""
    return _largest(lambda rate: needs(replace(fleet, requests_per_s=rate), costs).router <= busy)


def routers_needed(whole: Fleet, costs: Costs, *, in_each_cell: int | None, most: int = 4096) -> int | None:
    """The fewest routers that serve the requests and backends of `whole`; None if `most` do not.

    `in_each_cell`: so many routers and their part of the backends form a cell; None: all are one cell.
    """
    step = in_each_cell or 1
    for routers in range(step, most + 1, step):
        cells = routers // step if in_each_cell else 1
        cell = replace(
            whole,
            routers=routers // cells,
            backends=max(1, whole.backends // cells),
            requests_per_s=whole.requests_per_s / cells,
        )
        if needs(cell, costs).router <= BUSY:
            return routers
    return None


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares: 1 is proportional, 0 constant."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def _largest(holds: Callable[[float], bool], *, most: float = 1e7) -> float:
    """The largest number up to `most` for which `holds`, which fails from some number on; 0 if it holds for none."""
    low, high = 0.0, most
    if holds(most):
        return most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
