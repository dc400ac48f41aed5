"""The options of a pool with local shards: the flags of `pointsman shard` without their dashes, like `kv-memory: 4`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from policies.sla.pools import Option
from shards.__main__ import shard

_NOT_FOR_POOLS = {
    *("context", "model", "listen", "name", "supervised"),
    *("register", "pool", "advertise", "register_key", "register_ca"),
    *("tls_cert", "tls_key", "tls_client_ca", "tls_pin", "tls_min_version"),
}
"""Options that the pool itself sets, and options without use beside a router."""


def shard_options() -> dict[str, Any]:
    """Name -> type of each option's value, with its range."""
    hints = get_type_hints(shard, include_extras=True)
    return {
        name.replace("_", "-"): _with_range(*get_args(hint)[:2])
        for name, hint in hints.items()
        if name != "return" and name not in _NOT_FOR_POOLS
    }


def shard_flags(options: Mapping[str, Option]) -> tuple[str, ...]:
    """The command line of a shard with the shard's options among `options`, which must be valid."""
    flags: list[str] = []
    for name, kind in shard_options().items():
        if (value := options.get(name)) is None:
            continue
        if kind is bool:
            flags += [f"--{name}"] if msgspec.convert(value, bool, strict=False) else []
        else:
            flags += [f"--{name}", str(value)]
    return tuple(flags)


def link_options(options: Mapping[str, Option]) -> dict[str, Option]:
    """The options of the router's link to the shard, which the shard itself does not have."""
    known = shard_options()
    return {name: value for name, value in options.items() if name not in known}


def _with_range(kind: Any, info: Any) -> Any:
    """`kind` for msgspec: without None, which only marks a missing flag."""
    kinds = [part for part in get_args(kind) if part is not type(None)]
    kind = kinds[0] if type(None) in get_args(kind) else kind
    limits = {name: value for name, value in (("ge", info.min), ("le", info.max)) if value is not None}
    return Annotated[kind, msgspec.Meta(**limits)] if limits else kind
