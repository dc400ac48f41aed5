"""Reading of quantization_config."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

_Fields = TypeVar("_Fields", bound=msgspec.Struct)

HINT = "use another file of this model, or serve it with another engine, in a pool of that engine's kind"


def read_fields(given: dict[str, Any], kind: type[_Fields]) -> _Fields:
    """The fields of `kind` in quantization_config. Raises BrokenCheckpoint."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BrokenCheckpoint(f"config.json, quantization_config: {error}") from error


def unsupported(method: str, what: str) -> UnsupportedCheckpoint:
    """The error for a feature of a format that shards do not read."""
    return UnsupportedCheckpoint(f"{method} with {what} is not supported", hint=HINT)
