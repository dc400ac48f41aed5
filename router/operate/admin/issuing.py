"""The admin port's calls for tenants' keys: issue, list, limit, rotate, revoke."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import date, timedelta
from typing import Any

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.keys import IssuedKey, id_of
from policies.nouns import FixedBudget, Limits, Tenant
from policies.quantities import read_budget, read_date, read_seconds, read_yes
from policies.shapes import NAME_PATTERN
from policies.sla.config import Config
from policies.sla.tenants import ALL_LIMITS, BUDGET, LIMIT_FIELDS, fixed_budget, read_limit, shown_limit, shown_units
from policies.suggest import did_you_mean
from router.operate.dashboard.routes import json_reply, note, read_json
from router.protocols.http.routes import Routes
from router.shared.keys.ring import KeyRing, NewKey

_KEYS = "/admin/tenants/{tenant}/keys"
_USUAL_OVERLAP = "24h"
_MOST_S = 3650 * 86400.0
_MOST_NAME = 64
_NOT_CACHED = {"Cache-Control": "no-store"}


def add_keys(routes: Routes, keys: KeyRing, in_force: Callable[[], Config]) -> None:
    """Add the calls for `keys` of the tenants of the file `in_force` to `routes`."""

    async def issue(request: Request, name_of_tenant: str) -> Response:
        tenant, body = _tenant(name_of_tenant, in_force()), await _body(request, ("name", "expires", "limits", "team"))
        name, lives_s, limits = (
            _name(body),
            _seconds(body, "expires"),
            _limits(body, tenant, in_force().prices.currency),
        )
        team = _team(body, tenant)
        made = await keys.issue(tenant.name, name=name, lives_s=lives_s, limits=limits, team=team)
        note(request, made=made.kept.id)
        return json_reply(_new_key_body(made, keys), status=201, headers=_NOT_CACHED)

    async def show(_: Request, name_of_tenant: str) -> Response:
        tenant = _tenant(name_of_tenant, in_force())
        issued = [_shown(key, keys) for key in keys.of(tenant.name)]
        written = [
            {
                "id": id_of(digest),
                "team": tenant.team_by_key.get(digest),
                "limits": _set_limits(tenant.key_limits.get(digest)),
                "from": "file",
            }
            for digest in sorted(tenant.key_hashes)
        ]
        return json_reply({"tenant": tenant.name, "keys": [*issued, *written]})

    async def rotate(request: Request, name_of_tenant: str, id: str) -> Response:  # noqa: A002 - it is the key's id
        tenant, body = _tenant(name_of_tenant, in_force()), await _body(request, ("overlap", "expires"))
        old = _issued(id, tenant)
        overlap_s, lives_s = _seconds({"overlap": _USUAL_OVERLAP, **body}, "overlap"), _seconds(body, "expires")
        made = await keys.rotate(tenant.name, old, overlap_s=overlap_s or 0.0, lives_s=lives_s)
        note(request, made=made.kept.id)
        replaced = next((_shown(key, keys) for key in keys.of(tenant.name) if key.id == old), None)
        return json_reply({**_new_key_body(made, keys), "replaces": replaced}, status=201, headers=_NOT_CACHED)

    async def limit(request: Request, name_of_tenant: str, id: str) -> Response:  # noqa: A002
        tenant, body = _tenant(name_of_tenant, in_force()), await _body(request, ("limits",))
        if "limits" not in body:
            raise InvalidRequest(
                "the new limits are missing", hint='send {"limits": {...}}; {} is none', param="limits"
            )
        changed = await keys.limit(tenant.name, _issued(id, tenant), _limits(body, tenant, in_force().prices.currency))
        return json_reply(_shown(changed, keys))

    async def revoke(_: Request, name_of_tenant: str, id: str) -> Response:  # noqa: A002
        tenant = _tenant(name_of_tenant, in_force())
        gone = _issued(id, tenant)
        await keys.revoke(tenant.name, gone)
        return json_reply({"id": gone, "revoked": True})

    routes.add("POST", _KEYS, issue)
    routes.add("GET", _KEYS, show)
    routes.add("POST", f"{_KEYS}/{{id}}/rotate", rotate)
    routes.add("PATCH", f"{_KEYS}/{{id}}", limit)
    routes.add("DELETE", f"{_KEYS}/{{id}}", revoke)


def _tenant(name: str, config: Config) -> Tenant:
    tenants = config.tenants
    if name not in tenants:
        hint = did_you_mean(name, tenants) or f"known: {', '.join(list(tenants)[:12])}"
        raise InvalidRequest(f"there is no tenant '{name[:80]}'", hint=hint, param="tenant")
    return tenants[name]


def _issued(asked: str, tenant: Tenant) -> str:
    """The key id `asked`. Raises InvalidRequest if the key comes from the SLA file."""
    if any(id_of(digest) == asked for digest in tenant.key_hashes):
        hint = f"edit tenants.{tenant.name}.keys there; the change takes effect within two seconds"
        raise InvalidRequest(f"the key {asked} comes from the SLA file", hint=hint, param="id")
    return asked


async def _body(request: Request, known: Collection[str]) -> Mapping[str, Any]:
    """The JSON object in the request's body, {} without one. Raises InvalidRequest for unknown fields."""
    body = await read_json(request, may_be_empty=True)
    if unknown := sorted(body.keys() - set(known)):
        hint = did_you_mean(unknown[0], known) or f"known: {', '.join(known)}"
        raise InvalidRequest(f"unknown field '{unknown[0][:80]}' for a key", hint=hint, param=unknown[0][:80])
    return body


def _name(body: Mapping[str, Any]) -> str | None:
    name = body.get("name")
    if name is None:
        return None
    if not (isinstance(name, str) and name.strip() and name.isprintable() and len(name) <= _MOST_NAME):
        raise InvalidRequest(f"name must be text of at most {_MOST_NAME} printable characters", param="name")
    return name.strip()


def _team(body: Mapping[str, Any], tenant: Tenant) -> str | None:
    team = body.get("team")
    if team is None or (isinstance(team, str) and team in tenant.teams):
        return team
    hint = did_you_mean(str(team), tenant.teams) or f"known: {', '.join(list(tenant.teams)[:12]) or 'none'}"
    raise InvalidRequest(f"'{tenant.name}' has no team '{str(team)[:80]}'", hint=hint, param="team")


def _seconds(body: Mapping[str, Any], param: str) -> float | None:
    wanted = body.get(param)
    if wanted is None:
        return None
    try:
        seconds = read_seconds(wanted if isinstance(wanted, str) else str(wanted))
        if seconds > _MOST_S:
            raise ValueError("must be at most ten years")
    except ValueError as error:
        hint = "write how long from now, such as 24h or 90d"
        raise InvalidRequest(f"{param} {error}", hint=hint, param=param) from error
    return seconds


def _limits(body: Mapping[str, Any], tenant: Tenant, currency: str | None) -> Limits | None:
    """The new key's own limits; None without any."""
    limits = body.get("limits") or {}
    if not isinstance(limits, Mapping):
        raise InvalidRequest("limits must be an object", hint=f"known: {', '.join(ALL_LIMITS)}", param="limits")
    found: dict[str, Any] = {}
    for key, wanted in limits.items():
        if key == "budgets":
            found["fixed"] = _fixed(wanted, currency)
            continue
        if key not in LIMIT_FIELDS:
            hint = did_you_mean(key, ALL_LIMITS) or f"known: {', '.join(ALL_LIMITS)}"
            raise InvalidRequest(f"there is no limit '{key[:80]}'", hint=hint, param=f"limits.{key[:80]}")
        own = getattr(tenant.limits, LIMIT_FIELDS[key])
        try:
            if isinstance(wanted, bool):
                raise ValueError("must be a whole number above zero")
            most = read_limit(key, wanted if isinstance(wanted, str) else str(wanted), currency)
            found[LIMIT_FIELDS[key]] = most
            if own is not None and most > own and not key.startswith("soft_"):
                raise ValueError(
                    f"is above the tenant's own {shown_limit(LIMIT_FIELDS[key], tenant.limits)}, which holds first"
                )
        except ValueError as error:
            raise InvalidRequest(
                f"limits.{key} {error}", hint="write a number like 60 or 6M", param=f"limits.{key}"
            ) from error
    return Limits(**found, currency=currency) if found else None


def _fixed(wanted: Any, currency: str | None) -> tuple[FixedBudget, ...]:
    """The budgets in `limits.budgets` of a new key, in the form of the SLA file. Raises InvalidRequest."""
    where = "limits.budgets"
    if not isinstance(wanted, Mapping):
        raise InvalidRequest(f"{where} must be an object", hint='such as {"launch": {"cost": "500 USD"}}', param=where)
    found = []
    for name, given in wanted.items():
        param = f"{where}.{name[:64]}"
        if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
            raise InvalidRequest(f"{param} has no name of letters, digits, '.', '_' and '-'", param=where)
        if not isinstance(given, Mapping) or "cost" not in given:
            raise InvalidRequest(
                f"{param} must be an object with a cost", hint='such as {"cost": "500 USD"}', param=param
            )
        if unknown := sorted(given.keys() - BUDGET.keys.keys()):
            hint = did_you_mean(unknown[0], BUDGET.keys) or f"known: {', '.join(BUDGET.keys)}"
            raise InvalidRequest(f"{param} has no '{unknown[0][:64]}'", hint=hint, param=param)
        try:
            cost = read_budget(str(given["cost"]))
            first, last = (read_date(str(given[day])) if day in given else None for day in ("first_day", "last_day"))
            is_soft = read_yes(str(given.get("soft", False)))
            found.append(fixed_budget(name, cost, first, last, is_soft, currency))
        except ValueError as error:
            raise InvalidRequest(f"{param} {error}", hint='write {"cost": "500 USD"}', param=param) from error
    return tuple(found)


def _set_limits(limits: Limits | None) -> dict[str, Any]:
    """The limits that are set, by their names in the SLA file: numbers, or texts such as 20 USD."""
    found: dict[str, Any] = {}
    for key, name in LIMIT_FIELDS.items():
        if limits is not None and (most := getattr(limits, name)) is not None:
            found[key] = most if limits.currency is None or "cost_" not in name else shown_limit(name, limits)
    if limits is not None and limits.fixed:
        found["budgets"] = {budget.name: _shown_fixed(budget, limits.currency) for budget in limits.fixed}
    return found


def _shown_fixed(budget: FixedBudget, currency: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"cost": budget.cost if currency is None else shown_units(budget.cost, currency)}
    if budget.first_day:
        found["first_day"] = _shown_day(budget.first_day)
    if budget.last_day is not None:
        found["last_day"] = _shown_day(budget.last_day)
    return {**found, "soft": True} if budget.is_soft else found


def _shown_day(day: int) -> str:
    return str(date(1970, 1, 1) + timedelta(days=day))


def _new_key_body(made: NewKey, keys: KeyRing) -> dict[str, Any]:
    """The reply to a new key: all of it, with the key itself. No later reply has the key."""
    return {"key": made.text, "tenant": made.kept.tenant, **_shown(made.kept, keys)}


def _shown(key: IssuedKey, keys: KeyRing) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "team": key.team,
        "created": key.created,
        "expires": key.expires,
        "expired": key.has_expired(keys.now()),
        "last_used": keys.used(key.sha256),
        "replaced_by": key.replaced_by,
        "limits": _set_limits(key.limits),
        "from": "api",
    }
