"""Parameters of sampling that a model's publisher recommends: generation_config.json, for clients that name none. Pure.

Source: vLLM's `--generation-config auto`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.nesting import decode_page
from policies.nouns import DIALS, Sampling

_log = logging.getLogger("pointsman.shard")


def defaults_in(file: bytes, shard: str) -> Mapping[str, float]:
    """The dials in the generation_config.json `file` of `shard`; a value that no client may ask for is left out."""
    try:
        given = decode_page(file)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("generation_config.json of %s is not read: %s", shard, error)
        return {}
    found: dict[str, float] = {}
    for name, kind in DIALS.items():
        if not isinstance(given, dict) or given.get(name) is None:
            continue
        try:
            found[name] = msgspec.convert(given[name], kind)
        except msgspec.ValidationError as error:
            _log.warning("generation_config.json of %s: %s is left out: %s", shard, name, error)
    if found:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        _log.info("%s samples by its generation_config.json where clients name nothing else: %s", shard, shown)
    return found


def with_defaults(sampling: Sampling, body: Mapping[str, Any] | None, defaults: Mapping[str, float]) -> Sampling:
    """`sampling`, which was read from `body`, with those of `defaults` that the client did not name."""
    left = {name: value for name, value in defaults.items() if not body or body.get(name) is None}
    if left.get("top_p") == 0:
        # an empty nucleus keeps the likeliest token
        left |= {"top_p": 1.0, "temperature": 0.0}
    if left.get("top_k") == -1:
        left["top_k"] = 0
    return replace(sampling, **left) if left else sampling
