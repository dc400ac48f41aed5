"""The values that the chart is tried with. Each is a realistic deployment."""

from __future__ import annotations

from pathlib import Path

from tests.helm.chart import Values

SLA = (Path(__file__).parent / "sla.yaml").read_text()

LARGE = {
    "name": "large",
    "replicas": 2,
    "model": "/models/Llama-3.1-8B-Instruct",
    "gpus": 1,
    "options": {"served-name": "llama-8b", "host-memory": 64, "max-running": 256, "max-waiting": 1000000},
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    "cache": {"storageClass": "fast"},
    "sharedMemory": "8Gi",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"gpu": "h200"},
    "resources": {"requests": {"cpu": "8", "memory": "96Gi"}, "limits": {"memory": "96Gi"}},
    "priorityClassName": "serving",
    "startupSeconds": 3601,
}
OWN = {"name": "own", "replicas": 2}
RULES = {"rules": {"enabled": True}}
ELSEWHERE = "pools: {vllm: {kind: openai_compatible, at: 'http://vllm:8000', model: llama-8b}}\n"

TLS_SLA = """
pools:
  own: {at: "${env:SHARDS_OWN}", tls: {ca: /run/tls/ca.crt, cert: /run/tls/tls.crt, key: /run/tls/tls.key}}
store:
  redis: "${env:REDIS_URL}"
  tls: {ca: /run/tls/ca.crt, cert: /run/tls/tls.crt, key: /run/tls/tls.key}
server:
  tls: {cert: /run/tls/tls.crt, key: /run/tls/tls.key}
"""
"""All connections in the release with certificates of cert-manager; clients need none."""

VALUE_SETS: dict[str, Values] = {
    "defaults": {},
    "production file": {"sla": SLA, "shards": [OWN, LARGE], "secrets": {"envFrom": ["tenant-keys"]}},
    "gpus": {"shards": [{**LARGE, "name": "own"}]},
    "small cpu shards": {
        "shards": [{"name": "own", "options": {"dtype": "int8", "kv-memory": 0.25, "deterministic": True}}]
    },
    "adapters": {
        "shards": [
            {
                "name": "own",
                "options": {
                    "lora": ["legal=/models/adapters/legal", "tone=/models/adapters/tone"],
                    "lora-dir": "/models/adapters/more",
                    "max-loras": 16,
                    "lora-memory": 2.5,
                    "max-lora-rank": 64,
                },
            }
        ]
    },
    "no shards of its own": {
        "sla": ELSEWHERE,
        "shards": [],
        "networkPolicy": {"egress": [{"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}]},
    },
    "endpoint picker": {
        "sla": ELSEWHERE,
        "shards": [],
        "picker": {"enabled": True, "inferencePool": {"matchLabels": {"app": "vllm"}, "targetPorts": [8000, 8001]}},
    },
    "endpoint picker of a pool elsewhere": {"picker": {"enabled": True}},
    "several routers": {
        "router": {
            "autoscaling": {"enabled": True, "min": 3},
            "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
            "podAnnotations": {"example.com/team": "llm"},
            "priorityClassName": "serving",
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "verbose": True,
        },
        "redis": {"enabled": True, "password": "a/b:c"},
    },
    "redis in the release": {"redis": {"enabled": True}},
    "redis elsewhere": {"redis": {"url": "rediss://cache.example.com:6380/0"}},
    "redis from a secret": {"redis": {"existingSecret": "shared-redis"}},
    "keys for trying out": {"secrets": {"env": {"LABS_KEY": "demo"}, "files": ["chat-key"]}},
    "one router with a claim": {"router": {"state": {"claim": "pointsman"}}},
    "scaled by hpa": {"shards": [{"name": "own", "autoscaling": {"by": "hpa", "max": 6}}], "monitoring": RULES},
    "scaled by keda": {
        "shards": [{"name": "own", "autoscaling": {"by": "keda", "min": 2, "classes": ["chat", "a.b"]}}],
        "monitoring": {"prometheusUrl": "http://prometheus.monitoring:9090"},
    },
    "scaled by hpa to what is needed": {
        "shards": [{"name": "own", "autoscaling": {"by": "hpa", "needed": True}}],
        "monitoring": RULES,
    },
    "scaled by keda to what is needed": {
        "shards": [{"name": "own", "autoscaling": {"by": "keda", "min": 0, "needed": True}}],
        "monitoring": {"prometheusUrl": "http://prometheus.monitoring:9090"},
    },
    "monitored": {
        "sla": SLA,
        "shards": [OWN, LARGE],
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}, "runbook": "https://example.com/alerts"},
            "dashboards": {"enabled": True},
        },
    },
    "tls everywhere": {
        "sla": TLS_SLA,
        "tls": {"router": "router-tls", "shards": "shard-tls", "redis": "redis-tls"},
        "redis": {"enabled": True},
        "picker": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "bare": {
        "fullnameOverride": "gate",
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "topologySpread": [],
        "serviceAccountName": "gate",
        "imagePullSecrets": [{"name": "registry"}],
        "image": {"router": {"repository": "registry.example.com/router", "tag": "abc", "pullPolicy": "Always"}},
    },
}
