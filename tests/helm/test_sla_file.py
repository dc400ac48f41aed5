"""The file that the chart carries is the very file, and our own loader takes it where the pod finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.sla.parse import parse
from policies.sla.server import FIXED_SERVER
from router.start.config_file import ConfigFile
from tests.helm.chart import CHART, Rendered, Values, defaults, render
from tests.helm.test_pods import container, pods
from tests.helm.value_sets import SLA, VALUE_SETS

AWKWARD = 'pools: {own: {at: "${env:SHARDS_OWN}"}}   \n# ü, {{ .Values }} and a tab:\t\n\n\nrules: [{class: standard}]'


def environment_of(rendered: Rendered) -> dict[str, str]:
    """A router's environment; Secrets that are not the chart's hold `given`."""
    (name,) = (name for name in pods(rendered) if name.endswith("-router"))
    variables = {
        variable["name"]: variable.get("value", "given") for variable in container(pods(rendered)[name]).get("env", ())
    }
    urls = [secret["stringData"]["url"] for secret in rendered.all("Secret", "-redis")]
    variables |= {"REDIS_URL": urls[0]} if urls else {}
    own = [secret["stringData"] for secret in rendered.all("Secret", "-router")]
    return {"LABS_KEY": "given", **variables, **(own[0] if own else {})}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_file_in_the_configmap_is_sound_with_the_environment_of_the_pod(name: str, tmp_path: Path) -> None:
    rendered = render(VALUE_SETS[name])
    file = tmp_path / "sla.yaml"
    file.write_text(rendered.get("ConfigMap", "-sla")["data"]["sla.yaml"])
    config = ConfigFile(file, environment_of(rendered)).read().config
    shards = {address for pool in config.pools.values() if pool.kind == "shard" for address in pool.at}
    names = [each["metadata"]["name"] for each in rendered.all("StatefulSet") if "-shard-" in each["metadata"]["name"]]
    assert {address.split(".")[1].removesuffix(":7001") for address in shards} == set(names)


@pytest.mark.parametrize("text", [SLA, SLA.rstrip("\n"), AWKWARD, AWKWARD + "\n\n"])
def test_the_file_arrives_byte_for_byte(text: str) -> None:
    values: Values = {"sla": text, "shards": [{"name": "own"}, *([{"name": "large"}] if "LARGE" in text else [])]}
    assert render(values).get("ConfigMap", "-sla")["data"]["sla.yaml"] == text


def test_the_order_of_classes_which_is_their_rank_is_kept() -> None:
    text = render(VALUE_SETS["production file"]).get("ConfigMap", "-sla")["data"]["sla.yaml"]
    environment = {"LABS_KEY": "k", "SHARDS_OWN": "a:1", "SHARDS_LARGE": "b:1"}
    assert list(parse(text, environment=environment).classes) == [
        "interactive",
        "long-rag",
        "median",
        "batch",
        "overnight",
    ]


def test_the_charts_own_file_serves_one_pool_without_keys() -> None:
    config = parse(defaults()["sla"], environment={"SHARDS_OWN": "a:1,b:2"})
    assert config.pools["own"].at == ("a:1", "b:2")
    assert config.anonymous is not None


FILE = """
pools: {{own: {{at: ["${{env:SHARDS_OWN}}"{more}]}}}}
store: {{redis: "redis://{redis}"}}
usage: {{store: {usage}.sqlite}}
audit: {{file: {audit}.log}}
batches: {{store: ./{batches}, keep: {keep}}}
"""
USUAL = {"more": "", "redis": "redis", "usage": "usage", "audit": "audit", "batches": "batches", "keep": "30d"}


def replaces_routers(**changed: str) -> bool:
    """Whether a file that is `changed` in these places replaces the pods of routers."""
    before, after = (render({"sla": FILE.format(**places)}).by_name() for places in (USUAL, {**USUAL, **changed}))
    pod = "Deployment prod-pointsman-router"
    return before[pod]["spec"]["template"] != after[pod]["spec"]["template"]


def test_the_chart_replaces_pods_for_all_that_the_router_reads_only_once() -> None:
    text = (CHART / "templates/_sla.tpl").read_text()
    for key in FIXED_SERVER:
        assert f'"{key}"' in text
    assert replaces_routers(redis="other")
    assert replaces_routers(usage="other")
    assert replaces_routers(audit="other")
    assert replaces_routers(batches="other")


def test_the_chart_lets_routers_follow_other_changes() -> None:
    assert not replaces_routers(more=', "10.0.0.1:7001"')
    assert not replaces_routers(keep="7d")


def test_a_configmap_that_is_swapped_under_the_file_is_seen(tmp_path: Path) -> None:
    # as kubelet does it: sla.yaml -> ..data/sla.yaml, ..data -> a directory with a date, swapped by one rename
    def write(directory: str, text: str) -> None:
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "sla.yaml").write_text(text)
        (tmp_path / "..data_tmp").symlink_to(directory)
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")

    write("..2026_01_01", "classes: {a: {}}\n")
    (tmp_path / "sla.yaml").symlink_to("..data/sla.yaml")
    file = ConfigFile(tmp_path / "sla.yaml", {})
    before, again = file.stamp(), file.stamp()
    assert list(file.read().config.classes) == ["a"]
    write("..2026_01_02", "classes: {b: {}}\n")
    assert before == again != file.stamp()
    assert list(file.read().config.classes) == ["b"]
