"""Parses the SLA file's text into a Config. `docs/sla.md` is the reference of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from policies.catalogue import Catalogue, builtin_catalogue
from policies.errors import ConfigError
from policies.shapes import Key, Table
from policies.sla.alerts import ALERTS, read_alerts
from policies.sla.aliases import ALIASES, read_aliases
from policies.sla.audit import AUDIT, read_audit
from policies.sla.batches import BATCHES, read_batches
from policies.sla.classes import CLASSES, read_classes
from policies.sla.config import Config
from policies.sla.cost import COST, read_cost
from policies.sla.fields import Field, Problems, Section
from policies.sla.identity import IDENTITY, Assignable, read_identity
from policies.sla.on_miss import ON_MISS, read_on_miss
from policies.sla.policies import policies_shape, read_policies
from policies.sla.pools import BUNDLED, pools_shape, read_pools
from policies.sla.proofs import prove
from policies.sla.rules import RULES, Names, read_rules
from policies.sla.secrets import Outside
from policies.sla.server import (
    QUEUE,
    SERVER,
    STATE_OFF,
    USUAL_AGEING_S,
    USUAL_OUTAGE_S,
    read_server,
    require_guarded,
)
from policies.sla.store import STORE, read_store
from policies.sla.tenants import ORGANIZATIONS, TENANTS, read_organizations, read_tenants
from policies.sla.usage import USAGE, read_usage
from policies.sla.yaml_positions import read_yaml


@dataclass(frozen=True, slots=True)
class Parsed:
    """A valid file: its Config; its doubts and the values that were not checked, as `file:line: path: sentence`."""

    config: Config
    doubts: tuple[str, ...]
    unchecked: tuple[str, ...] = ()


def parse(
    text: str,
    *,
    source: str = "sla.yaml",
    environment: Mapping[str, str] | None = None,
    read_file: Callable[[str], str] | None = None,
    catalogue: Catalogue | None = None,
) -> Config:
    """The Config that `text` describes; `source` is its name in messages.

    `environment` and `read_file` resolve `${env:NAME}` and `${file:path}`. Raises ConfigError, and no other error, with
    all mistakes in `problems`, each as `file:line: path: sentence`.
    """
    outside = Outside(environment or {}, read_file)
    return examine(text, source=source, outside=outside, catalogue=catalogue).config


def examine(text: str, *, source: str, outside: Outside, catalogue: Catalogue | None = None) -> Parsed:
    """The result of `parse`, with its doubts. Raises as `parse` does."""
    root, found = read_yaml(text)
    problems = Problems(source, found)
    # if the YAML itself is invalid, there is nothing left to examine
    field = Field(root, "", problems)
    config = _read(field, outside, catalogue or builtin_catalogue())
    if not problems.lines():
        prove(field, config)
    if lines := problems.lines():
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise ConfigError(f"{source} has {count}:", problems=lines)
    version = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Parsed(replace(config, version=version), problems.doubts(), problems.unchecked())


def default_config(*, local: int = 2, model: str = BUNDLED) -> Config:
    """The Config without a file: `local` shards with `model`, one class, and one tenant that needs no key."""
    config = parse("")
    own = replace(config.pools["own"], local=local, model=model)
    return replace(config, pools={"own": own})


def file_table(catalogue: Catalogue) -> Table:
    """The whole file: its sections, in the order in which they are written and explained."""
    return Table(
        {
            "classes": Key(CLASSES, "service classes by name; the first is served first"),
            "tenants": Key(TENANTS, "tenants by name, with their keys, limits and shared caches"),
            "organizations": Key(ORGANIZATIONS, "limits that several tenants share, by the organization's name"),
            "identity": Key(IDENTITY, "issuers of tokens, and what their tokens give; default: keys alone"),
            "cost": Key(COST, "what a token costs, in the units of the tenants' budgets"),
            "pools": Key(pools_shape(catalogue.kinds), "backends of one kind that serve one model, by name"),
            "aliases": Key(ALIASES, "names that stand for models, with changes of the requests that use them"),
            "rules": Key(RULES, "class, pools and policy of a request: the first rule that matches wins"),
            "on_miss": Key(ON_MISS, "by class, the steps if its target cannot be met or no backend is well"),
            "policies": Key(policies_shape(catalogue), "policies that choose a backend, by name"),
            "queue": Key(QUEUE, "how requests wait in the router"),
            "store": Key(STORE, "the store that several routers share; without it they share nothing"),
            "usage": Key(USAGE, "where what tenants used is kept; default in the state folder"),
            "batches": Key(BATCHES, "batches of requests that run in spare capacity; default in the state folder"),
            "alerts": Key(ALERTS, "where operators are told of budgets that are near their end; default nowhere"),
            "audit": Key(
                AUDIT, "where it is recorded what operators do, and refused logins; default in the state folder"
            ),
            "server": Key(SERVER, "the router's addresses and limits"),
        }
    )


def json_schema(catalogue: Catalogue) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the file, for editors. It accepts files that only a proof can reject."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pointsman SLA file",
        "description": "Tenants' priorities and latency targets. `pointsman check FILE` also checks the whole file.",
        **file_table(catalogue).schema(),
    }


def _read(root: Field, outside: Outside, catalogue: Catalogue) -> Config:
    top = root.section(file_table(catalogue))
    classes = read_classes(top.get("classes"))
    queue: Section = top.section("queue")
    server = read_server(top.get("server"), queue=queue, outside=outside)
    store = read_store(top.get("store"), outside=outside)
    # a tenant without a key in the file may still have clients
    has_place = server.keys_file is not None or store.redis is not None or server.state not in {None, STATE_OFF}
    is_open = has_place or "identity" in top
    pools = read_pools(top.get("pools"), kinds=catalogue.kinds, outside=outside)
    prices = read_cost(top.get("cost"), pools=pools)
    tenants, anonymous = read_tenants(
        top.get("tenants"),
        classes=classes,
        outside=outside,
        organizations=read_organizations(top.get("organizations"), currency=prices.currency),
        issues_keys=is_open,
        currency=prices.currency,
    )
    if server.keys_file is not None and store.redis is not None:
        contradiction = "issued keys are stored in store.redis, and a file would contradict it (remove one of them)"
        root.find("server", "keys_file").complain(contradiction)
    identity = read_identity(top.get("identity"), Assignable(tenants, classes), outside)
    require_guarded(top.get("server"), identity)
    policies = read_policies(top.get("policies"), catalogue=catalogue)
    return Config(
        classes=classes,
        tenants=tenants,
        rules=read_rules(top.get("rules"), Names(classes, tenants, pools, policies)),
        policies=policies,
        pools=pools,
        server=server,
        store=store,
        usage=read_usage(top.get("usage"), outside=outside),
        alerts=read_alerts(top.get("alerts"), outside=outside),
        identity=identity,
        audit=read_audit(top.get("audit"), outside=outside),
        aliases=read_aliases(top.get("aliases"), pools=pools),
        batches=read_batches(top.get("batches"), classes=classes, outside=outside),
        version="",
        tenant_by_key_hash={digest: tenant for tenant in tenants.values() for digest in tenant.key_hashes},
        anonymous=anonymous,
        prices=prices,
        on_miss=read_on_miss(top.get("on_miss"), classes=classes, pools=pools),
        ageing_s=queue.read("ageing", USUAL_AGEING_S),
        outage_s=queue.read("outage", USUAL_OUTAGE_S),
    )
