from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from policies.errors import QuotaExceeded
from policies.nouns import BackendView, Decision, Fetch, PrefillLeg, Request, Usage
from router.call.tracing import Answered, PromptTrace, TraceIds
from router.operate.telemetry.telemetry import Telemetry
from router.supervise import supervise


def values(telemetry: Telemetry, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for metric in telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == f"pointsman_{name}"
    }


def test_times_are_measured_from_request_to_first_piece_and_between_pieces() -> None:
    now = 10.0
    telemetry = Telemetry(lambda: now)
    with telemetry.account("r") as account:
        account.tenant, account.service_class = "acme", "chat"
        now = 10.5
        account.heard(now)
        now = 11.5
        account.heard(now)
        account.usage = Usage(100, 11, 40)
        now = 12.0
    assert values(telemetry, "ttft_seconds_sum") == {("acme", "chat"): 0.5}
    assert values(telemetry, "tpot_seconds_sum") == {("acme", "chat"): pytest.approx(0.1)}
    assert values(telemetry, "request_seconds_sum") == {("acme", "chat"): 2.0}
    tokens = values(telemetry, "tokens_total")
    assert {key[-1]: value for key, value in tokens.items()} == {"prompt": 100, "cached": 40, "completion": 11}


def test_cached_tokens_have_no_series_until_a_backend_reports_some() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.usage = Usage(100, 11)
    assert {key[-1] for key in values(telemetry, "tokens_total")} == {"prompt", "completion"}


def test_blended_tokens_have_a_series_beside_the_cached_ones() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.usage = Usage(100, 11, 40, blended_tokens=25)
    tokens = {key[-1]: value for key, value in values(telemetry, "tokens_total").items()}
    assert tokens == {"prompt": 100, "cached": 40, "blended": 25, "completion": 11}


def test_tokens_from_other_backends_are_counted_by_their_source() -> None:
    telemetry = Telemetry()
    request = Request("r", "acme", "m", "acme", prompt_tokens=1000, max_new_tokens=10, service_class="chat")
    telemetry.decided(request, Decision("b0", "default"), None)
    assert values(telemetry, "transferred_tokens_total") == {}
    telemetry.decided(request, Decision("b0", "default", fetch=Fetch("b1", 640, 0.1, 0.5)), None)
    telemetry.decided(request, Decision("b0", "default", prefill=PrefillLeg("p0", 1.0, 1.0)), None)
    assert values(telemetry, "transferred_tokens_total") == {("b0", "cache"): 640, ("b0", "prefill"): 1000}


def test_each_end_is_counted_once_with_its_code() -> None:
    telemetry = Telemetry()
    for error in (QuotaExceeded("x"), asyncio.CancelledError(), KeyError("x")):
        with pytest.raises(type(error)), telemetry.account("r"):
            raise error
    assert {key[-1]: value for key, value in values(telemetry, "requests_total").items()} == {
        "rejected": 1,
        "cancelled": 1,
        "failed": 1,
    }
    assert values(telemetry, "errors_total") == {("rate_limit_exceeded",): 1, ("cancelled",): 1, ("failed",): 1}


def test_decisions_and_outcomes_are_logged_without_prompts(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    request = Request("r", "acme", "m", "acme", 10, 5, "chat", block_keys=(1, 2))
    view = BackendView("b0", "own", "fake", frozenset(), reported_s_ago=0.25)
    with caplog.at_level(logging.INFO):
        telemetry.decided(request, Decision("b0", "default", dropped=(("b1", "healthy"),)), view)
        telemetry.decided(request, Decision(None, "default"), None)
        with telemetry.account("r"):
            pass
    first, second, outcome = (json.loads(record.message) for record in caplog.records)
    assert (first["chosen"], first["dropped"], first["view_age_s"]) == ("b0", [["b1", "healthy"]], 0.25)
    assert (second["chosen"], second["view_age_s"]) == (None, None)
    assert "block_keys" not in first
    assert outcome["outcome"] == "finished"


class Sampled:
    ids = TraceIds("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")

    def prompt(self) -> PromptTrace:
        raise AssertionError("no prompt of it is answered")

    def end(self, what: Answered) -> None:
        pass


def a_sampled_call(telemetry: Telemetry) -> None:
    with telemetry.account("r") as account:
        account.trace = Sampled()
        account.heard(account.started_at + 0.3)


def test_openmetrics_has_the_trace_of_a_first_token_as_an_exemplar() -> None:
    telemetry = Telemetry()
    a_sampled_call(telemetry)
    body, content_type = telemetry.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    (exemplar,) = (sample.exemplar for sample in samples if sample.exemplar)
    assert exemplar.labels == Sampled.ids._asdict()
    assert exemplar.value == pytest.approx(0.3)


def test_others_get_the_plain_text_without_exemplars() -> None:
    telemetry = Telemetry()
    a_sampled_call(telemetry)
    body, content_type = telemetry.exposition("text/html, */*")
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b"trace_id" not in body


def test_an_outcome_in_the_log_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        a_sampled_call(Telemetry())
    assert json.loads(caplog.records[0].message)["trace_id"] == Sampled.ids.trace_id


def test_lines_that_several_threads_drop_are_all_counted() -> None:
    telemetry = Telemetry()
    with ThreadPoolExecutor(4) as threads:
        for dropping in [threads.submit(lambda: [telemetry.undecided(1) for _ in range(500)]) for _ in range(4)]:
            dropping.result()
    assert values(telemetry, "events_total") == {("decision_log_dropped",): 2000}


async def test_a_blocked_loop_shows_in_the_lag() -> None:
    telemetry = Telemetry()
    telemetry.lagged(0.2)
    telemetry.lagged(0.1)
    assert telemetry.worst_lag_s == 0.2
    assert values(telemetry, "event_loop_lag_max_seconds") == {(): 0.2}
    measuring = asyncio.create_task(telemetry.measure_lag(0.0))
    for _ in range(20):
        await asyncio.sleep(0)
    measuring.cancel()
    assert values(telemetry, "event_loop_lag_seconds_count")[()] > 3


async def test_background_work_is_started_again_after_a_failure() -> None:
    failures: list[str] = []
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError("x")

    await supervise("w", work, pause_s=0.0, on_failure=failures.append)
    assert runs == 3
    assert failures == ["w", "w"]
