"""From the SLA file's text to a Config. `docs/sla.md` is the reference of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from policies.catalogue import Catalogue, builtin_catalogue
from policies.config import BUNDLED, Config
from policies.errors import ConfigError
from policies.fields import Field, Problems
from policies.sla.classes import read_classes
from policies.sla.policies import read_policies
from policies.sla.pools import read_pools, read_server
from policies.sla.rules import Names, read_rules
from policies.sla.secrets import Outside
from policies.sla.tenants import read_tenants
from policies.yaml_positions import read_yaml

TOP_KEYS = ("classes", "tenants", "pools", "rules", "policies", "server")


def parse(
    text: str,
    *,
    source: str = "sla.yaml",
    environment: Mapping[str, str] | None = None,
    read_file: Callable[[str], str] | None = None,
    catalogue: Catalogue | None = None,
) -> Config:
    """The Config that `text` describes; `source` is its name in messages.

    `environment` and `read_file` answer `${env:NAME}` and `${file:path}`. Raises ConfigError with every mistake at once
    in `problems`, each as `file:line: path: sentence`, and nothing else.
    """
    root, found = read_yaml(text)
    problems = Problems(source, found)
    # where YAML itself could not be read there is nothing left to look at
    config = _read(Field(root, "", problems), Outside(environment or {}, read_file), catalogue or builtin_catalogue())
    if lines := problems.lines():
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise ConfigError(f"{source} has {count}:", problems=lines)
    return replace(config, version=hashlib.sha256(text.encode()).hexdigest()[:12])


def default_config(*, local: int = 2, model: str = BUNDLED) -> Config:
    """The Config without a file: `local` shards with `model`, one class, and one tenant that needs no key."""
    config = parse("")
    own = replace(config.pools["own"], local=local, model=model)
    return replace(config, pools={"own": own})


def _read(root: Field, outside: Outside, catalogue: Catalogue) -> Config:
    top = root.section(TOP_KEYS)
    classes = read_classes(top.get("classes"))
    tenants, anonymous = read_tenants(top.get("tenants"), classes=classes, outside=outside)
    pools = read_pools(top.get("pools"), outside=outside)
    policies = read_policies(top.get("policies"), catalogue=catalogue)
    return Config(
        classes=classes,
        tenants=tenants,
        rules=read_rules(top.get("rules"), Names(classes, tenants, pools, policies)),
        policies=policies,
        pools=pools,
        server=read_server(top.get("server")),
        version="",
        tenant_by_key_hash={digest: tenant for tenant in tenants.values() for digest in tenant.key_hashes},
        anonymous=anonymous,
    )
