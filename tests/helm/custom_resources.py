"""The used parts of four custom resources, as JSON Schema, from the API documents of their operators.

monitoring.coreos.com/v1 of the Prometheus operator, keda.sh/v1alpha1 of KEDA 2, inference.networking.k8s.io/v1 of the
Gateway API Inference Extension. A key that is not here is refused: it
is either misspelt or has to be looked up first.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


TEXT: Schema = {"type": "string", "minLength": 1}
WHOLE: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_RULE = {
    "oneOf": [
        _object(
            "alert expr for labels annotations",
            alert=TEXT,
            expr=TEXT,
            labels=TEXTS,
            annotations=TEXTS,
            **{"for": DURATION},
        ),
        _object("record expr", record={"type": "string", "pattern": "^[a-z_:][a-z0-9_:]*$"}, expr=TEXT, labels=TEXTS),
    ]
}
_POLICY = _object("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=WHOLE, periodSeconds=WHOLE)
_SCALING = _object("", stabilizationWindowSeconds=WHOLE, policies=_list(_POLICY))
_TRIGGER = _object(
    "type metadata",
    type={"const": "prometheus"},
    name=TEXT,
    metricType={"enum": ["Value", "AverageValue"]},
    # KEDA takes all of a trigger's metadata as text
    metadata=_object("serverAddress threshold query", serverAddress=TEXT, threshold=TEXT, query=TEXT),
)

_PORT = _object("number", number={"type": "integer", "minimum": 1, "maximum": 65535})

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        "selector endpoints",
        selector=_object("matchLabels", matchLabels=TEXTS),
        namespaceSelector=_object("matchNames", matchNames=_list(TEXT)),
        endpoints=_list(
            # a port of the service, or of its pods
            {
                "anyOf": [
                    _object("port", port=TEXT, path=TEXT, interval=DURATION),
                    _object("targetPort", targetPort=TEXT, path=TEXT, interval=DURATION),
                ]
            }
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups", groups=_list(_object("name rules", name=TEXT, rules=_list(_RULE)))
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        "selector targetPorts",
        selector=_object("matchLabels", matchLabels=TEXTS),
        targetPorts={**_list(_PORT), "maxItems": 8},
        # group "" and kind Service are what it is without them, and a Service needs a port
        endpointPickerRef=_object("name port", name=TEXT, port=_PORT, failureMode={"enum": ["FailOpen", "FailClose"]}),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        "scaleTargetRef triggers",
        scaleTargetRef=_object("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=WHOLE,
        maxReplicaCount=WHOLE,
        pollingInterval=WHOLE,
        advanced=_object(
            "",
            horizontalPodAutoscalerConfig=_object("", behavior=_object("", scaleUp=_SCALING, scaleDown=_SCALING)),
        ),
        triggers=_list(_TRIGGER),
    ),
}
