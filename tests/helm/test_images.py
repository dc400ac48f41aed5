"""The images are made of what is there, run as the chart runs them, and the router's has no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, defaults
from tests.helm.test_pods import container, pods
from tests.helm.test_render import render_set

ROOT = Path(__file__).parents[2]
FILES = {kind: (ROOT / f"Dockerfile.{kind}").read_text() for kind in ("router", "shard")}
PACKAGES = ("policies", "shards", "backends", "router")


def instructions(kind: str, word: str) -> list[str]:
    """The text after `word`, lines joined."""
    text = re.sub(r"\\\n", " ", FILES[kind])
    return re.findall(rf"^{word} (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_copied_is_there_and_not_ignored(kind: str) -> None:
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [name for line in instructions(kind, "COPY") if "--from" not in line for name in line.split()[:-1]]
    assert set(copied) == set(kept)
    assert all((ROOT / name).exists() for name in copied)
    assert set(PACKAGES) <= set(copied)


def test_the_router_has_no_torch_and_the_shard_has() -> None:
    (router,), (shard, *_) = ([run for run in instructions(kind, "RUN") if "pip install" in run] for kind in FILES)
    assert router.split()[-1] == shard.split()[-1] == '".[${EXTRAS}]"'
    assert instructions("router", "ARG")[1] == "EXTRAS=feeds,otlp"
    assert instructions("shard", "ARG")[1] == "EXTRAS=shard,triton"
    assert all("-c constraints.txt" in run for run in (router, shard))


@pytest.mark.parametrize("kind", FILES)
def test_an_image_runs_as_the_chart_runs_it(kind: str) -> None:
    pod = next(pod for name, pod in pods(render_set("defaults")).items() if f"-{kind}" in name)
    security = pod["securityContext"]
    assert instructions(kind, "USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    (entry,) = instructions(kind, "ENTRYPOINT")
    assert json.loads(entry) == ["pointsman"]
    assert "command" not in container(pod)
    ports = {str(port["containerPort"]) for port in container(pod)["ports"]}
    assert set(instructions(kind, "EXPOSE")[0].split()) == ports


def test_images_are_called_what_the_dockerfiles_call_them() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for kind, text in FILES.items():
        assert f"-t {defaults()['image'][kind]['repository']}:{version} ." in text


def test_the_chart_and_the_project_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
