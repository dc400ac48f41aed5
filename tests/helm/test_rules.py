"""Rules of the chart: bounds are the router's, targets the file's, and alerts fire when they should and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.operate.telemetry.telemetry import Telemetry
from tests.helm.chart import Values, render
from tests.helm.rules import Story, growing, histogram, series
from tests.helm.test_render import render_set
from tests.helm.value_sets import ELSEWHERE, VALUE_SETS

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here; Debian's package prometheus has it")


@cache
def seen_by_prometheus() -> dict[str, tuple[str, ...]]:
    """Every metric of a router without `pointsman_` -> the bounds of its buckets, if it has any."""
    telemetry = Telemetry(clock=iter(range(100)).__next__)
    with telemetry.account("a") as account:
        account.heard(1.0)
        account.heard(2.0)
        account.usage = type(account.usage)(prompt_tokens=1, completion_tokens=2)
    families = text_string_to_metric_families(telemetry.exposition()[0].decode())
    return {
        family.name.removeprefix("pointsman_"): tuple(
            sample.labels["le"] for sample in family.samples if "le" in sample.labels and sample.labels["le"] != "+Inf"
        )
        for family in families
    }


def groups(values: Values) -> dict[str, list[dict[str, Any]]]:
    """The rules of each group, by the last word of its name."""
    found = render(values).get("PrometheusRule")["spec"]["groups"]
    return {group["name"].split(".")[1]: group["rules"] for group in found}


def with_classes(classes: str) -> dict[str, list[dict[str, Any]]]:
    return groups({"sla": f"{ELSEWHERE}classes: {classes}\n", "shards": [], "monitoring": {"rules": {"enabled": True}}})


def late_within_5m(classes: str) -> list[str]:
    return [rule["expr"] for rule in with_classes(classes)["recorded"] if re.search("late:share5m", rule["record"])]


@pytest.mark.parametrize("kind", ["ttft", "tpot"])
def test_the_bounds_that_the_chart_reckons_with_are_the_routers(kind: str) -> None:
    text = (Path(__file__).parents[2] / "helm/pointsman/templates/_metrics.tpl").read_text()
    (listed,) = re.findall(rf'"{kind}" \(list ([^)]*)\)', text)
    assert tuple(re.findall(r'"([^"]*)"', listed)) == seen_by_prometheus()[f"{kind}_seconds"]


def test_a_target_between_two_bounds_is_reckoned_on_a_straight_line() -> None:
    (expression,) = late_within_5m("{chat: {ttft_p95: 800ms}}")
    assert expression.startswith(
        '1 - (0.4 * sum by (service_class) (rate(pointsman_ttft_seconds_bucket{namespace="llm"'
    )
    assert re.findall(r'le="([^"]*)"', expression) == ["0.5", "1.0"]
    assert "+ 0.6 * sum" in expression


@pytest.mark.parametrize(
    ("classes", "bounds"),
    [
        ("{chat: {ttft_p95: 1s}}", ["1.0"]),
        ("{chat: {tpot_p95: 40ms}}", ["0.04"]),
        ("{chat: {ttft_p95: 2ms}}", ["0.005"]),
        ("{chat: {ttft_p95: 1.5m}}", ["60.0", "120.0"]),
        ("{chat: {ttft_p95: 2m}}", ["120.0"]),
    ],
)
def test_a_target_is_reckoned_with_the_bounds_around_it(classes: str, bounds: list[str]) -> None:
    (expression,) = late_within_5m(classes)
    assert re.findall(r'le="([^"]*)"', expression) == bounds


@pytest.mark.parametrize("classes", ["{chat: {}}", "{chat: {deadline: 1h}}", "{chat: {ttft_p95: 3m}}", "{chat: }"])
def test_what_the_metrics_cannot_show_has_no_rule(classes: str) -> None:
    assert late_within_5m(classes) == []


@pytest.mark.parametrize(
    ("target", "windows"),
    [
        ("ttft_p99", ["1h", "6h", "1d", "3d"]),
        ("ttft_p95", ["1h", "6h", "1d", "3d"]),
        ("ttft_p90", ["6h", "1d", "3d"]),
        ("ttft_p50", ["3d"]),
    ],
)
def test_an_alert_that_could_never_fire_is_not_there(target: str, windows: list[str]) -> None:
    alerts = [rule for rule in with_classes(f"{{chat: {{{target}: 1s}}}}")["promises"] if "Late" in rule["alert"]]
    assert [rule["labels"]["window"] for rule in alerts] == windows


def test_every_alert_says_how_bad_it_is_and_where_it_is_explained() -> None:
    rules = groups(VALUE_SETS["monitored"])
    for rule in (*rules["promises"], *rules["parts"]):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"https://example.com/alerts#{rule['alert'].lower()}"


SCALED = [name for name in VALUE_SETS if name.startswith("scaled by")]


def metrics_in(expression: str) -> set[str]:
    names = re.findall(r"\bpointsman_(\w+)", expression)
    return {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in names if not name.startswith("scaling_")}


@pytest.mark.parametrize("name", ["monitored", *SCALED])
def test_every_metric_that_rules_and_triggers_name_is_one_of_the_routers(name: str) -> None:
    rendered = render_set(name)
    rules = [
        rule["expr"]
        for resource in rendered.all("PrometheusRule")
        for g in resource["spec"]["groups"]
        for rule in g["rules"]
    ]
    queries = [
        trigger["metadata"]["query"]
        for resource in rendered.all("ScaledObject")
        for trigger in resource["spec"]["triggers"]
    ]
    named = set().union(*map(metrics_in, (*rules, *queries)))
    assert named
    assert named <= seen_by_prometheus().keys()


def scaling_rules(name: str) -> dict[str, dict[str, Any]]:
    """The recorded series that an HPA scales by, by name."""
    return {r["record"]: r for r in groups(VALUE_SETS[name])["recorded"] if r["record"].startswith("pointsman_scaling")}


def triggers_of(name: str) -> list[dict[str, Any]]:
    triggers: list[dict[str, Any]] = render_set(name).get("ScaledObject")["spec"]["triggers"]
    return triggers


@pytest.mark.parametrize("how", ["", " to what is needed"])
def test_hpa_and_keda_scale_by_the_same_three_measures(how: str) -> None:
    hpa = render_set(f"scaled by hpa{how}").get("HorizontalPodAutoscaler")["spec"]
    recorded = scaling_rules(f"scaled by hpa{how}")
    triggers = triggers_of(f"scaled by keda{how}")
    assert [metric["external"]["metric"]["name"] for metric in hpa["metrics"]] == list(recorded)
    for metric, trigger in zip(hpa["metrics"], triggers, strict=True):
        target = metric["external"]["target"]
        assert target["type"] == trigger["metricType"]
        assert target.get("value", target.get("averageValue")) == trigger["metadata"]["threshold"]
        labels = recorded[metric["external"]["metric"]["name"]]["labels"]
        assert metric["external"]["metric"]["selector"]["matchLabels"].items() <= labels.items()
        assert f"pointsman_scaling_{trigger['name'].replace('-', '_')}" == metric["external"]["metric"]["name"]


def test_misses_and_waits_are_those_of_the_named_classes_and_flights_those_of_the_pool() -> None:
    triggers = triggers_of("scaled by keda")
    assert 'service_class=~"chat|a.b"' in triggers[0]["metadata"]["query"]
    assert 'backend=~"own-[0-9]+"' in triggers[2]["metadata"]["query"]


def test_the_number_that_is_needed_replaces_requests_in_flight() -> None:
    before, after = triggers_of("scaled by keda"), triggers_of("scaled by keda to what is needed")
    assert [trigger["name"] for trigger in before] == ["misses-per-second", "queue-seconds", "in-flight"]
    assert [trigger["name"] for trigger in after] == ["misses-per-second", "queue-seconds", "backends-needed"]
    # a shard for each that is needed
    assert (after[2]["metricType"], after[2]["metadata"]["threshold"]) == ("AverageValue", "1")


# -- what follows is evaluated by Prometheus' own code

TTFT, TPOT = (seen_by_prometheus()[f"{kind}_seconds"] for kind in ("ttft", "tpot"))
LAG = seen_by_prometheus()["event_loop_lag_seconds"]
ERROR = ("0.1", "0.3", "0.5", "1.0", "2.0")


def a_pool(name: str, healthy: str, minutes: int, *, sleeps: bool = False) -> dict[str, str]:
    """The series of a pool with these numbers of healthy backends."""
    may_sleep = series("pointsman_pool_may_sleep", f"{int(sleeps)}x{minutes}", pool=name)
    return series("pointsman_pool_backends_healthy", healthy, pool=name) | may_sleep


def well(minutes: int) -> dict[str, str]:
    """A router that is scraped, with two backends that are well."""
    own, large = (series("pointsman_backend_healthy", f"1x{minutes}", backend=name) for name in ("own-0", "large-0"))
    pools = a_pool("own", f"1x{minutes}", minutes) | a_pool("large", f"1x{minutes}", minutes)
    router = series("up", f"1x{minutes}") | series("pointsman_config_info", f"1x{minutes}", version="a")
    return own | large | pools | router


def ttft(seen: dict[str, float], minutes: int, service_class: str = "interactive") -> dict[str, str]:
    return histogram("pointsman_ttft_seconds", TTFT, seen, minutes, tenant="acme", service_class=service_class)


def ended(outcome: str, per_minute: float, minutes: int) -> dict[str, str]:
    labels = {"tenant": "acme", "service_class": "interactive"}
    return growing("pointsman_requests_total", per_minute, minutes, outcome=outcome, **labels)


def fires(alert: str, severity: str, **labels: str) -> dict[str, str]:
    return {"alertname": alert, "severity": severity, **labels}


def burns(alert: str, service_class: str, *windows: str) -> tuple[dict[str, str], ...]:
    severity = {"1h": "page", "6h": "page", "1d": "ticket", "3d": "ticket"}
    return tuple(fires(alert, severity[window], window=window, service_class=service_class) for window in windows)


WAITING = {"service_class": "interactive"}
STORIES = {
    "all is well": Story(
        well(200)
        | ttft({"0.5": 100}, 200)
        | ended("finished", 100, 200)
        | ended("rejected", 50, 200)
        | ended("cancelled", 50, 200),
        190,
    ),
    "most first tokens are late": Story(
        well(90) | ttft({"0.5": 20, "2.5": 80}, 90),
        70,
        burns("PointsmanFirstTokensLate", "interactive", "1h", "6h", "1d"),
    ),
    "two of five first tokens are late": Story(
        # all between 0.5 and 1 s: 40 % of a straight line lies above 0.8 s
        well(90) | ttft({"1.0": 100}, 90),
        70,
        burns("PointsmanFirstTokensLate", "interactive", "6h", "1d"),
    ),
    "hardly anybody asks": Story(well(90) | ttft({"2.5": 0.1}, 90), 70),
    "a median is missed by most": Story(
        well(200) | ttft({"2.5": 40, "5.0": 60}, 200, "median"), 190, burns("PointsmanFirstTokensLate", "median", "3d")
    ),
    "tokens are late": Story(
        well(90)
        | histogram("pointsman_tpot_seconds", TPOT, {"0.08": 100}, 90, tenant="acme", service_class="long-rag"),
        70,
        burns("PointsmanTokensLate", "long-rag", "6h", "1d"),
    ),
    "one request of twenty fails": Story(
        well(90) | ended("finished", 95, 90) | ended("failed", 5, 90),
        70,
        burns("PointsmanRequestsFail", "interactive", "1h", "6h", "1d"),
    ),
    "no router is scraped": Story({}, 10, (fires("PointsmanRouterDown", "page"),)),
    "routers are down": Story(series("up", "0x20"), 10, (fires("PointsmanRouterDown", "page"),)),
    "a pool is down": Story(
        well(90)
        | a_pool("own", "0x90", 90)
        | series("pointsman_backend_healthy", "0x90", backend="own-0")
        | series("pointsman_backend_healthy", "0x90", backend="own-1"),
        10,
        (fires("PointsmanPoolDown", "page", pool="own"),),
    ),
    "two pools are down, whose backends are found": Story(
        # backends that the source no longer names have no series
        well(90) | a_pool("dns", "2x10 0x80", 90) | a_pool("a-1", "0x90", 90),
        20,
        (fires("PointsmanPoolDown", "page", pool="dns"), fires("PointsmanPoolDown", "page", pool="a-1")),
    ),
    "one of two routers reaches a pool": Story(
        well(90) | a_pool("dns", "0x90", 90) | series("pointsman_pool_backends_healthy", "1x90", pool="dns", pod="r-1"),
        20,
    ),
    "a pool sleeps": Story(
        well(90)
        | a_pool("far", "1x10 0x80", 90, sleeps=True)
        | series("pointsman_backend_healthy", "1x10 0x80", backend="far-0")
        | series("pointsman_backend_healthy", "1x10 0x80", backend="far@10.0.0.7:8000/1")
        | series("pointsman_pool_waiting", "0x90", pool="far"),
        30,
    ),
    "a pool that sleeps is started": Story(
        well(90)
        | a_pool("far", "0x14 1x80", 90, sleeps=True)
        | series("pointsman_pool_waiting", "0x10 3x4 0x80", pool="far"),
        20,
    ),
    "a pool that sleeps does not start": Story(
        well(90) | a_pool("far", "0x90", 90, sleeps=True) | series("pointsman_pool_waiting", "0x10 3x80", pool="far"),
        30,
        (fires("PointsmanPoolDoesNotStart", "page", pool="far"),),
    ),
    "a backend fell ill": Story(
        well(90) | series("pointsman_backend_healthy", "1x30 0x60", backend="own-1"),
        40,
        (fires("PointsmanBackendIll", "ticket", backend="own-1"),),
    ),
    "backends that were found fell ill, one beside a pool that sleeps": Story(
        well(90)
        | a_pool("dns", "1x90", 90)
        | a_pool("far", "1x90", 90, sleeps=True)
        | a_pool("far-1", "0x90", 90, sleeps=True)
        | series("pointsman_backend_healthy", "1x30 0x60", backend="dns@10.0.0.7-1:8000")
        | series("pointsman_backend_healthy", "1x30 0x60", backend="far-1/3"),
        40,
        (
            fires("PointsmanBackendIll", "ticket", backend="dns@10.0.0.7-1:8000"),
            fires("PointsmanBackendIll", "ticket", backend="far-1/3"),
        ),
    ),
    "a shard was never there": Story(well(90) | series("pointsman_backend_healthy", "0x90", backend="own-7"), 20),
    "a source of backends fails": Story(
        well(90)
        | a_pool("dns", "2x90", 90)
        | series("pointsman_discovery_well", "0x90", pool="dns", source="dns://x:1"),
        20,
        (fires("PointsmanDiscoveryFails", "ticket", pool="dns"),),
    ),
    "a tenant's budget is used up": Story(
        well(90)
        | ended("rejected", 100, 90)
        | growing("pointsman_errors_total", 100, 90, code="quota_exceeded")
        | ttft({"0.5": 1}, 90),
        70,
    ),
    "the queue stands": Story(
        well(90)
        | series("pointsman_queued", "3x90", **WAITING)
        | growing("pointsman_queue_seconds_count", 0, 90, tenant="a", **WAITING),
        30,
        (fires("PointsmanQueueStands", "page", service_class="interactive"),),
    ),
    "the queue moves": Story(
        well(90)
        | series("pointsman_queued", "3x90", **WAITING)
        | growing("pointsman_queue_seconds_count", 9, 90, tenant="a", **WAITING),
        30,
    ),
    "the event loop is late": Story(
        well(90) | histogram("pointsman_event_loop_lag_seconds", LAG, {"0.001": 90, "0.5": 10}, 90),
        30,
        (fires("PointsmanEventLoopLate", "ticket", pod="r-0"),),
    ),
    "a file is refused for the first time": Story(
        well(90) | series("pointsman_config_reloads_total", "_x20 1x70", result="refused"),
        30,
        (fires("PointsmanFileRefused", "ticket", pod="r-0"),),
    ),
    "a file is refused again": Story(
        well(90) | series("pointsman_config_reloads_total", "1x40 2x50", result="refused"),
        50,
        (fires("PointsmanFileRefused", "ticket", pod="r-0"),),
    ),
    "a file was refused long ago": Story(
        well(90) | series("pointsman_config_reloads_total", "1x90", result="refused"), 30
    ),
    "routers decide by two files": Story(
        well(90) | series("pointsman_config_info", "1x90", version="b"),
        30,
        (fires("PointsmanVersionsDiffer", "ticket"),),
    ),
    "a task fails": Story(
        well(90) | series("pointsman_events_total", "_x20 1x70", event="task_failed"),
        25,
        (fires("PointsmanTaskFailed", "ticket", pod="r-0"),),
    ),
    "predictions are off": Story(
        well(90) | histogram("pointsman_ttft_prediction_error", ERROR, {"1.0": 50}, 90, backend="own-0"),
        45,
        (fires("PointsmanPredictionsOff", "ticket", backend="own-0"),),
    ),
    "predictions are good": Story(
        well(90) | histogram("pointsman_ttft_prediction_error", ERROR, {"0.3": 50}, 90, backend="own-0"), 45
    ),
}


def needed(first: str, second: str = "") -> dict[str, str]:
    """The number that is needed, as one or two routers have it."""
    name = "pointsman_pool_backends_needed"
    other = series(name, second, pool="own", pod="r-1") if second else {}
    return series(name, first, pool="own", pod="r-0") | other


SHARDS = {
    key: value
    for pod in ("r-0", "r-1")
    for backend, well_or_not in (("own-0", "1x10"), ("own-1", "1x10"), ("own-2", "0x10"), ("large-0", "1x10"))
    for key, value in series("pointsman_backend_healthy", well_or_not, backend=backend, pod=pod).items()
}
UNKNOWN = "NaN " * 10
NEEDS = {
    "the router's number": (SHARDS | needed("3x10"), 3),
    "the largest of two routers": (SHARDS | needed("3x10", "4x10"), 4),
    "one router has no number": (SHARDS | needed(UNKNOWN, "4x10"), 4),
    "the shards that are there, where no router has a number": (SHARDS | needed(UNKNOWN, UNKNOWN), 2),
    "the shards that are there, after a start": (SHARDS, 2),
    "none without requests": (SHARDS | needed("0x10"), 0),
    "none if no router is there": ({}, 0),
    "one if requests wait for a pool that sleeps": (
        needed("0x10") | series("pointsman_pool_waiting", "7x10", pool="own"),
        1,
    ),
    "not that of another pool": (SHARDS | series("pointsman_pool_backends_needed", "9x10", pool="large"), 2),
}


@needs_promtool
@pytest.mark.parametrize("case", NEEDS)
def test_a_pool_that_follows_the_number_that_is_needed_gets(case: str, tmp_path: Path) -> None:
    samples, shards = NEEDS[case]
    rule = scaling_rules("scaled by hpa to what is needed")["pointsman_scaling_backends_needed"]
    expected = [{"labels": "{}", "value": shards}]
    test = {"expr": rule["expr"], "eval_time": "5m", "exp_samples": expected}
    inputs = [{"series": name, "values": values} for name, values in samples.items()]
    path = tmp_path / "needs.yaml"
    path.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [test]}]}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_some_story() -> None:
    rules = groups(VALUE_SETS["monitored"])
    tested = {labels["alertname"] for story in STORIES.values() for labels in story.firing}
    assert tested == {rule["alert"] for rule in (*rules["promises"], *rules["parts"])}


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def promtool_run(story: Story, directory: Path) -> subprocess.CompletedProcess[str]:
    """A run of promtool over `story` with the rules of the set `monitored`."""
    path = directory / "story.yaml"
    path.write_text(yaml.safe_dump(story.as_file(str(rules_file("monitored", directory)))))
    return promtool("test", "rules", path)


def rules_file(name: str, directory: Path) -> Path:
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump(render_set(name).get("PrometheusRule")["spec"]))
    return path


@needs_promtool
@pytest.mark.parametrize("name", [name for name in VALUE_SETS if render_set(name).all("PrometheusRule")])
def test_prometheus_understands_every_rule(name: str, tmp_path: Path) -> None:
    count = sum(len(group["rules"]) for group in render_set(name).get("PrometheusRule")["spec"]["groups"])
    done = promtool("check", "rules", rules_file(name, tmp_path))
    assert f"SUCCESS: {count} rules found" in done.stdout, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("name", STORIES)
def test_prometheus_raises_the_alerts_of_each_story_and_no_others(name: str, tmp_path: Path) -> None:
    done = promtool_run(STORIES[name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "firing", [(), (fires("PointsmanRouterDown", "page"), fires("PointsmanPoolDown", "page", pool="own"))]
)
def test_an_alert_too_few_or_too_many_is_seen(firing: tuple[dict[str, str], ...], tmp_path: Path) -> None:
    done = promtool_run(Story(STORIES["no router is scraped"].input, 10, firing), tmp_path)
    assert done.returncode != 0
    assert "got: {alertname=" in done.stderr
