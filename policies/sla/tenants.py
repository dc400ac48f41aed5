"""The sections `tenants` and `organizations`: keys, limits, teams and shared caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from policies.nouns import (
    NO_LIMITS,
    NO_TENANT,
    USUAL_PINNED_TOKENS,
    USUAL_STORED_BYTES,
    USUAL_STORED_DOCUMENTS,
    FixedBudget,
    Limits,
    Organization,
    Team,
    Tenant,
)
from policies.quantities import (
    CURRENCY_UNITS,
    CostLimit,
    read_budget,
    read_bytes,
    read_count,
    read_date,
    read_reuse,
    read_tokens,
    read_weight,
    read_yes,
)
from policies.shapes import TEXT, Either, Key, Many, Named, Table
from policies.sla.fields import Field, Section
from policies.sla.secrets import API_KEY, Outside

_PERIODS = (
    ("hour", "an hour, UTC", "2 USD, or 2M in the units of `cost`"),
    ("day", "a day, UTC", "20 USD, or 50M in the units of `cost`"),
    ("week", "a week from Monday, UTC", "100 USD"),
    ("month", "a month, UTC", "400 USD"),
)
LIMIT_KEYS = {
    "requests_per_minute": Key(read_count, "requests that may begin in a minute"),
    "tokens_per_minute": Key(read_count, "tokens of prompts and answers in a minute: 6M"),
    "concurrent": Key(read_count, "requests that may run at once"),
    **{f"budget_per_{period}": Key(read_budget, f"cost in {a}: {like}") for period, a, like in _PERIODS},
    **{
        f"soft_budget_per_{period}": Key(read_budget, f"cost in {a} that warns and refuses nothing: {like}")
        for period, a, like in _PERIODS
    },
}
LIMIT_FIELDS = {key: key.replace("budget_", "cost_") for key in LIMIT_KEYS}

BUDGET = Table(
    {
        "cost": Key(
            read_budget, "cost of all requests of its days: 500 USD, or 2M in the units of `cost`", required=True
        ),
        "first_day": Key(read_date, "its first day, UTC: 2027-01-01; default: it counts from now on"),
        "last_day": Key(read_date, "its last day, UTC: 2027-03-31; default: it has no end"),
        "soft": Key(read_yes, "true: it warns and refuses nothing; default false"),
    }
)
ALL_LIMITS = {
    **LIMIT_KEYS,
    "budgets": Key(Named(BUDGET), "budgets of fixed periods, by name, such as those of projects"),
}

_MODELS = Named(Table(ALL_LIMITS), free=True)

LIMITS = Table(
    {
        **ALL_LIMITS,
        "pinned_tokens": Key(read_tokens, "tokens of pinned prefixes at a time, once for every backend; default 256k"),
        "documents": Key(read_tokens, "documents in document sets at a time; default 10k, 0 for none"),
        "document_bytes": Key(read_bytes, "bytes of their texts: 256MiB; default 64MiB"),
        "models": Key(_MODELS, "limits for one model, in addition to the tenant's own"),
    }
)

KEY = Table(
    {
        "key": Key(API_KEY, "sha256: and 64 hex digits, ${env:NAME} or ${file:path}", required=True),
        "limits": Key(Table(ALL_LIMITS), "limits for this key, in addition to the tenant's own"),
    }
)

KEYS = Key(
    Many(Either((API_KEY, KEY))),
    "API keys: sha256: and 64 hex digits, ${env:NAME} or ${file:path}, alone or as {key: ..., limits: ...}",
)

TEAM = Table(
    {
        "keys": KEYS,
        "limits": Key(
            Table({**ALL_LIMITS, "models": Key(_MODELS, "limits for one model, in addition to the team's own")}),
            "limits for this team, in addition to the tenant's own",
        ),
    }
)

TAG = Table({"limits": Key(Table(ALL_LIMITS), "limits for all requests with this tag, in addition to the others")})

END_USERS = Table(
    {
        "limits": Key(Table(ALL_LIMITS), "limits for each end user, in addition to the tenant's own"),
        "required": Key(read_yes, "true: requests that name no end user are refused; default false"),
    }
)

TENANT = Table(
    {
        "keys": KEYS,
        "teams": Key(Named(TEAM), "parts of the tenant with keys and limits of their own, by name"),
        "end_users": Key(END_USERS, "limits for each end user that a request names with `user`"),
        "tags": Key(Named(TAG), "tags that a request may have, by name, with limits for all that have one"),
        "organization": Key(TEXT, "the organization that the limits of `organizations` bind with it; default none"),
        "anonymous": Key(read_yes, "true: requests without a key belong to this tenant; at most one tenant"),
        "weight": Key(read_weight, "share among the tenants of one class; default 1"),
        "models": Key(Many(TEXT), "models that it may use; default all"),
        "classes": Key(Many(TEXT), "service classes that it may use; default all"),
        "limits": Key(LIMITS, "limits on its use; default none"),
        "cache": Key(
            Table({"share_with": Key(Many(TEXT), "tenants that share cached prefixes with it")}),
            "tenants that share cached prefixes with it; default none",
        ),
        "reuse": Key(
            read_reuse, "approximate KV of documents: chunks, off, or the share to compute again: 10%; default off"
        ),
    }
)
TENANTS = Named(TENANT)

ORGANIZATION = Table(
    {"limits": Key(Table(ALL_LIMITS), "limits for all its tenants together, in addition to their own")}
)
ORGANIZATIONS = Named(ORGANIZATION)


def read_organizations(field: Field | None, *, currency: str | None = None) -> dict[str, Organization]:
    """Organizations by name."""
    fields = field.named_entries() if field else {}
    found = {}
    for name, entry in fields.items():
        limits = _read_limits(entry.section(ORGANIZATION).section("limits"), currency)
        found[name] = Organization(name, limits)
        if limits == NO_LIMITS:
            entry.complain(f"has no limit (write one of {', '.join(ALL_LIMITS)} under `limits`)")
    return found


def read_tenants(
    field: Field | None,
    *,
    classes: Collection[str],
    outside: Outside,
    organizations: Mapping[str, Organization] = MappingProxyType({}),
    issues_keys: bool = False,
    currency: str | None = None,
) -> tuple[dict[str, Tenant], Tenant | None]:
    """Tenants by name, and the one of requests without a key.

    If the file has no tenants there is one, `local`, that needs no key. `issues_keys`: a tenant may get its first
    key at run time. `currency` is that of budgets; None: they are in units of cost.
    """
    fields = field.named_entries() if field else {}
    if not fields:
        local = Tenant("local", domain="local")
        return {"local": local}, local
    if NO_TENANT in fields:
        fields[NO_TENANT].complain(f"a tenant cannot be called '{NO_TENANT}': metrics count refused keys under it")
    sections = {name: entry.section(TENANT) for name, entry in fields.items()}
    domains = _domains(sections)
    tenants = {
        name: replace(
            _read_tenant(section, name, classes, outside, currency),
            domain=domains[name],
            organization=_organization(section, organizations),
        )
        for name, section in sections.items()
    }
    _check_organizations(sections, tenants)
    _refuse_shared_keys(fields, tenants)
    return tenants, _anonymous(fields, sections, tenants, issues_keys=issues_keys)


def _read_tenant(
    section: Section, name: str, classes: Collection[str], outside: Outside, currency: str | None
) -> Tenant:
    limits = section.section("limits")
    keys = _read_keys(section, outside, currency)
    of_teams = {}
    teams: dict[str, Team] = {}
    sections = {name: one.section(TEAM) for name, one in _named(section.get("teams")).items()}
    for team, entry in sections.items():
        own = _read_keys(entry, outside, currency)
        keys += own
        of_teams.update({digest: team for _, digest, _ in own})
        bounds = entry.section("limits")
        teams[team] = Team(team, _read_limits(bounds, currency), _read_model_limits(bounds, currency))
    users = section.section("end_users")
    tags = {name: one.section(TAG) for name, one in _named(section.get("tags")).items()}
    tenant = Tenant(
        name,
        domain=name,
        key_hashes=frozenset(digest for _, digest, _ in keys),
        weight=section.read("weight", 1.0),
        models=frozenset(section.texts("models")),
        classes=frozenset(section.some_of("classes", classes, what="class")),
        limits=_read_limits(limits, currency),
        model_limits=_read_model_limits(limits, currency),
        key_limits={digest: own for _, digest, own in keys if own is not None},
        teams=teams,
        team_by_key=of_teams,
        user_limits=_read_limits(users.section("limits"), currency),
        needs_user=users.read("required", False),
        tag_limits={name: _read_limits(one.section("limits"), currency) for name, one in tags.items()},
        pinned_tokens=limits.read("pinned_tokens", USUAL_PINNED_TOKENS),
        stored_documents=limits.read("documents", USUAL_STORED_DOCUMENTS),
        stored_bytes=limits.read("document_bytes", USUAL_STORED_BYTES),
        reuse_budget=section.read("reuse", None),
    )
    _check_model_limits(limits, tenant.model_limits, tenant)
    for team, entry in sections.items():
        bounds = entry.section("limits")
        _check_model_limits(bounds, teams[team].model_limits, tenant)
        _check_within(entry.get("limits"), teams[team].limits, tenant.limits, "the tenant's own")
    for name, one in tags.items():
        _check_within(one.get("limits"), tenant.tag_limits[name], tenant.limits, "the tenant's own")
    _check_within(users.get("limits"), tenant.user_limits, tenant.limits, "the tenant's own")
    _check_keys(keys, tenant)
    return tenant


def _teams_of(section: Section) -> list[Section]:
    return [team.section(TEAM) for team in _named(section.get("teams")).values()]


def _named(field: Field | None) -> Mapping[str, Field]:
    return field.named_entries() if field else {}


def _organization(section: Section, organizations: Mapping[str, Organization]) -> Organization | None:
    field = section.get("organization")
    name = None if field is None else field.one_of(organizations, what="organization")
    return None if name is None else organizations[name]


def _check_organizations(sections: Mapping[str, Section], tenants: Mapping[str, Tenant]) -> None:
    for name, tenant in tenants.items():
        if tenant.organization is not None:
            _check_within(sections[name].get("limits"), tenant.limits, tenant.organization.limits, "the organization's")


def _read_keys(section: Section, outside: Outside, currency: str | None) -> list[tuple[Field, str, Limits | None]]:
    """The place of each key, its hash, and its own limits; without keys that could not be resolved."""
    found = []
    for item in section.items("keys"):
        entry = item.section(KEY) if isinstance(item.node.value, dict) else None
        key = item if entry is None else entry.get("key")
        limits = None if entry is None or "limits" not in entry else _read_limits(entry.section("limits"), currency)
        if key is not None and (digest := key.read(outside.key_hash)) is not None:
            found.append((item, digest, limits))
    return found


def read_limit(key: str, text: str, currency: str | None) -> int:
    """The limit `key` that `text` gives, a budget in units. Raises ValueError with what is wrong."""
    return units_of(read_budget(text), currency) if "budget_" in key else read_count(text)


def _read_limits(section: Section, currency: str | None) -> Limits:
    """The limits here. A budget is in the `currency` of the file's prices, or in units if they have none."""
    found: dict[str, Any] = {}
    for key, name in LIMIT_FIELDS.items():
        value = section.read_any(key)
        if isinstance(value, CostLimit):
            try:
                value = units_of(value, currency)
            except ValueError as error:
                section.entries[key].complain(str(error))
                value = None
        found[name] = value
    limits = Limits(**found, fixed=_read_fixed(section, currency))
    for key, name in LIMIT_FIELDS.items():
        soft, hard = found[name], found.get(name.removeprefix("soft_"))
        if name.startswith("soft_") and soft is not None and hard is not None and soft >= hard:
            section.entries[key].complain(f"must be below {key.removeprefix('soft_')}, which refuses what is above it")
    return replace(limits, currency=currency) if limits != NO_LIMITS else limits


_DAY_S = 86_400


def _read_fixed(section: Section, currency: str | None) -> tuple[FixedBudget, ...]:
    """The budgets of fixed periods here, by name."""
    found = []
    for name, entry in _named(section.get("budgets")).items():
        part = entry.section(BUDGET)
        cost, soft = part.read_any("cost"), part.read("soft", False)
        if cost is None:
            continue
        try:
            found.append(
                fixed_budget(name, cost, part.read_any("first_day"), part.read_any("last_day"), soft, currency)
            )
        except ValueError as error:
            entry.complain(str(error))
    return tuple(found)


def fixed_budget(
    name: str, cost: CostLimit, first: float | None, last: float | None, is_soft: bool, currency: str | None
) -> FixedBudget:
    """The budget `name` from the day that begins at the Unix time `first` to that of `last`. Raises ValueError."""
    first_day = 0 if first is None else int(first // _DAY_S)
    last_day = None if last is None else int(last // _DAY_S)
    if last_day is not None and last_day < max(first_day, _FIRST_LAST_DAY):
        raise ValueError("ends before it begins (the last day belongs to it)")
    return FixedBudget(name, units_of(cost, currency), first_day, last_day, is_soft)


_FIRST_LAST_DAY = 365
"""An earlier day, in 1970, is a mistake."""


def shown_limit(name: str, limits: Limits) -> str:
    """The limit of `limits` that the field `name` has, as people read it."""
    most = getattr(limits, name)
    if limits.currency is None or "cost_" not in name:
        return f"{most:,}"
    return shown_units(most, limits.currency)


def shown_units(units: int, currency: str) -> str:
    """Units of cost as an amount of `currency`."""
    return f"{Decimal(units) / CURRENCY_UNITS:,f} {currency}"


def units_of(budget: CostLimit, currency: str | None) -> int:
    """The units of `budget`. Raises ValueError if it was not written in `currency`, that of the file's prices."""
    if budget.currency == currency:
        return budget.units
    if currency is None:
        raise ValueError(
            f"is in {budget.currency}, and prices are in units (write cost: {{currency: {budget.currency}}})"
        )
    raise ValueError(f"must be in {currency}, as the prices are (write it as 20 {currency})")


def _read_model_limits(section: Section, currency: str | None) -> dict[str, Limits]:
    models = section.get("models")
    entries = models.entries() if models else {}
    return {model: _read_limits(entry.section(Table(ALL_LIMITS)), currency) for model, entry in entries.items()}


def _check_model_limits(section: Section, limits_by_model: Mapping[str, Limits], tenant: Tenant) -> None:
    for model, limits in limits_by_model.items():
        field = section.entries["models"].find(model)
        if tenant.models and model not in tenant.models:
            field.complain(f"the tenant may not use this model (it may use {', '.join(sorted(tenant.models))})")
        if limits == NO_LIMITS:
            field.complain(f"has no limit (write one of {', '.join(ALL_LIMITS)})")
        _check_within(field, limits, tenant.limits, "the tenant's own")


def _check_keys(keys: Sequence[tuple[Field, str, Limits | None]], tenant: Tenant) -> None:
    digests = [digest for _, digest, _ in keys]
    for field, digest, limits in keys:
        if digests.count(digest) > 1 and (limits is not None or tenant.teams):
            field.complain("the same key is here twice (remove one, so that its limits are clear)")
        if limits is None:
            continue
        if limits == NO_LIMITS:
            field.find("limits").complain(f"has no limit (write one of {', '.join(ALL_LIMITS)})")
        _check_within(field.find("limits"), limits, tenant.limits, "the tenant's own")


def _check_within(field: Field | None, part: Limits, whole: Limits, of: str) -> None:
    if field is None:
        return
    for key, name in LIMIT_FIELDS.items():
        if name.startswith("soft_"):
            continue
        most, wanted = getattr(whole, name), getattr(part, name)
        if most is not None and wanted is not None and wanted > most:
            field.find(key).complain(f"is above {of} {shown_limit(name, whole)}, which is reached first (lower it)")


def _domains(sections: Mapping[str, Section]) -> dict[str, str]:
    """Tenant -> cache domain: tenants joined by `share_with`, directly or through others, have the smallest name's."""
    group = {name: {name} for name in sections}
    for name, section in sections.items():
        for other in section.section("cache").some_of("share_with", sections, what="tenant"):
            union = group[name] | group[other]
            group.update(dict.fromkeys(union, union))
    return {name: min(members) for name, members in group.items()}


def _refuse_shared_keys(fields: Mapping[str, Field], tenants: Mapping[str, Tenant]) -> None:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for digest in sorted(tenant.key_hashes):
            first = owners.setdefault(digest, name)
            if first != name:
                fields[name].complain(f"has a key that '{first}' has too; a key belongs to one tenant")


def _anonymous(
    fields: Mapping[str, Field],
    sections: Mapping[str, Section],
    tenants: Mapping[str, Tenant],
    *,
    issues_keys: bool,
) -> Tenant | None:
    open_to_all = [name for name, section in sections.items() if section.read("anonymous", False)]
    for name, field in fields.items():
        has_keys = any("keys" in one.entries for one in (sections[name], *_teams_of(sections[name])))
        if not issues_keys and name not in open_to_all and not has_keys:
            hint = "add keys, or anonymous: true, or server.state to issue them"
            field.complain(f"has no keys, so no request can belong to it ({hint})")
    for name in open_to_all[1:]:
        fields[name].complain(f"requests without a key belong to '{open_to_all[0]}' already")
    return tenants[open_to_all[0]] if open_to_all else None
