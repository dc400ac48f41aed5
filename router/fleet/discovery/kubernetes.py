"""Backends of a Kubernetes service: its EndpointSlices, listed and then watched over the plain API.

Sources: Kubernetes API concepts (list, watch, resourceVersion, bookmarks, 410 Gone), discovery.k8s.io/v1 EndpointSlice.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from backends.http.lenient_json import read_json
from backends.nesting import decode_json, has_many_values
from policies.quantities import digits
from policies.sla.sources import KubernetesService
from router.fleet.discovery.source import Addresses, SourceFailed

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_WATCH_S = 240
"""Length of one watch in s; the next one continues from there. So a vanished API server is noticed within that time."""

_SLACK_S = 15.0

_PAUSE_S = 0.2
"""Pause in s between two watches, for an API that ends each at once."""

_MOST_LIST_BYTES = 64 << 20
_MOST_LINE_BYTES = 8 << 20
"""Most bytes of one event: a slice has at most 1,000 endpoints, each less than a kilobyte."""


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """The API's address and credentials. `token_file` is read for each request: tokens are rotated."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] = os.environ) -> KubernetesAccess:
        """The access of the pod that this process runs in. Raises SourceFailed outside a cluster."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SourceFailed("this process is not in a pod: KUBERNETES_SERVICE_HOST is not set")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        return cls(url, _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def headers(self) -> dict[str, str]:
        """The header with the token. Raises SourceFailed if the token cannot be read."""
        if self.token_file is None:
            return {}
        try:
            return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}
        except OSError as error:
            raise SourceFailed(f"the service account's token cannot be read: {error}") from error

    def tls(self) -> ssl.SSLContext | bool:
        """The TLS context for the API's certificate. Raises SourceFailed if the authority's file cannot be read."""
        if self.ca_file is None:
            return True
        try:
            return ssl.create_default_context(cafile=str(self.ca_file))
        except OSError as error:
            raise SourceFailed(f"the cluster's authority cannot be read: {error}") from error


class _Gone(Exception):
    """The last resource version is too old to continue from."""


class KubernetesSource:
    """The ready endpoints of one service. Terminating ones are left out, so that they drain."""

    patience_s = 30.0

    def __init__(self, at: KubernetesService, access: KubernetesAccess | None = None) -> None:
        self._at, self._given = at, access

    async def addresses(self) -> AsyncGenerator[Addresses]:
        access = self._given or KubernetesAccess.in_cluster()
        # an endless reply has no total timeout; each read sets its own
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=10.0)) as http:
            while True:
                slices, version = await self._list(http, access)
                yield self._all(slices)
                try:
                    while True:
                        async with aclosing(self._watch(http, access, version)) as events:
                            async for event in events:
                                version = event["object"]["metadata"]["resourceVersion"]
                                if _applied(slices, event):
                                    yield self._all(slices)
                        await asyncio.sleep(_PAUSE_S)
                except _Gone:
                    continue

    async def _list(self, http: aiohttp.ClientSession, access: KubernetesAccess) -> tuple[dict[str, Any], str]:
        async with self._get(http, access, {}, read_s=_SLACK_S) as reply:
            try:
                listed = await _read(await _at_most(reply.content))
                slices = {found["metadata"]["name"]: found for found in listed.get("items") or ()}
                return slices, str(listed["metadata"]["resourceVersion"])
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                raise SourceFailed(f"unexpected list from the API: {error}") from error

    async def _watch(
        self, http: aiohttp.ClientSession, access: KubernetesAccess, version: str
    ) -> AsyncGenerator[dict[str, Any]]:
        """Events after `version` until the API ends the watch. Raises _Gone, SourceFailed."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        async with self._get(http, access, query, read_s=_WATCH_S + _SLACK_S) as reply:
            while line := await reply.content.readline():
                try:
                    event = await _read(line)
                    kind, about = event["type"], event["object"]
                    if kind == "ERROR" and about.get("code") == 410:
                        raise _Gone
                    if kind == "ERROR":
                        raise SourceFailed(f"the API ended the watch: {about.get('message')}")
                    about["metadata"]["resourceVersion"]
                except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
                    raise SourceFailed(f"unexpected event from the API: {error!r}") from error
                yield event

    @asynccontextmanager
    async def _get(
        self, http: aiohttp.ClientSession, access: KubernetesAccess, query: Mapping[str, str], *, read_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to a request for the service's slices. Raises _Gone, SourceFailed."""
        at = self._at
        try:
            async with http.get(
                f"{access.url}/apis/discovery.k8s.io/v1/namespaces/{at.namespace}/endpointslices",
                params={"labelSelector": f"kubernetes.io/service-name={at.service}", **query},
                headers=access.headers(),
                ssl=access.tls(),
                timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=read_s),
                read_bufsize=_MOST_LINE_BYTES,
            ) as reply:
                if reply.status == 410:
                    raise _Gone
                if reply.status != 200:
                    body = (await reply.content.read(500)).decode(errors="replace")
                    raise SourceFailed(f"the API answered {reply.status}: {body}")
                yield reply
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SourceFailed(f"{access.url}: {error or type(error).__name__}") from error

    def _all(self, slices: Mapping[str, Any]) -> Addresses:
        try:
            return _of_one_family([place for each in slices.values() for place in _places(each, self._at.port)])
        except (KeyError, TypeError, AttributeError) as error:
            raise SourceFailed(f"an EndpointSlice cannot be read: {error!r}") from error


async def _at_most(content: aiohttp.StreamReader) -> bytes:
    """All of a list. Raises SourceFailed if it is too long."""
    whole = bytearray()
    async for piece in content.iter_any():
        whole += piece
        if len(whole) > _MOST_LIST_BYTES:
            raise SourceFailed(f"the API's list is longer than {_MOST_LIST_BYTES} bytes")
    return bytes(whole)


async def _read(data: bytes) -> Any:
    """The JSON value in `data`, on a thread if it is large. Raises DecodeError."""
    return await asyncio.to_thread(read_json, data) if has_many_values(data) else decode_json(data)


def _applied(slices: dict[str, Any], event: Mapping[str, Any]) -> bool:
    """Apply `event` to `slices`; returns whether it changed them."""
    if event["type"] in {"ADDED", "MODIFIED"}:
        slices[event["object"]["metadata"]["name"]] = event["object"]
        return True
    if event["type"] == "DELETED":
        return slices.pop(event["object"]["metadata"]["name"], None) is not None
    return False


class _Place(NamedTuple):
    """One address of `owner`: the pod behind it, or the address itself if the slice names no pod."""

    owner: str
    address: str
    is_six: bool
    is_ready: bool


def _places(found: Mapping[str, Any], wanted: str) -> Iterator[_Place]:
    """The addresses in one EndpointSlice at the port with the name or number `wanted`."""
    ports = [port["port"] for port in found.get("ports") or () if wanted in {port.get("name"), str(port.get("port"))}]
    if not ports and not found.get("ports") and (port := digits(wanted, most=65535)):
        # a slice without ports means all of them
        ports = [port]
    is_six = found.get("addressType") == "IPv6"
    for end in found.get("endpoints") or ():
        # the addresses of one endpoint are interchangeable: consumers use the first
        if not end.get("addresses"):
            continue
        host, target = str(end["addresses"][0]), end.get("targetRef") or {}
        owner = target.get("uid") or target.get("name") or host
        # without a `ready` condition an endpoint counts as ready
        is_ready = (end.get("conditions") or {}).get("ready") is not False
        for port in ports:
            yield _Place(owner, f"[{host}]:{port}" if is_six else f"{host}:{port}", is_six, is_ready)


def _of_one_family(places: Sequence[_Place]) -> Addresses:
    """The ready addresses, one for each pod: a dual-stack service has a slice of each IP version, with every pod."""
    with_four = {place.owner for place in places if not place.is_six}
    ready = (place for place in places if place.is_ready)
    return frozenset(place.address for place in ready if not place.is_six or place.owner not in with_four)
