"""The metrics of backends: membership, health, load, and the accuracy of predictions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from backends.base import DraftedTokens, Fetched
from policies.learning.cost import Latency
from policies.prefix.parity import Doubt, ParityReport, Trust
from router.call.observer import UsageDoubt
from router.fleet.cluster.listener import ClusterListener
from router.fleet.cluster.names import pool_of
from router.fleet.feeds.health import FeedHealth
from router.operate.telemetry.metrics import Metrics

_DOUBTS = {
    UsageDoubt.UNCOUNTED: "reports no numbers of tokens that can be read, and the router counts itself",
    UsageDoubt.BEYOND_ASKED: "reports more tokens than were sent or asked for, and what is charged is bounded",
}

_log = logging.getLogger(__name__)

_TRUST = {Trust.PROVEN: 1.0, Trust.UNPROVEN: 0.5, Trust.BROKEN: 0.0}

_ERROR = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)


class _Learnt:
    """What was last learnt of one backend."""

    __slots__ = ("latency",)

    def __init__(self, latency: Latency) -> None:
        self.latency = latency

    def __repr__(self) -> str:
        return f"<_Learnt {self.latency}>"

    def coefficient(self, name: str) -> float:
        """The coefficient of this name."""
        return float(getattr(self.latency, name))


class BackendMetrics(ClusterListener):
    """Metrics of a cluster that it listens to, of its discovery and of its cache events."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._learnt = metrics, dict[str, _Learnt]()
        self._pools: frozenset[str] = frozenset()
        self._well: dict[str, set[str]] = {}
        """The backends of each pool that may get requests."""
        backend, source = ("backend",), ("pool", "source")
        gauge, counter = metrics.gauge, metrics.counter
        self._in_flight = gauge("backend_in_flight", "Requests that this router has at a backend", backend)
        self._healthy = gauge("backend_healthy", "1 if the backend may get requests", backend)
        self._pool_well = gauge("pool_backends_healthy", "Backends of a pool that may get requests", ("pool",))
        self._pool_sleeps = gauge(
            "pool_may_sleep", "1 if a request has the pool started, so that it may be empty", ("pool",)
        )
        self._error = metrics.histogram(
            "ttft_prediction_error", "|predicted - observed| / observed, of each first token", backend, _ERROR
        )
        self._off = counter(
            "ttft_prediction_seconds", "Sum of times to first token: predicted and observed", (*backend, "kind")
        )
        self._latency = gauge("backend_latency", "Learned coefficients of a backend's times", (*backend, "coefficient"))
        self._limit = gauge(
            "backend_adaptive_limit", "Learned concurrency limit of a backend that reports none", backend
        )
        self._drafts = gauge(
            "backend_drafted_tokens", "Tokens that a shard drafted since its start", (*backend, "source", "what")
        )
        self._on_disk = gauge("backend_disk_blocks", "Blocks of a shard's directory for KV", (*backend, "what"))
        self._fetched = gauge(
            "backend_fetched_kv", "KV that a backend fetched from others since its start", (*backend, "what")
        )
        self._uncaptured = gauge(
            "backend_uncaptured_steps",
            "Decoding steps of a shard without a CUDA graph, since a capture failed",
            backend,
        )
        self._found = gauge("discovered_addresses", "Addresses in a source's last answer", source)
        self._source_well = gauge("discovery_well", "1 if the source answered last", source)
        self._source_failed = counter("discovery_failures", "Failed requests to a source", source)
        self._feed_confidence = gauge("feed_confidence", "P(hit) of blocks from a feed", ("source",))
        self._feed_counts = gauge("feed_events", "Events of a feed, by kind", ("source", "what"))
        self._trust = gauge(
            "feed_trust", "1 if events are trusted alone, 0.5 beside learned blocks, 0 if not", (*backend, "model")
        )
        self._compared = counter(
            "parity_comparisons",
            "Answers and events compared with the router's own computation",
            (*backend, "what", "result"),
        )

        self._doubted = counter("usage_doubts", "Answers with a usage that is not charged as it is", (*backend, "what"))
        self._told: set[tuple[str, UsageDoubt]] = set()

    def __repr__(self) -> str:
        return f"<BackendMetrics in {self._metrics!r}>"

    def used(self, backend: str, count: Callable[[], int]) -> None:
        """`count` says how many requests this router has at `backend`."""
        # changes with each request, and is read only when metrics are collected
        self._in_flight[backend].set_function(count)

    def health(self, backend: str, healthy: bool) -> None:
        """`backend` may get requests now, or may not."""
        self._healthy[backend].set(int(healthy))
        pool = pool_of(backend)
        well = self._well.setdefault(pool, set())
        (well.add if healthy else well.discard)(backend)
        self._count(pool)

    def pools(self, may_sleep: Mapping[str, bool]) -> None:
        """The file has these pools now; those that `may_sleep` are started when a request comes."""
        for pool in self._pools - may_sleep.keys():
            self._pool_well.forget(0, pool)
            self._pool_sleeps.forget(0, pool)
        self._pools = frozenset(may_sleep)
        for pool, sleeps in may_sleep.items():
            self._pool_sleeps[pool].set(int(sleeps))
            # also of a pool in which no backend was ever found
            self._count(pool)

    def predicted(self, backend: str, predicted_s: float, seen_s: float) -> None:
        """A first token of `backend` took `seen_s`; the prediction when it was sent was `predicted_s`."""
        if seen_s > 0:
            self._error[backend].observe(abs(predicted_s - seen_s) / seen_s)
        self._off[backend, "predicted"].inc(predicted_s)
        self._off[backend, "seen"].inc(max(0.0, seen_s))

    def learnt(self, backend: str, latency: Latency, adaptive_limit: int | None) -> None:
        """The current model of `backend`; `adaptive_limit` is None if it reports its limit itself."""
        learnt = self._learnt.get(backend)
        if learnt is None:
            learnt = self._learnt[backend] = _Learnt(latency)
            for name in Latency.__struct_fields__:
                # changes with each answer, and is read only when metrics are collected
                self._latency[backend, name].set_function(partial(learnt.coefficient, name))
        learnt.latency = latency
        if adaptive_limit is not None:
            self._limit[backend].set(adaptive_limit)

    def drafted(self, backend: str, drafts: Mapping[str, DraftedTokens]) -> None:
        """The drafted tokens of `backend` since its start, by what guessed them."""
        for source, counts in drafts.items():
            for what, tokens in counts._asdict().items():
                self._drafts[backend, source, what].set(tokens)

    def on_disk(self, backend: str, blocks: Mapping[str, int]) -> None:
        """The `blocks` of the directory of `backend`, by what became of them."""
        for what, count in blocks.items():
            self._on_disk[backend, what].set(count)

    def fetched(self, backend: str, fetched: Fetched) -> None:
        """The KV that `backend` has fetched from others since its start."""
        for what, amount in fetched._asdict().items():
            self._fetched[backend, what].set(amount)

    def uncaptured(self, backend: str, steps: int) -> None:
        """Since a capture failed `backend` has computed this number of decoding steps without a CUDA graph."""
        self._uncaptured[backend].set(steps)

    def discovered(self, pool: str, source: str, addresses: int) -> None:
        """`source` named this number of addresses for `pool`."""
        self._found[pool, source].set(addresses)
        self._source_well[pool, source].set(1)

    def discovery_failed(self, pool: str, source: str) -> None:
        """`source` could not be read; its last answer stays in effect."""
        self._source_well[pool, source].set(0)
        self._source_failed[pool, source].inc()

    def feed(self, health: FeedHealth) -> None:
        """The state of one source of cache events."""
        self._feed_confidence[str(health.source)].set(health.confidence)
        for what in ("batches", "gaps", "resyncs", "restarts", "cleared", "undecodable", "dropped"):
            self._feed_counts[str(health.source), what].set(getattr(health.counts, what))

    def compared(self, backend: str, what: Doubt, *, is_equal: bool) -> None:
        """Count one comparison of an answer or event of `backend` with the router's own computation."""
        self._compared[backend, what.value, "equal" if is_equal else "different"].inc()

    def doubted(self, backend: str, what: UsageDoubt) -> None:
        """Count an answer of `backend` with such a usage; the log has the first of each kind."""
        self._doubted[backend, what.value].inc()
        if (backend, what) not in self._told:
            self._told.add((backend, what))
            _log.warning(
                "%s %s; pointsman_usage_doubts_total{backend=...} counts its further answers", backend, _DOUBTS[what]
            )

    def trusted(self, report: ParityReport) -> None:
        """How far the events of a backend are trusted now."""
        self._trust[report.backend, report.model].set(_TRUST[report.trust])

    def forget(self, backend: str, sources: Sequence[str] = ()) -> None:
        """`backend` has left the cluster: drop its series, and those of its `sources` of cache events."""
        self._learnt.pop(backend, None)
        self._told -= {(backend, what) for what in UsageDoubt}
        pool = pool_of(backend)
        self._well.get(pool, set()).discard(backend)
        self._count(pool)
        self._metrics.forget("backend", backend)
        for source in sources:
            self._metrics.forget("source", source)

    def _count(self, pool: str) -> None:
        well = self._well.get(pool, set())
        if not well:
            self._well.pop(pool, None)
        if pool in self._pools:
            self._pool_well[pool].set(len(well))
