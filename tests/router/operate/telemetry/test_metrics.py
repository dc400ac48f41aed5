from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.operate.telemetry.metrics import OTHER, Metrics
from router.operate.telemetry.otlp_metrics import GENAI_NAMES
from router.operate.telemetry.telemetry import Telemetry
from router.shared.store.base import Fault
from tests.router.parts import series

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/metrics.md").read_text()

ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\| ", re.MULTILINE)


def test_the_page_has_every_metric_with_its_type_and_labels_and_no_other() -> None:
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}
    assert listed == {metric.name: (metric.kind, metric.labels) for metric in Telemetry().metrics}


def test_metrics_are_made_in_one_place_alone() -> None:
    telemetry = Telemetry()
    families = {family.name for family in telemetry.registry.collect()}
    assert families == {metric.name.removesuffix("_total") for metric in telemetry.metrics}
    users = {
        file.name for file in (ROOT / "router").rglob("*.py") if "import CollectorRegistry, Counter" in file.read_text()
    }
    assert users == {"metrics.py"}


def test_the_page_has_every_event_and_no_other() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "router").rglob("*.py"))
    events = set(re.findall(r'(?:\.|on_)event\(\s*"(\w+)"', sources)) | set(
        re.findall(r'self\._events\["(\w+)"\]', sources)
    )
    events |= {f"{what}_{fault}" for what in ("quota_store", "replicas") for fault in Fault}
    events |= {f"replicas_snapshot_{why}" for why in re.findall(r'raise Unfit\("(\w+)"\)', sources)}
    (paragraph,) = re.findall(r"^- `event`: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", paragraph)) == events


def test_the_page_has_the_names_that_differ_outside() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| `(gen_ai[\w.]+)` \|", PAGE, re.MULTILINE)) == GENAI_NAMES


def test_ttft_buckets_reach_two_minutes() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.heard(account.started_at + 119.9)
    bounds = [labels[-1] for labels, count in series(telemetry.registry, "ttft_seconds_bucket").items() if count]
    assert bounds == ["120.0", "+Inf"]


def test_no_series_is_exposed_twice_so_that_prometheus_takes_the_page() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.heard(account.started_at)
    lines = [line for line in telemetry.exposition()[0].decode().splitlines() if not line.startswith("#")]
    counts = Counter(line.rpartition(" ")[0] for line in lines)
    assert len(counts) > 50
    assert counts.most_common(1)[0][1] == 1


def test_a_metric_that_would_get_too_many_series_counts_the_rest_as_other() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, most_series=3)
    counter = metrics.counter("x", "x", ("a", "b"))
    for number in range(10):
        counter[str(number), "b"].inc()
    counter["0", "b"].inc()
    assert series(registry, "x_total") == {("0", "b"): 2, ("1", "b"): 1, ("2", "b"): 1, (OTHER, OTHER): 7}
    assert repr(metrics) == "<Metrics 1 with 3 series>"


@pytest.mark.parametrize("label", ["tenant", "service_class"])
def test_unknown_calls_share_one_series(label: str) -> None:
    telemetry = Telemetry()
    for number in range(5):
        with telemetry.account(f"r{number}"):
            pass
    (labels,) = series(telemetry.registry, "requests_total")
    assert labels == ("unknown", "none", "finished")
