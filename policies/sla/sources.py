"""Sources of addresses for a pool's backends at run time, as the SLA file names them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?"
_DNS = rf"dns://{_NAME}:[0-9]{{1,5}}"
_SRV = rf"srv://{_NAME}"
_KUBERNETES = r"k8s://[a-z0-9-]{1,63}/[a-z0-9-]{1,63}:[a-z0-9-]{1,63}"

PATTERN = f"(?:{_DNS}|{_SRV}|{_KUBERNETES})"
"""Regular expression of a source in the file."""

_SCHEMES = ("dns://", "srv://", "k8s://")


@dataclass(frozen=True, slots=True)
class DnsName:
    """Every A and AAAA record of `name`, at `port`."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns://{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class SrvName:
    """Every host and port of the SRV records of `name` with the best priority. Source: RFC 2782."""

    name: str

    def __str__(self) -> str:
        return f"srv://{self.name}"


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """The ready endpoints of a service, at the port of this name or number, from its EndpointSlices."""

    namespace: str
    service: str
    port: str

    def __str__(self) -> str:
        return f"k8s://{self.namespace}/{self.service}:{self.port}"


SourceName = DnsName | SrvName | KubernetesService


def is_source(text: str) -> bool:
    """Whether `text` names a source rather than an address."""
    return text.startswith(_SCHEMES)


def read_source(text: str) -> SourceName:
    """The source that `text` names. Raises ValueError with a sentence."""
    if not re.fullmatch(PATTERN, text, re.ASCII):
        raise ValueError("must be dns://name:port, srv://_service._proto.name or k8s://namespace/service:port")
    scheme, rest = text[:6], text[6:]
    if scheme == "srv://":
        return SrvName(rest)
    place, _, port = rest.rpartition(":")
    if scheme == "dns://":
        if not 0 < int(port) < 65536:
            raise ValueError(f"has a port beyond 65535: {port}")
        return DnsName(place, int(port))
    namespace, _, service = place.partition("/")
    return KubernetesService(namespace, service, port)
