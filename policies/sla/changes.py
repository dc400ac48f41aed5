"""Changes of the SLA file at run time: the settings that take effect at once, and those that need a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from policies.sla.config import Config
from policies.sla.fields import Problems
from policies.sla.pools import PoolSpec
from policies.sla.server import FIXED_SERVER
from policies.sla.yaml_positions import Node, read_yaml


def fixed_changes(before: Config, after: Config, *, text: str, source: str) -> tuple[str, ...]:
    """The changes in `after`, read from `text`, that cannot take effect at run time: `file:line: path: sentence` each.

    Both Configs are as the file has them, before anything was started for them.
    """
    root, _ = read_yaml(text)
    problems = Problems(source)
    for path, sentence in (
        *_pool_changes(before, after),
        *_server_changes(before, after),
        *_store_changes(before, after),
        *_usage_changes(before, after),
        *_audit_changes(before, after),
        *_batch_changes(before, after),
    ):
        problems.add(_line_of(root, path), ".".join(path), sentence)
    return problems.lines()


def carried_over(running: Config, after: Config) -> Config:
    """`after` with the settings of `running` that are fixed: local shards with their real addresses, and servers."""
    fixed = {name: getattr(running.server, name) for name in FIXED_SERVER.values()}
    pools = {name: running.pools[name] if pool.local else pool for name, pool in after.pools.items()}
    return replace(
        after,
        pools=pools,
        server=replace(after.server, **fixed),
        store=running.store,
        usage=running.usage,
        audit=running.audit,
    )


def _pool_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Those of pools with `local` shards, which are started with the router."""
    for name in sorted(name for name, pool in before.pools.items() if pool.local and name not in after.pools):
        yield ("pools",), f"the pool '{name}' is gone (restart to change pools with local shards)"
    for name, pool in after.pools.items():
        old = before.pools.get(name)
        if old is None:
            if pool.local:
                yield ("pools", name), "is a new pool (restart to change pools with local shards)"
        elif (old.local or pool.local) and (changed := _first_difference(old, pool)):
            sentence = "cannot change while the router runs (restart to change pools with local shards)"
            yield ("pools", name, changed), sentence


def _server_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, name in FIXED_SERVER.items():
        if getattr(before.server, name) != getattr(after.server, name):
            yield ("server", key), "cannot change while the router runs (restart to change the address)"
    had_tokens = before.identity is not None and before.identity.gives_roles
    has_tokens = after.identity is not None and after.identity.gives_roles
    if (before.server.admin_key_hashes or had_tokens) and not (after.server.admin_key_hashes or has_tokens):
        # the port may be open to other machines, and then these keys are its only protection
        yield ("server", "admin_keys"), "cannot all be removed while the router runs (restart to serve without keys)"


def _store_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    if before.store != after.store:
        yield ("store",), "cannot change while the router runs (restart to change what is shared)"


def _usage_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    if before.usage != after.usage:
        yield ("usage",), "cannot change while the router runs (restart to keep usage elsewhere)"


def _audit_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    if before.audit != after.audit:
        yield ("audit",), "cannot change while the router runs (restart to keep the audit log elsewhere)"


def _batch_changes(before: Config, after: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    places = tuple(
        None if config.batches is None else (config.batches.store, config.batches.s3) for config in (before, after)
    )
    if places[0] != places[1]:
        yield ("batches", "store"), "cannot change while the router runs (restart to keep batches elsewhere)"


def _first_difference(old: PoolSpec, new: PoolSpec) -> str | None:
    names = (each.name for each in fields(old))
    changed = next((name for name in names if getattr(old, name) != getattr(new, name)), None)
    return "at" if changed == "sources" else changed


def _line_of(root: Node, path: tuple[str, ...]) -> int:
    """The line of the deepest entry on `path` that exists in the file."""
    node = root
    for key in path:
        entries: Mapping[str, Node] = node.value if isinstance(node.value, dict) else {}
        if key not in entries:
            break
        node = entries[key]
    return node.line
