"""Kubernetes accepts every template, with all kinds of values; each value changes what it should."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.helm.chart import CHART, NAMESPACE, Rendered, changes, notes, render
from tests.helm.custom_resources import SPECS
from tests.helm.value_sets import VALUE_SETS

KUBERNETES = ("1.30", "1.37")
"""The oldest version that Chart.yaml allows, and the newest one with schemas in the validator."""

POOL = (
    "PodDisruptionBudget prod-pointsman-shard-{}",
    "Service prod-pointsman-shard-{}",
    "StatefulSet prod-pointsman-shard-{}",
)
REDIS = [f"+ {kind} prod-pointsman-redis" for kind in ("NetworkPolicy", "Secret", "Service", "StatefulSet")]
ROUTER, OWN = "~ Deployment prod-pointsman-router: ", "~ StatefulSet prod-pointsman-shard-own: "
EGRESS = "~ NetworkPolicy prod-pointsman-router: spec.egress"
NEW_FILE = "~ ConfigMap prod-pointsman-sla: data.sla.yaml"

CHANGES: dict[str, list[str]] = {
    "defaults": [],
    "production file": [
        *(f"+ {name.format('large')}" for name in POOL),
        NEW_FILE,
        ROUTER + "spec.containers, spec.terminationGracePeriodSeconds",
    ],
    "gpus": [
        OWN + "spec.containers, spec.nodeSelector, spec.persistentVolumeClaimRetentionPolicy, spec.priorityClassName, "
        "spec.runtimeClassName, spec.tolerations, spec.volumeClaimTemplates, spec.volumes"
    ],
    "small cpu shards": [ROUTER + "spec.containers", OWN + "spec.containers, spec.replicas"],
    "adapters": [ROUTER + "spec.containers", OWN + "spec.containers, spec.replicas"],
    "no shards of its own": [
        *(f"- {name.format('own')}" for name in POOL),
        NEW_FILE,
        ROUTER + "spec.containers",
        EGRESS,
    ],
    "endpoint picker": [
        *(f"- {name.format('own')}" for name in POOL),
        "+ InferencePool prod-pointsman",
        NEW_FILE,
        ROUTER + "spec.containers",
        "~ NetworkPolicy prod-pointsman-router: spec.ingress",
        "~ Service prod-pointsman-router: spec.ports",
    ],
    "endpoint picker of a pool elsewhere": [
        ROUTER + "spec.containers",
        "~ NetworkPolicy prod-pointsman-router: spec.ingress",
        "~ Service prod-pointsman-router: spec.ports",
    ],
    "several routers": [
        "+ HorizontalPodAutoscaler prod-pointsman-router",
        *REDIS,
        ROUTER + "metadata.annotations, spec.containers, spec.nodeSelector, spec.priorityClassName, spec.replicas, "
        "spec.tolerations",
        EGRESS,
        "~ Service prod-pointsman-router: metadata.annotations, spec.type",
    ],
    "redis in the release": [*REDIS, ROUTER + "spec.containers", EGRESS],
    "redis elsewhere": ["+ Secret prod-pointsman-redis", ROUTER + "spec.containers"],
    "redis from a secret": [ROUTER + "spec.containers"],
    "keys for trying out": [
        "+ Secret prod-pointsman-router",
        ROUTER + "metadata.annotations, spec.containers, spec.volumes",
    ],
    "one router with a claim": [ROUTER + "spec.strategy.rollingUpdate, spec.strategy.type, spec.volumes"],
    "scaled by hpa": [
        "+ HorizontalPodAutoscaler prod-pointsman-shard-own",
        "+ PrometheusRule prod-pointsman",
        ROUTER + "spec.containers",
        OWN + "spec.replicas",
    ],
    "scaled by keda": [
        "+ ScaledObject prod-pointsman-shard-own",
        ROUTER + "spec.containers",
        OWN + "spec.replicas",
    ],
    "scaled by hpa to what is needed": [
        "+ HorizontalPodAutoscaler prod-pointsman-shard-own",
        "+ PrometheusRule prod-pointsman",
        ROUTER + "spec.containers",
        OWN + "spec.replicas",
    ],
    "scaled by keda to what is needed": [
        "+ ScaledObject prod-pointsman-shard-own",
        ROUTER + "spec.containers",
        OWN + "spec.replicas",
    ],
    "monitored": [
        "+ ConfigMap prod-pointsman-dashboards",
        "+ PrometheusRule prod-pointsman",
        "+ ServiceMonitor prod-pointsman-router",
        *(f"+ {name.format('large')}" for name in POOL),
        NEW_FILE,
        ROUTER + "spec.containers, spec.terminationGracePeriodSeconds",
    ],
    "tls everywhere": [
        *REDIS,
        "+ ServiceMonitor prod-pointsman-router",
        NEW_FILE,
        ROUTER + "metadata.annotations, spec.containers, spec.volumes",
        OWN + "spec.containers, spec.volumes",
        EGRESS + ", spec.ingress",
        "~ Service prod-pointsman-router: spec.ports",
    ],
    "bare": [
        *(f"+ {kind} gate-{part}" for kind, part in [("ConfigMap", "sla"), ("Deployment", "router")]),
        *(f"+ Service gate-{part}" for part in ("router", "shard-own")),
        "+ StatefulSet gate-shard-own",
        *(f"- NetworkPolicy prod-pointsman-{part}" for part in ("router", "shard")),
        *(f"- {name.format('own')}" for name in POOL),
        "- ConfigMap prod-pointsman-sla",
        "- Deployment prod-pointsman-router",
        "- PodDisruptionBudget prod-pointsman-router",
        "- Service prod-pointsman-router",
    ],
}

render_set = cache(lambda name: render(VALUE_SETS[name]))


def check(document: dict[str, Any], version: str) -> None:
    """Raise if Kubernetes, or the operator of the resource, would reject `document`."""
    kind = (document["apiVersion"], document["kind"])
    if kind in SPECS:
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(document["spec"], SPECS[kind])
    else:
        kubernetes_validate.validate(document, version, strict=True)


@cache
def check_once(document: str, version: str) -> None:
    """The same, for documents that many values have in common: the validator reads all of its schemas each time."""
    check(json.loads(document), version)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_kubernetes_takes_every_object(name: str, version: str) -> None:
    for document in render_set(name).objects:
        check_once(json.dumps(document), version)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("Deployment", {"replica": 2}),
        ("StatefulSet", {"podManagementPolicy": 1}),
        ("ServiceMonitor", {"endpoint": []}),
        ("PrometheusRule", {"groups": [{"name": "x", "rules": [{"alert": "A", "expression": "1"}]}]}),
        ("ScaledObject", {"triggers": [{"type": "prometheus", "metadata": {"threshold": 1}}]}),
    ],
)
def test_the_checks_can_fail(kind: str, spoil: dict[str, Any]) -> None:
    name = "scaled by keda" if kind == "ScaledObject" else "monitored"
    document = next(each for each in render_set(name).objects if each["kind"] == kind)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check({**document, "spec": {**document["spec"], **spoil}}, "1.37")


def test_every_template_makes_something_of_some_values() -> None:
    used = {file for name in VALUE_SETS for file, text in render_set(name).texts.items() if text.strip()}
    assert used == {file.name for file in (CHART / "templates").glob("*.yaml")}


def test_every_template_holds_one_kind_of_object() -> None:
    for name in VALUE_SETS:
        for file, text in render_set(name).texts.items():
            kinds = {line for line in text.splitlines() if line.startswith("kind: ")}
            assert len(kinds) <= 1, file


@pytest.mark.parametrize("name", VALUE_SETS)
def test_values_change_what_they_should_and_nothing_else(name: str) -> None:
    assert changes(render_set("defaults"), render_set(name)) == sorted(CHANGES[name])


def test_there_are_a_dozen_sets_of_values_and_more() -> None:
    assert len(VALUE_SETS) >= 12
    assert list(VALUE_SETS) == list(CHANGES)


def test_no_two_objects_have_one_name_and_all_fit_into_a_label() -> None:
    long = {"fullnameOverride": "a" * 60, "shards": [{"name": "b" * 20, "replicas": 12}]}
    sla = {"sla": 'pools: {p: {at: "${env:SHARDS_' + "B" * 20 + '}"}}'}
    for rendered in (*map(render_set, VALUE_SETS), render({**long, **sla})):
        assert len(rendered.by_name()) == len(rendered.objects)
        for stateful in rendered.all("StatefulSet"):
            # the API server adds ten characters and a dash, and puts that into a label
            assert len(stateful["metadata"]["name"]) <= 52
        assert all(len(each["metadata"]["name"]) <= 63 for each in rendered.objects)


def test_what_helm_says_afterwards_names_the_service_and_warns() -> None:
    assert f"prod-pointsman-router.{NAMESPACE}" in notes()
    assert "needs no key" in notes()
    assert "needs no key" not in notes(VALUE_SETS["production file"])
    assert "3 of them grant 3 times as much" in notes({"router": {"replicas": 3}})
    assert "6 of them grant" in notes({"router": {"autoscaling": {"enabled": True}}})
    shared = 'pools: {own: {at: ["${env:SHARDS_OWN}"]}}\nstore: {redis: "${env:REDIS_URL}", replicas: 3}'
    assert "times as much" not in notes({"router": {"replicas": 3}, "redis": {"enabled": True}, "sla": shared})


def selected(rendered: Rendered, selector: dict[str, str]) -> list[str]:
    """Workloads of the pods that `selector` finds."""
    pods = [
        (each, each["spec"]["template"]["metadata"]["labels"])
        for kind in ("Deployment", "StatefulSet")
        for each in rendered.all(kind)
    ]
    return [each["metadata"]["name"] for each, labels in pods if selector.items() <= labels.items()]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_whatever_selects_pods_finds_those_of_its_own_name(name: str) -> None:
    rendered = render_set(name)
    for each in rendered.objects:
        spec, own = each.get("spec", {}), each["metadata"]["name"]
        if each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert selected(rendered, spec["selector"]["matchLabels"]) == [own]
        elif each["kind"] == "Service":
            assert selected(rendered, spec["selector"]) == [own]
        elif each["kind"] == "NetworkPolicy":
            assert all(found.startswith(own) for found in selected(rendered, spec["podSelector"]["matchLabels"]))
        elif each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = spec["scaleTargetRef"]
            assert "replicas" not in rendered.get(target["kind"], target["name"])["spec"]
