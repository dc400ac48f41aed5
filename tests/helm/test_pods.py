"""Pods: the user they run as, what they may write, how they start, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import Rendered, Values, render
from tests.helm.test_render import render_set, selected
from tests.helm.value_sets import ELSEWHERE, OWN, SLA, VALUE_SETS


def pods(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """The pod of each workload, by the workload's name."""
    workloads = [*rendered.all("Deployment"), *rendered.all("StatefulSet")]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in workloads}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    found: dict[str, Any] = only
    return found


def router(values: Values) -> dict[str, Any]:
    return pods(render(values))["prod-pointsman-router"]


def shard(**pool: Any) -> dict[str, Any]:
    return pods(render({"shards": [{"name": "own", **pool}]}))["prod-pointsman-shard-own"]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_no_pod_is_root_or_writes_to_its_image_or_holds_a_token(name: str) -> None:
    for pod in pods(render_set(name)).values():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_mount_has_a_volume_every_volume_a_mount_and_a_bound(name: str) -> None:
    rendered = render_set(name)
    claims = {
        claim["metadata"]["name"]
        for each in rendered.all("StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", ())
    }
    for workload, pod in pods(rendered).items():
        volumes = {volume["name"] for volume in pod["volumes"]} | (claims if "shard" in workload else set())
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} <= volumes
        assert {volume["name"] for volume in pod["volumes"]} <= {m["name"] for m in container(pod)["volumeMounts"]}
        assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_container_says_what_it_needs(name: str) -> None:
    for pod in pods(render_set(name)).values():
        resources = container(pod)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_probes_and_policies_name_ports_that_exist(name: str) -> None:
    rendered = render_set(name)
    ports = {
        each: {p["name"]: p["containerPort"] for p in container(pod)["ports"]} for each, pod in pods(rendered).items()
    }
    for workload, pod in pods(rendered).items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for kind in ("httpGet", "grpc", "tcpSocket"):
                port = container(pod).get(probe, {}).get(kind, {}).get("port")
                assert port is None or port in ports[workload] or port in ports[workload].values()
    for service in rendered.all("Service"):
        (target,) = selected(rendered, service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[target].keys()
    for policy in rendered.all("NetworkPolicy"):
        for target in selected(rendered, policy["spec"]["podSelector"]["matchLabels"]):
            named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
            assert named <= ports[target].keys()


def test_a_policy_lets_routers_reach_only_shards_and_redis() -> None:
    rendered = render_set("several routers")
    to = [rule["to"][0] for rule in rendered.get("NetworkPolicy", "router")["spec"]["egress"] if "to" in rule]
    reached = {name for each in to for name in selected(rendered, each["podSelector"]["matchLabels"])}
    assert reached == {"prod-pointsman-shard-own", "prod-pointsman-redis"}
    for inner in ("shard", "redis"):
        spec = rendered.get("NetworkPolicy", inner)["spec"]
        (rule,) = spec["ingress"]
        assert selected(rendered, rule["from"][0]["podSelector"]["matchLabels"]) == ["prod-pointsman-router"]
        assert spec["egress"] == []


@pytest.mark.parametrize(("drain", "drain_s"), [("", 30), ("12s", 12), ("1.5m", 90), ("2500ms", 3), ("1h", 3600)])
def test_a_router_may_drain_as_long_as_its_file_says(drain: str, drain_s: int) -> None:
    file = ELSEWHERE + (f"server: {{drain: {drain}}}\n" if drain else "")
    pod = router({"sla": file, "shards": []})
    pause = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == pause + drain_s + 10


def test_a_shard_may_drain_as_long_as_configured() -> None:
    pod = shard(graceSeconds=120)
    assert "--grace-s=120" in container(pod)["args"]
    assert pod["terminationGracePeriodSeconds"] > 120


def test_a_shard_with_a_kv_directory_has_as_long_again_to_write_it() -> None:
    pod = shard(graceSeconds=120, options={"kv-dir": "/cache/kv"})
    assert "--kv-dir=/cache/kv" in " ".join(container(pod)["args"]).replace('"', "")
    assert pod["terminationGracePeriodSeconds"] > 240


def test_a_router_gets_requests_once_it_has_reached_its_pools_and_keeps_them_when_one_is_lost() -> None:
    probes = container(router({"router": {"startupSeconds": 61}}))
    assert probes["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"] >= 61
    assert {probes[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} == {"/healthz"}


def test_a_shard_has_all_the_time_that_its_model_takes_to_load() -> None:
    probe = container(shard(startupSeconds=3601))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3601


def test_a_shard_on_gpus_asks_for_them_and_tolerates_their_taint() -> None:
    pod = pods(render_set("gpus"))["prod-pointsman-shard-own"]
    assert container(pod)["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": 1}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["runtimeClassName"] == "nvidia"
    assert "--device=cuda" in container(pod)["args"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]


def test_a_shard_on_cpus_asks_for_no_gpu() -> None:
    assert "--device=cpu" in container(shard())["args"]
    assert container(shard())["resources"]["limits"].keys() == {"cpu", "memory"}
    assert "tolerations" not in shard()


def test_options_reach_the_command_as_they_were_written() -> None:
    args = container(pods(render_set("production file"))["prod-pointsman-shard-large"])["args"]
    wanted = {"--served-name=llama-8b", "--host-memory=64", "--max-running=256", "--max-waiting=1000000"}
    assert wanted <= set(args)
    assert "--deterministic" in container(shard(options={"deterministic": True}))["args"]
    assert not [arg for arg in container(shard(options={"deterministic": False}))["args"] if "deterministic" in arg]
    adapters = [arg for arg in container(shard(options={"lora": ["a=/m/a", "b=/m/b"]}))["args"] if "lora" in arg]
    assert adapters == ["--lora=a=/m/a", "--lora=b=/m/b"]


def test_values_of_a_pool_go_before_the_defaults_even_if_they_are_empty() -> None:
    values: Values = {
        "shardDefaults": {"replicas": 3, "gpus": 1, "options": {"dtype": "int8", "step-ms": 20}},
        "shards": [{"name": "own", "replicas": 0, "gpus": 0, "options": {"step-ms": 30}}],
    }
    rendered = render(values)
    assert rendered.get("StatefulSet")["spec"]["replicas"] == 0
    args = container(pods(rendered)["prod-pointsman-shard-own"])["args"]
    assert {"--dtype=int8", "--step-ms=30", "--device=cpu"} <= set(args)


def test_each_address_is_the_stable_name_of_a_shard_on_the_port_that_it_listens_on() -> None:
    rendered = render({"sla": SLA, "shards": [OWN, {"name": "large", "replicas": 3}], "secrets": {"envFrom": ["k"]}})
    variables = {
        variable["name"]: variable.get("value")
        for variable in container(pods(rendered)["prod-pointsman-router"])["env"]
    }
    for name, count in (("own", 2), ("large", 3)):
        stateful, service = (rendered.get(kind, f"shard-{name}") for kind in ("StatefulSet", "Service"))
        assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert (
            f"--listen=0.0.0.0:{service['spec']['ports'][0]['port']}"
            in container(stateful["spec"]["template"]["spec"])["args"]
        )
        hosts = [f"{stateful['metadata']['name']}-{n}.{service['metadata']['name']}:7001" for n in range(count)]
        assert variables[f"SHARDS_{name.upper()}"] == ",".join(hosts)


@pytest.mark.parametrize("by", ["hpa", "keda"])
def test_a_pool_that_scales_has_an_address_for_every_shard_that_it_may_get(by: str) -> None:
    scaling = {"by": by, "min": 1, "max": 5}
    monitoring = {"rules": {"enabled": True}, "prometheusUrl": "http://p:9090"}
    pod = router({"shards": [{"name": "own", "autoscaling": scaling}], "monitoring": monitoring})
    (variable,) = container(pod)["env"]
    assert len(variable["value"].split(",")) == 5


def test_a_name_with_a_dash_becomes_a_variable() -> None:
    pod = router({"sla": 'pools: {p: {at: "${env:SHARDS_LONG_RAG}"}}', "shards": [{"name": "long-rag"}]})
    assert container(pod)["env"][0]["name"] == "SHARDS_LONG_RAG"


def annotations(sla: str, **values: Any) -> dict[str, str]:
    rendered = render({"sla": sla, "shards": [], **values})
    found: dict[str, str] = rendered.get("Deployment")["spec"]["template"]["metadata"]["annotations"]
    return found


@pytest.mark.parametrize(
    "changed",
    [
        ELSEWHERE.replace("vllm:8000", "vllm:8001"),
        ELSEWHERE + "classes: {chat: {}}\n",
        ELSEWHERE + "server: {drain: 60s, max_concurrent: 9}\n",
        ELSEWHERE + "tenants: {a: {anonymous: true}}\n",
    ],
)
def test_what_takes_effect_at_once_restarts_no_router(changed: str) -> None:
    assert annotations(changed) == annotations(ELSEWHERE)


@pytest.mark.parametrize(
    "changed",
    [
        ELSEWHERE + "server: {max_body: 1MiB}\n",
        ELSEWHERE + "server: {http: '0.0.0.0:80'}\n",
        ELSEWHERE + "server: {grpc: 'off'}\n",
    ],
)
def test_what_needs_a_restart_gets_one(changed: str) -> None:
    assert annotations(changed) != annotations(ELSEWHERE)


def test_a_changed_secret_of_the_chart_restarts_routers() -> None:
    first, second = ({"secrets": {"env": {"KEY": value}}} for value in ("a", "b"))
    assert annotations(ELSEWHERE, **first) != annotations(ELSEWHERE, **second)


def test_the_file_is_mounted_so_that_a_changed_configmap_reaches_it() -> None:
    pod = router({})
    (mount,) = [mount for mount in container(pod)["volumeMounts"] if mount["name"] == "sla"]
    assert "subPath" not in mount
    assert container(pod)["args"][1] == f"{mount['mountPath']}/sla.yaml"


def test_secrets_come_as_variables_and_as_files() -> None:
    values = {"secrets": {"env": {"LABS_KEY": "demo"}, "envFrom": ["tenant-keys"], "files": ["chat-key"]}}
    pod = router(values)
    assert container(pod)["envFrom"] == [
        {"secretRef": {"name": "prod-pointsman-router"}},
        {"secretRef": {"name": "tenant-keys"}},
    ]
    assert {"name": "secret-chat-key", "mountPath": "/run/secrets/chat-key", "readOnly": True} in container(pod)[
        "volumeMounts"
    ]
    assert render(values).get("Secret")["stringData"] == {"LABS_KEY": "demo"}


@pytest.mark.parametrize(
    ("redis", "secret", "url"),
    [
        ({"enabled": True}, "prod-pointsman-redis", "redis://prod-pointsman-redis:6379/0"),
        (
            {"enabled": True, "password": "a/b:c"},
            "prod-pointsman-redis",
            "redis://:a%2Fb%3Ac@prod-pointsman-redis:6379/0",
        ),
        ({"url": "rediss://elsewhere:6380/1"}, "prod-pointsman-redis", "rediss://elsewhere:6380/1"),
        ({"existingSecret": "shared"}, "shared", None),
    ],
)
def test_routers_get_the_address_of_redis(redis: Values, secret: str, url: str | None) -> None:
    rendered = render({"redis": redis})
    (variable,) = [
        variable
        for variable in container(pods(rendered)["prod-pointsman-router"])["env"]
        if variable["name"] == "REDIS_URL"
    ]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": secret, "key": "url"}}
    assert [secret["stringData"]["url"] for secret in rendered.all("Secret", "redis")] == ([url] if url else [])


@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_budget_never_keeps_a_node_from_being_drained(name: str) -> None:
    for budget in render_set(name).all("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in budget["spec"]


def test_pods_of_a_kind_are_spread_over_nodes_and_zones() -> None:
    for pod in pods(render_set("production file")).values():
        keys = [constraint["topologyKey"] for constraint in pod["topologySpreadConstraints"]]
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_a_gateway_finds_the_picker_where_the_pool_says_it_is() -> None:
    rendered = render(VALUE_SETS["endpoint picker"])
    reference = rendered.get("InferencePool")["spec"]["endpointPickerRef"]
    service = rendered.get("Service", reference["name"])
    (port,) = (port for port in service["spec"]["ports"] if port["port"] == reference["port"]["number"])
    assert port["appProtocol"] == "kubernetes.io/h2c"
    pod = container(pods(rendered)[reference["name"]])
    (named,) = (named_port for named_port in pod["ports"] if named_port["name"] == port["targetPort"])
    assert f"--picker=0.0.0.0:{named['containerPort']}" in pod["args"]
    (clients, _) = rendered.get("NetworkPolicy", "router")["spec"]["ingress"]
    assert {"port": port["targetPort"], "protocol": "TCP"} in clients["ports"]
