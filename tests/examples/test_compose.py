"""The files of examples/compose/ fit each other, the images and the code. No daemon of docker runs them here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from policies.sla.parse import parse
from policies.sla.server import OPEN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/compose"
TEXT = (FOLDER / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
CONFIG = parse((FOLDER / "sla.yaml").read_text(), environment={"ACME_KEY": "a", "ADMIN_KEY": "b"})
SCRAPES = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]


def test_everything_that_is_asked_for_is_there() -> None:
    assert set(SERVICES) == {"router", "shard", "redis", "prometheus", "grafana"}
    assert SERVICES["shard"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", ["router", "shard"])
def test_images_are_built_from_files_that_are_there(name: str) -> None:
    build = SERVICES[name]["build"]
    dockerfile = (FOLDER / build["context"]).resolve() / build["dockerfile"]
    assert dockerfile == ROOT / f"Dockerfile.{name}"
    assert all(f"ARG {argument}=" in dockerfile.read_text() for argument in build.get("args", {}))


@pytest.mark.parametrize("name", ["redis", "prometheus", "grafana"])
def test_images_of_others_have_a_version(name: str) -> None:
    assert re.search(r":v?\d+\.\d+", SERVICES[name]["image"])


def test_what_is_mounted_is_there() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    mounts = [mount for mount in mounts if mount.startswith(".")]
    assert len(mounts) == 5
    assert all((FOLDER / mount.split(":")[0]).exists() and mount.endswith(":ro") for mount in mounts)


def test_the_file_names_the_services_and_the_keys_that_compose_has() -> None:
    (source,) = CONFIG.pools["own"].sources
    assert "shard:7001" in str(source)
    assert CONFIG.store.redis == "redis://redis:6379/0"
    written = (FOLDER / "sla.yaml").read_text()
    assert set(re.findall(r"\$\{env:(\w+)\}", written)) == set(SERVICES["router"]["environment"])
    # a key that is not set ends the start with a sentence
    assert all(":?" in value for value in SERVICES["router"]["environment"].values())


def test_published_ports_are_those_of_the_file_and_of_this_machine_alone() -> None:
    server = CONFIG.server
    ports = {str(address).rpartition(":")[2] for address in (server.http, server.grpc, server.admin)}
    assert set(SERVICES["router"]["ports"]) == {f"127.0.0.1:{port}:{port}" for port in ports}
    assert server.admin_key_hashes
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", ()))


def test_prometheus_asks_the_routers_port_of_metrics() -> None:
    (scrape,) = SCRAPES
    (found,) = scrape["dns_sd_configs"]
    assert found["names"] == ["router"]
    assert CONFIG.server.metrics not in (None, OPEN)
    assert str(CONFIG.server.metrics).endswith(f":{found['port']}")


def test_the_labels_of_the_dashboards_are_set() -> None:
    set_here = {rule["target_label"] for rule in SCRAPES[0]["relabel_configs"]}
    used = {
        name
        for file in (ROOT / "helm/pointsman/dashboards").glob("*.json")
        for name in re.findall(r'(\w+)=\\?"\$', file.read_text())
    }
    assert used <= set_here
    assert used


def rules_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rules", ROOT / ".ci/rules.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rules_are_the_charts_alerts_included_for_the_file_beside_them() -> None:
    written = yaml.safe_load((FOLDER / "rules.yml").read_text())
    assert written == rules_script().rules_of(FOLDER / "sla.yaml"), (
        "run `python .ci/rules.py > examples/compose/rules.yml`"
    )
    named = {rule.get("alert") or rule["record"] for group in written["groups"] for rule in group["rules"]}
    shown = "".join(file.read_text() for file in (ROOT / "helm/pointsman/dashboards").glob("*.json"))
    assert {*re.findall(r"pointsman:[\w:]+", shown)} <= named, "what the dashboards show and routers do not count"
    assert {"PointsmanRouterDown", "PointsmanPoolDown"} <= named


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_rules_are_written_for_any_file_without_helm(file: Path, tmp_path: Path) -> None:
    made = rules_script().rules_of(file)
    assert "prod-" not in yaml.safe_dump(made)
    if shutil.which("promtool") is not None:
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(made))
        done = subprocess.run(
            ["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_the_rules() -> None:
    (rules,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in SERVICES["prometheus"]["volumes"]


def test_grafana_is_told_where_prometheus_and_the_dashboards_are() -> None:
    (source,) = yaml.safe_load((FOLDER / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((FOLDER / "grafana/dashboards/pointsman.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert any(mount.split(":")[1] == provider["options"]["path"] for mount in SERVICES["grafana"]["volumes"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here; Debian's package prometheus has it")
def test_prometheus_reads_its_file() -> None:
    done = subprocess.run(["promtool", "check", "config", FOLDER / "prometheus.yml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_commands_of_the_page_name_the_file_and_set_every_key() -> None:
    page = (ROOT / "examples/README.md").read_text()
    (exported,) = re.findall(r"^export (.+)\ndocker", page, re.MULTILINE)
    (command,) = re.findall(r"^docker (.+)$", page, re.MULTILINE)
    assert {word.partition("=")[0] for word in exported.split()} == set(SERVICES["router"]["environment"])
    words = command.split()
    assert words[0] == "compose"
    assert (ROOT / words[words.index("-f") + 1]).read_text() == TEXT
