"""Certificates in a release: Secrets are mounted, commands and probes fit, and addresses say what is spoken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.sla.parse import parse
from tests.helm.chart import Values, render
from tests.helm.test_pods import container, pods
from tests.helm.value_sets import TLS_SLA, VALUE_SETS

ROOT = Path(__file__).parents[2]
EVERYWHERE = VALUE_SETS["tls everywhere"]
ROUTER, SHARD, REDIS = "prod-pointsman-router", "prod-pointsman-shard-own", "prod-pointsman-redis"


def probes(pod: dict[str, Any]) -> dict[str, Any]:
    found = container(pod)
    return {name: found[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


@pytest.mark.parametrize(("name", "secret"), [(ROUTER, "router-tls"), (SHARD, "shard-tls"), (REDIS, "redis-tls")])
def test_each_kind_of_pod_has_its_secret_as_a_folder_that_kubernetes_renews(name: str, secret: str) -> None:
    pod = pods(render(EVERYWHERE))[name]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
    assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}
    (mount,) = (mount for mount in container(pod)["volumeMounts"] if mount["name"] == "tls")
    assert mount == {"name": "tls", "mountPath": "/run/tls", "readOnly": True}


@pytest.mark.parametrize("name", [ROUTER, SHARD])
def test_without_names_of_secrets_there_are_none(name: str) -> None:
    pod = pods(render({}))[name]
    assert not [volume for volume in pod["volumes"] if volume["name"] == "tls"]
    assert not [argument for argument in container(pod)["args"] if "tls" in argument]


def test_shards_demand_a_certificate_of_routers() -> None:
    arguments = container(pods(render(EVERYWHERE))[SHARD])["args"]
    files = {"cert": "tls.crt", "key": "tls.key", "client-ca": "ca.crt"}
    assert {f"--tls-{option}=/run/tls/{file}" for option, file in files.items()} <= set(arguments)


def test_redis_has_no_plain_port_and_its_address_says_so() -> None:
    rendered = render(EVERYWHERE)
    arguments = container(pods(rendered)[REDIS])["args"]
    assert arguments[arguments.index("--port") + 1] == "0"
    assert arguments[arguments.index("--tls-port") + 1] == "6379"
    (secret,) = rendered.all("Secret", "redis")
    assert secret["stringData"]["url"] == f"rediss://{REDIS}:6379/0"


def test_a_kubelet_that_has_no_certificate_only_connects_to_shards() -> None:
    assert {str(probe.get("tcpSocket")) for probe in probes(pods(render(EVERYWHERE))[SHARD]).values()} == {
        "{'port': 'link'}"
    }
    assert all("grpc" in probe for probe in probes(pods(render({}))[SHARD]).values())


PAIR = "cert: /run/tls/tls.crt, key: /run/tls/tls.key"


@pytest.mark.parametrize(
    ("tls", "scheme"),
    [
        (f"{{{PAIR}}}", "HTTPS"),
        (f"{{{PAIR}, ports: {{http: off}}}}", None),
        (f"{{{PAIR}, ports: {{grpc: {{client_ca: /run/tls/ca.crt}}}}}}", "HTTPS"),
        (f"{{{PAIR}, ports: {{http: {{min_version: 1.3}}}}}}", "HTTPS"),
        (f"{{{PAIR}, client_ca: /run/tls/ca.crt}}", "tcp"),
        (f"{{{PAIR}, ports: {{http: {{client_ca: /run/tls/ca.crt}}}}}}", "tcp"),
    ],
)
def test_probes_of_a_router_speak_what_its_file_says(tls: str, scheme: str | None) -> None:
    sla = f"pools: {{own: {{at: '${{env:SHARDS_OWN}}'}}}}\nserver: {{tls: {tls}}}\n"
    assert parse(sla, environment={"SHARDS_OWN": "a:1"}).server.tls
    values: Values = {"sla": sla, "tls": {"router": "router-tls"}, "monitoring": {"serviceMonitor": {"enabled": True}}}
    rendered = render(values)
    for probe in probes(pods(rendered)[ROUTER]).values():
        if scheme == "tcp":
            assert probe["tcpSocket"] == {"port": "http"}
        else:
            assert probe["httpGet"].get("scheme") == scheme
    protocols = {port["name"]: port["appProtocol"] for port in rendered.get("Service", ROUTER)["spec"]["ports"]}
    assert protocols == {"http": "http" if scheme is None else "https", "grpc": "https"}
    (endpoint,) = rendered.get("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint == {"targetPort": "metrics", "path": "/metrics", "interval": "15s"}, "metrics are without TLS"


def test_the_page_shows_these_values_and_this_file() -> None:
    page = (ROOT / "docs/deploy.md").read_text().partition("\n## TLS\n")[2].partition("\n## ")[0]
    values, sla = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert values == {name: EVERYWHERE[name] for name in ("tls", "redis")}
    assert sla == yaml.safe_load(TLS_SLA)


def test_the_file_of_the_values_is_sound() -> None:
    config = parse(TLS_SLA, environment={"SHARDS_OWN": "a:1", "REDIS_URL": f"rediss://{REDIS}:6379/0"})
    assert config.pools["own"].tls is not None
    assert config.store.tls is not None
