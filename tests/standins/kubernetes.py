"""A stand-in for the Kubernetes API, as far as EndpointSlices of one service go: list, and watch in JSON lines.

Written after the API's own pages: https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


def a_slice(
    name: str, *addresses: str, port: int | None = 8000, kind: str = "IPv4", **conditions: bool | None
) -> dict[str, Any]:
    """An EndpointSlice with one port called `http`, or without ports; `conditions` are those of all endpoints."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "llm"}},
        "addressType": kind,
        "endpoints": [{"addresses": [address], "conditions": conditions} for address in addresses],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}] if port else None,
    }


@dataclass(eq=False)
class KubernetesApi:
    """Serves `slices`. Tests change them by `put` and `delete`, which every watch gets.

    A watch from a version before `oldest` is gone. `token` is what must be sent. `broken` is answered instead.
    """

    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    token: str | None = None
    version: int = 100
    oldest: int = 0
    broken: int | None = None
    lists: int = 0
    watches: list[int] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    _history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, resource: dict[str, Any]) -> None:
        name = resource["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = resource
        self.tell(kind, resource)

    def delete(self, name: str) -> None:
        self.tell("DELETED", self.slices.pop(name))

    def tell(self, kind: str, resource: dict[str, Any]) -> None:
        """Let all watches hear this, as the next version."""
        self.version += 1
        metadata = {**resource.get("metadata", {}), "resourceVersion": str(self.version)}
        self._history.append((self.version, {"type": kind, "object": {**resource, "metadata": metadata}}))
        self._wake()

    def say(self, event: dict[str, Any]) -> None:
        """Let all watches hear exactly this."""
        self._history.append((self.version, event))
        self._wake()

    def end_watches(self) -> None:
        """End each watch well, as the API does after its time."""
        self.say({})

    async def watched(self, times: int) -> None:
        """Return when so many watches have begun."""
        while len(self.watches) < times:  # noqa: ASYNC110 - a socket announces nothing
            await asyncio.sleep(0.005)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if self.broken is not None:
            return web.json_response({"kind": "Status", "code": self.broken}, status=self.broken)
        if "watch" in request.query:
            return await self._watch(request, int(request.query["resourceVersion"]))
        self.lists += 1
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
        )

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        self.watches.append(version)
        if version < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            await reply.write(json.dumps(gone).encode() + b"\n")
            return reply
        at = sum(1 for before, _ in self._history if before <= version)
        while True:
            changed = self._changed
            for _, event in self._history[at:]:
                at += 1
                if not event:
                    return reply
                line = json.dumps(event).encode() + b"\n"
                # lines come in whatever pieces the network makes of them
                for half in (line[: len(line) // 2], line[len(line) // 2 :]):
                    await reply.write(half)
            await changed.wait()


@asynccontextmanager
async def a_kubernetes_api(*slices: dict[str, Any], **what: Any) -> AsyncIterator[KubernetesApi]:
    """One that listens on a port of 127.0.0.1."""
    api = KubernetesApi({each["metadata"]["name"]: each for each in slices}, **what)
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", api.handle)
    server = TestServer(app)
    await server.start_server(access_log=None)
    api.url = str(server.make_url("")).rstrip("/")
    try:
        yield api
    finally:
        await server.close()
