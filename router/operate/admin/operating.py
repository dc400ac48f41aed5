"""The admin port's calls for a running router: drain backends, change their weights, forget caches."""

from __future__ import annotations

from typing import Any

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.suggest import did_you_mean
from router.call.gateway import Gateway
from router.call.splits import Standing
from router.operate.admin.clearing import clear_cache, named_tenant
from router.operate.dashboard.routes import json_reply, read_json
from router.operate.dashboard.snapshot import mirror_row
from router.operate.operations import Operations
from router.protocols.http.prefixes import shown
from router.protocols.http.routes import Routes

_MOST_WEIGHT = 1000.0


def add_operating(routes: Routes, operations: Operations) -> None:
    """Add the calls for backends, prefixes, splits, mirrors and caches to `routes`."""
    gateway = operations.gateway

    async def change_backend(request: Request, backend: str) -> Response:
        name, wanted = _backend(backend, gateway), await read_json(request)
        draining, weight = _read_change(wanted)
        if draining is not None:
            gateway.cluster.drain(name, draining)
        if weight is not None:
            gateway.cluster.weigh(name, weight)
        view = next(backend for backend in gateway.cluster.view(gateway.clock()).backends if backend.name == name)
        return json_reply({"backend": name, "draining": view.draining, "weight": view.weight})

    async def clear(_: Request, tenant: str) -> Response:
        cleared = await clear_cache(named_tenant(tenant, gateway.config), gateway)
        return json_reply(cleared.shown())

    async def prefixes(_: Request) -> Response:
        return json_reply({"prefixes": [{"tenant": kept.tenant, **shown(kept, str)} for kept in gateway.prefixes.of()]})

    async def splits(_: Request) -> Response:
        return json_reply({"splits": [_shown_standing(each) for each in gateway.splits.standings()]})

    async def mirrors(_: Request) -> Response:
        return json_reply({"mirrors": [mirror_row(each) for each in gateway.mirrors.compared()]})

    async def restore(_: Request) -> Response:
        return json_reply({"restored": gateway.splits.restore()})

    # the name of a rank has a slash
    routes.add("PATCH", "/admin/backends/{name:path}", change_backend)
    routes.add("DELETE", "/admin/tenants/{tenant}/cache", clear)
    routes.add("GET", "/admin/prefixes", prefixes)
    routes.add("GET", "/admin/splits", splits)
    routes.add("POST", "/admin/splits/restore", restore)
    routes.add("GET", "/admin/mirrors", mirrors)


def _backend(name: str, gateway: Gateway) -> str:
    names = [backend.name for backend in gateway.cluster.view(gateway.clock()).backends]
    if name not in names:
        hint = did_you_mean(name, names) or f"known: {', '.join(names[:12])}"
        raise InvalidRequest(f"there is no backend '{name[:80]}'", hint=hint, param="name")
    return name


def _read_change(wanted: Any) -> tuple[bool | None, float | None]:
    """Whether to drain, and the weight; None for a field that was not sent. Raises InvalidRequest."""
    if unknown := sorted(wanted.keys() - {"draining", "weight"}):
        hint = did_you_mean(unknown[0], ("draining", "weight")) or "known: draining, weight"
        raise InvalidRequest(f"a backend has no '{unknown[0][:80]}' to change", hint=hint, param=unknown[0][:80])
    draining, weight = wanted.get("draining"), wanted.get("weight")
    if draining is not None and not isinstance(draining, bool):
        raise InvalidRequest("draining must be true or false", param="draining")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 < weight <= _MOST_WEIGHT):
        hint = "to stop its traffic, drain the backend"
        raise InvalidRequest(f"weight must be a number above 0 and at most {_MOST_WEIGHT:g}", hint=hint, param="weight")
    return draining, weight


def _shown_standing(standing: Standing) -> dict[str, Any]:
    tally = standing.tally
    counts = {"requests": tally.ended, "failed": tally.failed, "missed": tally.missed}
    lost = {} if standing.lost is None else {"lost_because": standing.lost}
    return {"rule": standing.rule, "pool": standing.pool, "share": standing.share, **counts, **lost}
