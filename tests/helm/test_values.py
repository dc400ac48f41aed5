"""A value that is wrong is refused before anything is installed, with its path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import jsonschema
import pytest
import typer
import yaml

from shards.__main__ import Dtype, KvDtype
from shards.__main__ import app as shard_app
from tests.helm.chart import CHART, Values, defaults, render, schema, with_defaults
from tests.helm.value_sets import VALUE_SETS

CHECK = jsonschema.Draft7Validator(schema())

WRONG: dict[str, Values] = {
    "": {"ruoter": {}},
    "router": {"router": {"replica": 2}},
    "router.replicas": {"router": {"replicas": "2"}},
    "router.preStopSeconds": {"router": {"preStopSeconds": 0}},
    "router.service.type": {"router": {"service": {"type": "ExternalName"}}},
    "router.autoscaling.cpuPercent": {"router": {"autoscaling": {"cpuPercent": 120}}},
    "router.resources.limits.memory": {"router": {"resources": {"limits": {"memory": "2 GB"}}}},
    "sla": {"sla": {"pools": {}}},
    "secrets.env": {"secrets": {"env": {"not-a-name": "x"}}},
    "secrets.env.KEY": {"secrets": {"env": {"KEY": 5}}},
    "secrets.files[0]": {"secrets": {"files": ["Not_A_Name"]}},
    "shards": {"shards": {"own": {}}},
    "shards[0]": {"shards": [{"replicas": 1}]},
    "shards[0].name": {"shards": [{"name": "Own_1"}]},
    "shards[0].model": {"shards": [{"name": "own", "model": "meta-llama/Llama-3.1-8B"}]},
    "shards[0].options": {"shards": [{"name": "own", "options": {"kv_memory": 8}}]},
    "shards[0].options.dtype": {"shards": [{"name": "own", "options": {"dtype": "float8"}}]},
    "shards[0].options.kv-memory": {"shards": [{"name": "own", "options": {"kv-memory": "8"}}]},
    "shards[0].autoscaling.needed": {"shards": [{"name": "own", "autoscaling": {"needed": "yes"}}]},
    "shards[0].autoscaling.by": {"shards": [{"name": "own", "autoscaling": {"by": "vpa"}}]},
    "shards[0].autoscaling.classes[0]": {"shards": [{"name": "own", "autoscaling": {"classes": ['a",b="c']}}]},
    "shards[0].cache.size": {"shards": [{"name": "own", "cache": {"size": "much"}}]},
    "shardDefaults": {"shardDefaults": {"name": "own"}},
    "redis": {"redis": {"enabled": True, "url": "redis://elsewhere:6379"}},
    "redis.url": {"redis": {"url": "http://elsewhere:6379"}},
    "redis.password": {"redis": {"enabled": True, "password": "two words"}},
    "redis.memory": {"redis": {"memory": "1.5Gi"}},
    "tls.shards": {"tls": {"shards": "Not_A_Name"}},
    "podDisruptionBudget.maxUnavailable": {"podDisruptionBudget": {"maxUnavailable": 0}},
    "topologySpread[0]": {"topologySpread": [{"key": "zone"}]},
    "monitoring.rules.availability": {"monitoring": {"rules": {"availability": 99.9}}},
    "monitoring.serviceMonitor.interval": {"monitoring": {"serviceMonitor": {"interval": "often"}}},
    "monitoring.prometheusUrl": {"monitoring": {"prometheusUrl": "prometheus:9090"}},
}


def path_of(error: jsonschema.ValidationError) -> str:
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in error.path))


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_value_is_refused_where_it_stands(path: str) -> None:
    found = {path_of(error) for error in CHECK.iter_errors(with_defaults(WRONG[path]))}
    assert found == {path}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_values_that_work_are_accepted(name: str) -> None:
    CHECK.validate(with_defaults(VALUE_SETS[name]))


def test_the_schema_itself_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(schema())


def objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "properties" in node and node.get("type") == "object":
            yield path, node
        for key, child in node.items():
            yield from objects(child, f"{path}/{key}")
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from objects(child, f"{path}/{number}")


def test_no_mapping_of_ours_takes_a_key_that_it_does_not_know() -> None:
    found = dict(objects(schema()))
    assert len(found) > 15
    assert [path for path, each in found.items() if each.get("additionalProperties") is not False] == []


def test_every_key_of_the_values_is_in_the_schema_and_the_other_way_round() -> None:
    known = schema()["properties"]
    assert set(known) - {"global"} == set(defaults())
    for name in ("router", "redis", "tls", "secrets", "image", "monitoring", "networkPolicy", "shardDefaults"):
        assert set(known[name]["properties"]) == set(defaults()[name]), name
    entry = known["shards"]["items"]["properties"]
    assert set(entry) == {"name", *defaults()["shardDefaults"]}


def test_options_of_shards_are_those_of_the_command() -> None:
    ours = {"model", "listen", "name", "device", "grace-s", "supervised"}
    # the chart knows its shards by name: they need not announce themselves
    ours |= {"register", "register-key", "register-ca", "advertise", "pool"}
    # it names the files of its own Secret
    ours |= {"tls-cert", "tls-key", "tls-client-ca"}
    command = typer.main.get_command(shard_app)
    known = {option.opts[0].removeprefix("--") for option in command.params} - {"help"}
    options = schema()["definitions"]["shardOptions"]["properties"]
    assert set(options) == known - ours
    for name, kind in (("dtype", Dtype), ("kv-dtype", KvDtype)):
        assert options[name]["enum"] == list(get_args(kind))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"shards": [{"name": "large"}]},
            r"no pool at \$\{env:SHARDS_LARGE\}, so nothing would reach the shards \"large\"",
        ),
        ({"sla": 'pools: {own: "${env:SHARDS_OWN}"'}, "sla: not YAML"),
        ({"sla": 'pools: {p: {at: "${env:SHARDS_OWN}"}}\nserver: {drain: long}'}, "sla: long is no duration"),
        (
            {"shards": [{"name": "own", "autoscaling": {"by": "hpa"}}]},
            "needs the metrics that monitoring.rules records: enable them",
        ),
        ({"router": {"replicas": 2, "state": {"claim": "one"}}}, "router.state.claim is for one router"),
        ({"shards": [{"name": "own", "autoscaling": {"by": "keda"}}]}, "prometheusUrl is needed to scale by keda"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: Values, message: str) -> None:
    with pytest.raises(Exception, match=message):
        render(values)


def test_the_chart_says_what_it_is() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["name"] == CHART.name
    assert json.loads((CHART / "values.schema.json").read_text())["$schema"].endswith("draft-07/schema#")


def test_a_pool_has_at_most_eight_ports_and_fails_one_of_two_ways() -> None:
    for wrong in ({"targetPorts": list(range(1, 10))}, {"targetPorts": []}, {"failureMode": "FailSafe"}):
        with pytest.raises(jsonschema.ValidationError):
            render({"picker": {"enabled": True, "inferencePool": wrong}})
