"""The images are made of what is there, run as the chart runs them, and the router's has no torch."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from policies.sla.parse import parse
from router.start.app import Router
from router.start.cli import app as router_app
from shards.__main__ import app as shard_app
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
    (router,), (shard,) = ([run for run in instructions(kind, "RUN") if '".[${EXTRAS}]"' in run] for kind in FILES)
    assert router.split()[-1] == shard.split()[-1] == '".[${EXTRAS}]"'
    assert instructions("router", "ARG")[1] == "EXTRAS=feeds,otlp"
    assert instructions("shard", "ARG")[1] == "EXTRAS=shard,triton"
    assert all("-c constraints.txt" in run for run in (router, shard))


def test_torch_is_a_layer_before_our_code() -> None:
    text = FILES["shard"]
    assert text.index("optional-dependencies") < text.index("COPY policies")
    (script,) = re.findall(r'python -c "(.*?)"\)', text.replace("\\\n", ""), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "torch==2.13.0"


@pytest.mark.parametrize("kind", FILES)
def test_the_base_is_one_version(kind: str) -> None:
    assert re.fullmatch(r"PYTHON=3\.1[123]\.\d+-slim-\w+", instructions(kind, "ARG")[0])
    assert {line.split()[0] for line in instructions(kind, "FROM")} == {"docker.io/library/python:${PYTHON}"}


@pytest.mark.parametrize("kind", FILES)
def test_an_image_runs_without_arguments_and_listens_on_all_interfaces(kind: str) -> None:
    (words,) = (json.loads(line) for line in instructions(kind, "CMD"))
    commands: dict[str, Any] = {
        **vars(typer.main.get_command(router_app))["commands"],
        "shard": typer.main.get_command(shard_app),
    }
    commands[words[0]].make_context(words[0], list(words[1:]))
    listens = re.findall(r"--(?:http|grpc|metrics|listen)=([\d.]+):(\d+)", " ".join(words))
    assert {host for host, _ in listens} == {"0.0.0.0"}
    assert {port for _, port in listens} == set(instructions(kind, "EXPOSE")[0].split())


def test_the_file_of_the_routers_image_is_sound() -> None:
    (text,) = re.findall(r"echo '(.+)' >/etc/pointsman/sla.yaml", FILES["router"])
    assert parse(text).pools["own"].sources


def health_check(kind: str, port: int) -> int:
    """Runs the image's check against `port` of this machine; its exit status."""
    line = next(line for line in instructions(kind, "HEALTHCHECK"))
    program, *words = json.loads(line.partition(" CMD ")[2])
    assert program == "python"
    words = [re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", word) for word in words]
    return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode


async def test_the_check_of_a_routers_health_is_one() -> None:
    config = parse('pools: {p: {kind: fake}}\nserver: {http: "127.0.0.1:0", grpc: off}')
    async with Router(config) as router:
        port = router.http.port
        assert await asyncio.to_thread(health_check, "router", port) == 0
    assert await asyncio.to_thread(health_check, "router", port) != 0


@pytest.mark.parametrize(("status", "exits"), [("SERVING", 0), ("NOT_SERVING", 1)])
async def test_the_check_of_a_shards_health_is_one(status: str, exits: int) -> None:
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await asyncio.to_thread(health_check, "shard", port) == exits
    finally:
        await server.stop(None)


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


def test_the_routers_state_is_a_volume_that_the_chart_and_compose_mount() -> None:
    (folder,) = instructions("router", "VOLUME")
    assert f"STATE_DIRECTORY={folder}" in instructions("router", "ENV")
    # the user of the image, and a random one of the group 0
    assert f"install -d -o 65532 -g 0 -m 0770 {folder}" in instructions("router", "RUN")
    router = pods(render_set("defaults"))["prod-pointsman-router"]
    assert {"name": "state", "mountPath": folder} in container(router)["volumeMounts"]
    compose = yaml.safe_load((ROOT / "examples" / "compose" / "compose.yaml").read_text())
    assert f"state:{folder}" in compose["services"]["router"]["volumes"]
    assert "state" in compose["volumes"]
