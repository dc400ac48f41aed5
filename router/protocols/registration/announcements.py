"""Calls of the admin port for backends that announce themselves: our shards, and LMDeploy's servers.

Source: LMDeploy's proxy (lmdeploy/serve/proxy/proxy.py): POST /nodes/add, POST /nodes/remove, GET /nodes/status.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from backends.nesting import decode_json
from http1.request import Handler, Request, Response
from policies.errors import InvalidRequest
from policies.sla.pools import PoolSpec
from policies.suggest import did_you_mean
from router.fleet.pools import PoolsInForce
from router.protocols.http.body import read_small_body
from router.protocols.http.routes import Routes
from router.protocols.registration.announced import address_in, pool_for, pools_of_kind

T = TypeVar("T")

LONGEST_TTL_S = 3600.0


class Announcement(msgspec.Struct):
    """A backend of `pool` is at `address`, and renews this within `ttl_s`."""

    pool: str
    address: str
    ttl_s: float = 30.0


class NodeStatus(msgspec.Struct):
    """The used part of LMDeploy's status of a server."""

    models: list[str] | None = None


class Node(msgspec.Struct):
    """A server of LMDeploy."""

    url: str
    status: NodeStatus | None = None


def add_announcements(routes: Routes, fleet: PoolsInForce) -> None:
    """Add the calls to `routes` of a port that checks keys."""
    routes.add("POST", "/backends/register", _registering(fleet))
    routes.add("POST", "/backends/unregister", _unregistering(fleet))
    routes.add("GET", "/backends/registered", _registered(fleet))
    routes.add("POST", "/nodes/add", _adding(fleet))
    routes.add("POST", "/nodes/remove", _removing(fleet))
    routes.add("GET", "/nodes/status", _status(fleet))


def _registering(fleet: PoolsInForce) -> Handler:
    async def handle(request: Request) -> Response:
        announcement = await _read(request, Announcement)
        if not 0 < announcement.ttl_s <= LONGEST_TTL_S:
            raise InvalidRequest(f"ttl_s is {announcement.ttl_s:g}", hint="more than 0, at most 3600", param="ttl_s")
        pool = _pool(fleet, announcement.pool)
        fleet.registries[pool.name].register(address_in(pool, announcement.address), ttl_s=announcement.ttl_s)
        return _json({"ttl_s": announcement.ttl_s})

    return handle


def _unregistering(fleet: PoolsInForce) -> Handler:
    async def handle(request: Request) -> Response:
        announcement = await _read(request, Announcement)
        pool = _pool(fleet, announcement.pool)
        known = fleet.registries[pool.name].unregister(address_in(pool, announcement.address))
        return _json({"known": known})

    return handle


def _registered(fleet: PoolsInForce) -> Handler:
    async def handle(_: Request) -> Response:
        return _json({pool: registry.known() for pool, registry in fleet.registries.items()})

    return handle


def _adding(fleet: PoolsInForce) -> Handler:
    async def handle(request: Request) -> Response:
        node = await _read(request, Node)
        pool = pool_for(fleet, "lmdeploy", (node.status and node.status.models) or ())
        fleet.registries[pool.name].register(address_in(pool, node.url))
        return _json("Added successfully")

    return handle


def _removing(fleet: PoolsInForce) -> Handler:
    async def handle(request: Request) -> Response:
        # older servers send it in the query
        url = dict(parse_qsl(request.query)).get("node_url") or (await _read(request, Node)).url
        for pool in pools_of_kind(fleet, "lmdeploy"):
            fleet.registries[pool.name].unregister(address_in(pool, url))
        return _json("Deleted successfully")

    return handle


def _status(fleet: PoolsInForce) -> Handler:
    async def handle(_: Request) -> Response:
        models = {
            pool.name: sorted({*pool.models.values(), *filter(None, [pool.model])})
            for pool in pools_of_kind(fleet, "lmdeploy")
        }
        return _json(
            {
                url: {"models": models[name], "unfinished": 0, "latency": [], "speed": None}
                for name in models
                for url in fleet.registries[name].known()
            }
        )

    return handle


def _pool(fleet: PoolsInForce, name: str) -> PoolSpec:
    registries = fleet.registries
    if name not in registries:
        hint = did_you_mean(name, registries) or "a pool of the file with `register: true`"
        raise InvalidRequest(f"backends cannot announce themselves to '{name[:80]}'", hint=hint, param="pool")
    return fleet.announced[name]


async def _read(request: Request, kind: type[T]) -> T:
    try:
        return decode_json(await read_small_body(request), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error


def _json(body: Any) -> Response:
    return Response(200, msgspec.json.encode(body), {"Content-Type": "application/json"})
