"""The page on deploying: its commands are understood, its values work, and every alert is explained."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from policies.sla.parse import parse
from router.start.cli import app as router_app
from tests.helm.chart import CHART, NAMESPACE, RELEASE, Values, render
from tests.helm.test_rules import groups
from tests.helm.value_sets import SLA, VALUE_SETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def commands(program: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in COMMANDS if line.split()[0] == program]


def value_of(text: str) -> Any:
    """The value of the right side of --set."""
    return yaml.safe_load(text) if re.fullmatch(r"true|false|[0-9]+", text) else text


def values_of(arguments: list[str]) -> Values:
    """The values that `--set`, `--set-file` and `-f` of a helm command give; the reader's files are made up here."""
    values: Values = {}
    for option, given in pairwise(arguments):
        if option == "-f":
            assert given == "values.yaml"
            values |= BLOCKS[0]
        elif option == "--set-file":
            assert given == "sla=sla.yaml"
            values["sla"] = 'pools: {own: {at: "${env:SHARDS_OWN}"}}'
        elif option == "--set":
            path, _, text = given.partition("=")
            *parents, last = path.split(".")
            place = values
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value_of(text)
    return values


def test_every_line_that_looks_like_a_command_is_checked_here() -> None:
    assert {line.split()[0] for line in COMMANDS} == {"docker", "helm", "kubectl", "pointsman"}


@pytest.mark.parametrize("arguments", commands("helm"), ids=" ".join)
def test_every_helm_command_gives_values_that_render(arguments: list[str]) -> None:
    action, release, chart, flag, namespace, *rest = arguments
    assert (release, flag, namespace) == (RELEASE, "-n", NAMESPACE)
    assert ROOT / chart == CHART
    known = {"--create-namespace", "--reuse-values", "--set", "--set-file", "-f"}
    assert {word for word in rest if word.startswith("-")} <= known
    assert action in ("install", "upgrade")
    assert render(values_of(rest)).objects


@pytest.mark.parametrize("arguments", commands("docker"), ids=" ".join)
def test_every_image_is_built_from_a_file_that_is_there(arguments: list[str]) -> None:
    assert arguments[0] == "build"
    file = ROOT / arguments[arguments.index("-f") + 1]
    for given in (arguments[at + 1] for at, word in enumerate(arguments) if word == "--build-arg"):
        assert f"ARG {given.partition('=')[0]}" in file.read_text()


@pytest.mark.parametrize("arguments", commands("kubectl"), ids=" ".join)
def test_every_object_that_kubectl_names_is_in_the_release(arguments: list[str]) -> None:
    assert arguments[:2] == ["-n", NAMESPACE]
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in render().objects}
    assert {word for word in arguments if re.fullmatch(r"(deployment|service|statefulset)/.+", word)} <= names
    pods = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in render().objects
        if "template" in each.get("spec", {})
    ]
    for name, _, value in (given.partition("=") for option, given in pairwise(arguments) if option == "-l"):
        assert value in [labels.get(name) for labels in pods], f"no pod has the label {name}={value}"


@pytest.mark.parametrize("arguments", commands("pointsman"), ids=" ".join)
def test_every_pointsman_command_is_understood(arguments: list[str]) -> None:
    command, *rest = arguments
    typer.main.get_command(router_app).commands[command].make_context(command, rest)  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", [block for block in BLOCKS if "shards" in block], ids=lambda names: ",".join(names))
def test_the_values_on_the_page_render(block: Values) -> None:
    sla = "" if block["shards"] else "pools: {vllm: {kind: openai_compatible, at: 'http://vllm:8000', model: m}}"
    assert render({**block, **({"sla": sla} if sla else {})}).objects


def test_the_pool_on_the_page_is_sound() -> None:
    (block,) = [block for block in BLOCKS if "pools" in block and "store" not in block]
    config = parse(yaml.safe_dump(block), environment={"SHARDS_OWN": "127.0.0.1:7001"})
    assert config.pools["own"].at == ("127.0.0.1:7001",)


def test_the_adapter_serves_what_the_autoscaler_asks_for() -> None:
    (block,) = [block["rules"]["external"][0] for block in BLOCKS if "external" in block.get("rules", {})]
    (pattern,) = re.findall(r'=~"([^"]+)"', block["seriesQuery"])
    metrics = render(VALUE_SETS["scaled by hpa"]).get("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert all(re.fullmatch(pattern, metric["external"]["metric"]["name"]) for metric in metrics)


def test_every_alert_is_explained_under_the_anchor_that_its_runbook_names() -> None:
    rules = groups(VALUE_SETS["monitored"])
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == {
        rule["alert"] for rule in (*rules["promises"], *rules["parts"])
    }


def test_every_value_that_the_page_names_exists() -> None:
    from tests.helm.chart import defaults

    sections = "|".join(name for name, value in defaults().items() if isinstance(value, dict))
    for path in re.findall(rf"`((?:{sections})\.[\w.]+)", PAGE):
        place: Any = defaults()
        for key in path.split("."):
            assert key in place, path
            place = place[key]


def test_the_file_that_the_tests_give_to_the_chart_is_sound() -> None:
    assert parse(SLA, environment={"LABS_KEY": "k", "SHARDS_OWN": "a:1", "SHARDS_LARGE": "b:1"}).rules
