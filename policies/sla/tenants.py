"""The section `tenants`: who pays, with which keys, and whose caches are joined."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from policies.fields import Field, Section
from policies.nouns import Limits, Tenant
from policies.quantities import read_count, read_weight, read_yes
from policies.sla.secrets import Outside

TENANT_KEYS = ("keys", "anonymous", "weight", "models", "classes", "limits", "cache")
LIMIT_KEYS = ("concurrent",)
CACHE_KEYS = ("share_with",)


def read_tenants(
    field: Field | None, *, classes: Collection[str], outside: Outside
) -> tuple[dict[str, Tenant], Tenant | None]:
    """Tenants by name, and the one of requests without a key.

    Where the file has no tenants there is one, `local`, that needs no key.
    """
    fields = field.named_entries() if field else {}
    if not fields:
        local = Tenant("local", domain="local")
        return {"local": local}, local
    sections = {name: entry.section(TENANT_KEYS) for name, entry in fields.items()}
    domains = _domains(sections)
    tenants = {
        name: replace(_read_tenant(section, name, classes, outside), domain=domains[name])
        for name, section in sections.items()
    }
    _refuse_shared_keys(fields, tenants)
    return tenants, _anonymous(fields, sections, tenants)


def _read_tenant(section: Section, name: str, classes: Collection[str], outside: Outside) -> Tenant:
    keys = section.get("keys")
    hashes = [item.read(outside.key_hash) for item in keys.items()] if keys else []
    return Tenant(
        name,
        domain=name,
        key_hashes=frozenset(digest for digest in hashes if digest),
        weight=section.read("weight", read_weight, 1.0),
        models=frozenset(section.texts("models")),
        classes=frozenset(section.some_of("classes", classes, what="class")),
        limits=Limits(concurrent=section.section("limits", LIMIT_KEYS).read_any("concurrent", read_count)),
    )


def _domains(sections: Mapping[str, Section]) -> dict[str, str]:
    """Tenant -> cache domain: tenants joined by `share_with`, directly or through others, have the smallest name's."""
    group = {name: {name} for name in sections}
    for name, section in sections.items():
        for other in section.section("cache", CACHE_KEYS).some_of("share_with", sections, what="tenant"):
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
    fields: Mapping[str, Field], sections: Mapping[str, Section], tenants: Mapping[str, Tenant]
) -> Tenant | None:
    open_to_all = [name for name, section in sections.items() if section.read("anonymous", read_yes, False)]
    for name, field in fields.items():
        if name not in open_to_all and not sections[name].entries.get("keys"):
            field.complain("has no keys, so nobody can be this tenant (add keys, or anonymous: true)")
    for name in open_to_all[1:]:
        fields[name].complain(f"requests without a key belong to '{open_to_all[0]}' already")
    return tenants[open_to_all[0]] if open_to_all else None
