"""Whether and where this process sends its telemetry, by the standard environment variables of OpenTelemetry.

Source: the OpenTelemetry specification, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
OpenTelemetry is imported only if something is to be sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

Signal = Literal["traces", "metrics"]

_PACKAGES = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
_USUAL_PROTOCOL = "http/protobuf"
_EXPORTERS = {"traces": ("trace_exporter", "OTLPSpanExporter"), "metrics": ("metric_exporter", "OTLPMetricExporter")}

_BATCH_SPANS = 128


class CannotExport(Exception):
    """The environment asks for an export that this installation does not support."""


def is_wanted(signal: Signal, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns on the export of `signal`. Raises CannotExport if it names an unknown exporter.

    An endpoint asks for it, unless OTEL_<SIGNAL>_EXPORTER is `none` or OTEL_SDK_DISABLED is `true`.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
    if exporter not in {"", "none", "otlp"}:
        raise CannotExport(f"OTEL_{signal.upper()}_EXPORTER is {exporter!r}; there are 'otlp' and 'none'")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return exporter == "otlp" or (not exporter and any(environment.get(name) for name in endpoints))


def exporter_of(signal: Signal, environment: Mapping[str, str] = os.environ) -> Any:
    """The OTLP exporter of `signal`, which reads its further settings from the process' environment.

    Raises CannotExport if its package is not installed.
    """
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environment[name] for name in names if environment.get(name)), _USUAL_PROTOCOL)
    if protocol not in _PACKAGES:
        raise CannotExport(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; there are {' and '.join(_PACKAGES)}")
    module, name = _EXPORTERS[signal]
    try:
        return getattr(import_module(f"{_PACKAGES[protocol]}.{module}"), name)(**_direct(protocol, environment))
    except ImportError as error:
        distribution = _PACKAGES[protocol].replace(".", "-")
        how = "pip install 'pointsman[otlp]'" if protocol == _USUAL_PROTOCOL else f"pip install {distribution}"
        raise CannotExport(f"exporting {signal} needs {distribution}: {how}") from error


def _direct(protocol: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that keep an exporter of `protocol` from the proxies that variables name."""
    if protocol == "grpc":
        return {"channel_options": (("grpc.enable_http_proxy", 0),)}
    if any(name.endswith("_CREDENTIAL_PROVIDER") and value for name, value in environment.items()):
        # OpenTelemetry's variable for a session of the operator's own
        return {}
    session = import_module("requests").Session()
    session.trust_env = False
    return {"session": session}


def resource_of(service: str, instance: str) -> Resource:
    """The reporting `service` and `instance`, which OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES can override."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    usual = Resource.create({"service.name": service, "service.instance.id": instance})
    return usual.merge(OTELResourceDetector().detect())


def tracer_provider(service: str, instance: str) -> TracerProvider | None:
    """A provider that exports spans in batches, from a thread of its own; None if no export is configured.

    The sampler and the limits of the queue are those of OTEL_TRACES_SAMPLER and OTEL_BSP_*; spans beyond the limits
    are dropped. The caller must call `shut_down`. Raises CannotExport.
    """
    if not is_wanted("traces"):
        return None
    exporter = exporter_of("traces")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource_of(service, instance), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=_batch_spans(os.environ)))
    return provider


def _batch_spans(environment: Mapping[str, str]) -> int | None:
    """Spans in one export; None leaves it to the SDK, which reads the environment.

    Encoding a span takes 40 us of the interpreter (two cores of a Xeon, 2026-11). Batches are small, so that no step
    of an engine waits longer for the interpreter than the 5 ms after which Python hands it on anyway.
    """
    if any(environment.get(name) for name in ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "OTEL_BSP_MAX_QUEUE_SIZE")):
        return None
    return _BATCH_SPANS


def shut_down(provider: TracerProvider, patience_s: float = 5.0) -> None:
    """Export the remaining spans and end the thread; gives up after `patience_s` without a receiver. Blocks."""
    last = threading.Thread(target=provider.shutdown, daemon=True, name="last spans")
    last.start()
    last.join(patience_s)
