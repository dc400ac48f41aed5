"""Where backends announce themselves, at the operators' port: our shards, and LMDeploy's servers as to its own proxy.

Source: LMDeploy's proxy (lmdeploy/serve/proxy/proxy.py): POST /nodes/add, POST /nodes/remove, GET /nodes/status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from policies.config import AT_HOST_AND_PORT, PoolSpec
from policies.errors import InvalidRequest
from policies.sla.pools import read_url
from policies.sla.server import read_address
from policies.suggest import did_you_mean
from router.gateway import Gateway

T = TypeVar("T")

LONGEST_TTL_S = 3600.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Announcement(msgspec.Struct):
    """A backend of `pool` is at `address`, and says so again within `ttl_s`."""

    pool: str
    address: str
    ttl_s: float = 30.0


class NodeStatus(msgspec.Struct):
    """What LMDeploy says of a server; the rest of it is not needed here."""

    models: list[str] | None = None


class Node(msgspec.Struct):
    """A server of LMDeploy."""

    url: str
    status: NodeStatus | None = None


def announcements(gateway: Gateway) -> Sequence[web.RouteDef]:
    """The routes, for an application that lets in only who may."""
    return (
        web.post("/backends/register", _registering(gateway)),
        web.post("/backends/unregister", _unregistering(gateway)),
        web.get("/backends/registered", _registered(gateway)),
        web.post("/nodes/add", _adding(gateway)),
        web.post("/nodes/remove", _removing(gateway)),
        web.get("/nodes/status", _status(gateway)),
    )


def _registering(gateway: Gateway) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        said = await _read(request, Announcement)
        if not 0 < said.ttl_s <= LONGEST_TTL_S:
            raise InvalidRequest(f"ttl_s is {said.ttl_s:g}", hint="more than 0, at most 3600", param="ttl_s")
        pool = _pool(gateway, said.pool)
        gateway.finding.registries[pool.name].register(_address(pool, said.address), ttl_s=said.ttl_s)
        return _json({"ttl_s": said.ttl_s})

    return handle


def _unregistering(gateway: Gateway) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        said = await _read(request, Announcement)
        pool = _pool(gateway, said.pool)
        known = gateway.finding.registries[pool.name].unregister(_address(pool, said.address))
        return _json({"known": known})

    return handle


def _registered(gateway: Gateway) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return _json({pool: registry.known() for pool, registry in gateway.finding.registries.items()})

    return handle


def _adding(gateway: Gateway) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        node = await _read(request, Node)
        pool = _lmdeploy_pool(gateway, (node.status and node.status.models) or ())
        gateway.finding.registries[pool.name].register(_address(pool, node.url))
        return _json("Added successfully")

    return handle


def _removing(gateway: Gateway) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        # older servers say it in the query
        url = request.query.get("node_url") or (await _read(request, Node)).url
        for pool in _lmdeploy_pools(gateway):
            gateway.finding.registries[pool.name].unregister(_address(pool, url))
        return _json("Deleted successfully")

    return handle


def _status(gateway: Gateway) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        models = {
            pool.name: sorted({*pool.models.values(), *filter(None, [pool.model])}) for pool in _lmdeploy_pools(gateway)
        }
        return _json(
            {
                url: {"models": models[name], "unfinished": 0, "latency": [], "speed": None}
                for name in models
                for url in gateway.finding.registries[name].known()
            }
        )

    return handle


def _pool(gateway: Gateway, name: str) -> PoolSpec:
    registries = gateway.finding.registries
    if name not in registries:
        hint = did_you_mean(name, registries) or "a pool of the file with `register: true`"
        raise InvalidRequest(f"backends cannot announce themselves to '{name[:80]}'", hint=hint, param="pool")
    return gateway.config.pools[name]


def _lmdeploy_pools(gateway: Gateway) -> list[PoolSpec]:
    pools = (gateway.config.pools[name] for name in gateway.finding.registries)
    return [pool for pool in pools if pool.kind == "lmdeploy"]


def _lmdeploy_pool(gateway: Gateway, models: Sequence[str]) -> PoolSpec:
    """The pool that asks for one of `models`; where one pool is all there is, that one. Raises InvalidRequest."""
    pools = _lmdeploy_pools(gateway)
    fitting = [pool for pool in pools if {*pool.models.values(), pool.model} & set(models)]
    chosen = fitting[0] if fitting else pools[0] if len(pools) == 1 else None
    if chosen is None:
        hint = "write a pool with kind: lmdeploy, register: true and this model"
        raise InvalidRequest(f"no pool takes a server of {', '.join(models)[:200] or 'no model'}", hint=hint)
    return chosen


def _address(pool: PoolSpec, text: str) -> str:
    try:
        return (read_address if pool.kind in AT_HOST_AND_PORT else read_url)(text)
    except ValueError as error:
        raise InvalidRequest(f"the address {error}", param="address") from error


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body cannot be understood: {error}") from error


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
