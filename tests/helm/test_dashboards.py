"""Dashboards are JSON that Grafana reads, on metrics that the router has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART
from tests.helm.test_render import render_set
from tests.helm.test_rules import groups, metrics_in, needs_promtool, seen_by_prometheus
from tests.helm.value_sets import VALUE_SETS

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
VARIABLES = {"$namespace": "llm", "$service": "prod-pointsman-router", "$__rate_interval": "5m"}


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def expressions(path: Path) -> list[str]:
    return [target["expr"] for panel in panels(path) for target in panel["targets"]]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_metric_is_one_of_the_routers_or_of_the_rules(path: Path) -> None:
    recorded = {rule["record"] for rule in groups(VALUE_SETS["monitored"])["recorded"]}
    for expression in expressions(path):
        named = re.findall(r"pointsman:[\w:]+", expression)
        assert named or metrics_in(expression), expression
        assert set(named) <= recorded
        assert metrics_in(expression) <= seen_by_prometheus().keys()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_panel_asks_for_one_release_and_none_lies_over_another(path: Path) -> None:
    assert all('namespace="$namespace",service="$service"' in expression for expression in expressions(path))
    cells = [
        (x, y)
        for panel in panels(path)
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels(path)}) == len(panels(path))


def test_the_chart_carries_them_whole() -> None:
    data = render_set("monitored").get("ConfigMap", "-dashboards")["data"]
    assert [json.loads(data[f"pointsman-{path.stem}.json"]) for path in DASHBOARDS] == [
        json.loads(path.read_text()) for path in DASHBOARDS
    ]


@needs_promtool
def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    written = [expression for path in DASHBOARDS for expression in expressions(path)]
    for variable, value in VARIABLES.items():
        written = [query.replace(variable, value) for query in written]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(written)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    command = [str(shutil.which("promtool")), "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"SUCCESS: {len(written)} rules found" in done.stdout, done.stdout + done.stderr
