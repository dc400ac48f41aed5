"""The metrics of backends: how well each is known; removed backends leave no series."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from backends.base import DraftedTokens, Fetched, rank_name
from policies.learning.cost import Latency
from policies.sla.parse import parse
from router.call.observer import UsageDoubt
from router.operate.telemetry.backend_metrics import BackendMetrics
from router.operate.telemetry.metrics import Metrics
from router.start.app import Router
from tests.router.parts import series


def test_predictions_are_compared_with_what_came_and_what_was_learnt_is_shown() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    backends.predicted("b0", predicted_s=1.0, seen_s=2.0)
    backends.predicted("b0", predicted_s=3.0, seen_s=2.0)
    backends.predicted("b0", predicted_s=1.0, seen_s=0.0)
    assert series(registry, "ttft_prediction_error_sum") == {("b0",): 1.0}
    assert series(registry, "ttft_prediction_error_count") == {("b0",): 2.0}
    assert series(registry, "ttft_prediction_seconds_total") == {("b0", "predicted"): 5.0, ("b0", "seen"): 4.0}
    backends.learnt("b0", Latency(token_s=0.25), None)
    assert series(registry, "backend_latency")[("b0", "token_s")] == 0.25
    assert len(series(registry, "backend_latency")) == 8
    assert series(registry, "backend_adaptive_limit") == {}
    backends.learnt("b0", Latency(), 12)
    assert series(registry, "backend_adaptive_limit") == {("b0",): 12}


def test_a_backend_with_an_odd_usage_is_counted_and_named_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    for _ in range(3):
        backends.doubted("b0", UsageDoubt.UNCOUNTED)
        backends.doubted("b0", UsageDoubt.BEYOND_ASKED)
        backends.doubted("b1", UsageDoubt.UNCOUNTED)
    kinds = {("b0", "uncounted"): 3.0, ("b0", "beyond_asked"): 3.0, ("b1", "uncounted"): 3.0}
    assert series(registry, "usage_doubts_total") == kinds
    assert [record.message.split()[0] for record in caplog.records] == ["b0", "b0", "b1"]
    backends.forget("b0")
    assert series(registry, "usage_doubts_total") == {("b1", "uncounted"): 3.0}
    backends.doubted("b0", UsageDoubt.UNCOUNTED)
    assert caplog.records[-1].message.startswith("b0 reports no numbers of tokens")


def test_guessed_tokens_are_shown_as_the_shard_counts_them() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    backends.drafted("b0", {"prompt": DraftedTokens(50, 20)})
    backends.drafted("b0", {"prompt": DraftedTokens(70, 30), "model": DraftedTokens(9, 8)})
    assert series(registry, "backend_drafted_tokens") == {
        ("b0", "prompt", "verified"): 70,
        ("b0", "prompt", "accepted"): 30,
        ("b0", "model", "verified"): 9,
        ("b0", "model", "accepted"): 8,
    }


def test_steps_without_a_graph_are_shown_once_a_capture_has_failed() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    assert series(registry, "backend_uncaptured_steps") == {}
    backends.uncaptured("b0", 5)
    assert series(registry, "backend_uncaptured_steps") == {("b0",): 5}


def test_blocks_on_disk_are_shown_as_the_shard_counts_them() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    backends.on_disk("b0", {"held": 5, "read": 1})
    backends.on_disk("b0", {"held": 6, "read": 2})
    assert series(registry, "backend_disk_blocks") == {("b0", "held"): 6, ("b0", "read"): 2}


def test_fetched_kv_is_shown_as_the_backend_counts_it() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    backends.fetched("b0", Fetched(1, 640, 80_000, 0.5))
    backends.fetched("b0", Fetched(2, 1280, 160_000, 0.75, 64))
    assert series(registry, "backend_fetched_kv") == {
        ("b0", "fetches"): 2,
        ("b0", "tokens"): 1280,
        ("b0", "bytes"): 160_000,
        ("b0", "seconds"): 0.75,
        ("b0", "taken_over"): 64,
    }


def test_a_backend_that_is_gone_takes_its_series_along() -> None:
    registry = CollectorRegistry()
    backends = BackendMetrics(Metrics(registry))
    for name in ("b0", "b1"):
        backends.health(name, True)
        backends.predicted(name, 1.0, 2.0)
    backends.forget("b0")
    assert series(registry, "backend_healthy") == {("b1",): 1}
    assert series(registry, "ttft_prediction_seconds_total").keys() == {("b1", "predicted"), ("b1", "seen")}
    backends.health("b0", False)
    assert series(registry, "backend_healthy") == {("b1",): 1, ("b0",): 0}


class PoolsAndBackends(RuleBasedStateMachine):
    """Any history of pools, of backends that the file names or that are found, of their ranks, and of their health."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        self.metrics = BackendMetrics(Metrics(self.registry))
        self.pools: dict[str, bool] = {}
        self.well: dict[str, str] = {}

    @rule(pools=st.dictionaries(st.sampled_from(["own", "own-1", "a.b_c"]), st.booleans()))
    def have_pools(self, pools: dict[str, bool]) -> None:
        self.metrics.pools(pools)
        self.pools = pools

    @rule(
        pool=st.sampled_from(["own", "own-1", "a.b_c"]),
        place=st.sampled_from(["-0", "-12", "@10.0.0.7:8000", "@a-1.b:80", "@[::1]:1", "@http-2:80/v-1"]),
        rank=st.sampled_from([0, 1, 15]),
        how=st.sampled_from([True, False, None]),
    )
    def tell(self, pool: str, place: str, rank: int, how: bool | None) -> None:
        backend = rank_name(f"{pool}{place}", rank)
        if how is None:
            self.metrics.forget(backend)
        else:
            self.metrics.health(backend, how)
        self.well.pop(backend, None)
        if how:
            self.well[backend] = pool

    @invariant()
    def each_pool_has_the_number_of_its_backends_that_are_well(self) -> None:
        counts = Counter(self.well.values())
        expected = {(pool,): float(counts[pool]) for pool in self.pools}
        assert series(self.registry, "pool_backends_healthy") == expected
        sleeps = {(pool,): float(may_sleep) for pool, may_sleep in self.pools.items()}
        assert series(self.registry, "pool_may_sleep") == sleeps


TestPoolsAndBackends = PoolsAndBackends.TestCase


async def test_a_pool_without_any_backend_and_one_whose_only_backend_is_ill_have_none_that_is_healthy() -> None:
    text = (
        "pools:\n  found: {kind: vllm, register: true, models: {m: m}}\n"
        "  named: {kind: vllm, at: 'http://127.0.0.1:9', models: {m: m}, wake: {within: 1m}}\n"
        "server: {http: '127.0.0.1:0', grpc: 'off'}\n"
    )
    async with Router(parse(text)) as router:
        registry = router.gateway.observer.registry  # type: ignore[attr-defined]
        assert series(registry, "pool_backends_healthy") == {("found",): 0, ("named",): 0}
        assert series(registry, "pool_may_sleep") == {("found",): 0, ("named",): 1}
