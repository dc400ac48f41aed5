"""Reads the shape of a network from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shards.network.config import NetworkConfig
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.network.families.table import ARCHITECTURES, MODEL_TYPES, family_of
from shards.network.family import Family
from shards.network.fields import Fields, TokenIds
from shards.quant.formats.table import format_of


def read_config(folder: Path) -> NetworkConfig:
    """The configuration of the checkpoint in `folder`, in the spelling of transformers 4 or 5.

    Raises UnsupportedCheckpoint for features that the engine does not support, BrokenCheckpoint for unreadable files.
    """
    path = folder / "config.json"
    # first of all, since other architectures have other fields
    outer = _decode(path, _Outer)
    architecture = _supported(outer)
    family = family_of(architecture)
    fields = _fields_of(path, family)
    _refuse_quantised(outer.quantization_config or fields.quantization_config, family)
    config = family.read(fields, architecture)
    eos_token_ids = _token_ids(outer.eos_token_id) | _token_ids(fields.eos_token_id) | _generation_ids(folder)
    # some checkpoints name tokens beyond the last logit, which can never be drawn
    known = frozenset(token for token in eos_token_ids if 0 <= token < config.vocab_size)
    return replace(config, eos_token_ids=known)


def quantisation_of(folder: Path, family: Family) -> dict[str, Any] | None:
    """quantization_config of the checkpoint in `folder`; None if it is not quantised. Raises as `read_config`."""
    path = folder / "config.json"
    return _decode(path, _Outer).quantization_config or _fields_of(path, family).quantization_config


_IS_IT_ONE = "is this a checkpoint?"


class _Outer(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: TokenIds = None


class _Nested(msgspec.Struct):
    text_config: dict[str, Any]
    tie_word_embeddings: bool | None = None


class _Generation(msgspec.Struct):
    eos_token_id: TokenIds = None


_Decoded = TypeVar("_Decoded", bound=msgspec.Struct)


def _decode(path: Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error.strerror}", hint=_IS_IT_ONE) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path}: {error}") from error


def _supported(outer: _Outer) -> str:
    """The first architecture that the file names, or that of its model type. Raises UnsupportedCheckpoint."""
    if outer.architectures:
        architecture = outer.architectures[0]
    elif outer.model_type is not None:
        architecture = MODEL_TYPES.get(outer.model_type, f"of model type {outer.model_type}")
    else:
        raise BrokenCheckpoint("config.json names neither `architectures` nor a `model_type`", hint=_IS_IT_ONE)
    if architecture not in ARCHITECTURES:
        raise UnsupportedCheckpoint(
            f"architecture {architecture} is not supported; a shard serves {', '.join(ARCHITECTURES)}",
            hint="serve it with another engine, in a pool of that engine's kind",
        )
    return architecture


def _fields_of(path: Path, family: Family) -> Fields:
    if not family.is_nested:
        fields = _decode(path, family.fields)
    else:
        nested = _decode(path, _Nested)
        try:
            fields = msgspec.convert(nested.text_config, family.fields)
        except msgspec.ValidationError as error:
            raise BrokenCheckpoint(f"{path}, text_config: {error}") from error
        # the whole network's word counts, if there is one
        if nested.tie_word_embeddings is not None:
            fields.tie_word_embeddings = nested.tie_word_embeddings
    if fields.hidden_act != family.activation:
        raise UnsupportedCheckpoint(
            f"activation {fields.hidden_act} is not supported in this family", hint=f"supported: {family.activation}"
        )
    return fields


def _refuse_quantised(quantised: dict[str, Any] | None, family: Family) -> None:
    if quantised is not None and quantised.get("quant_method") not in family.quantised:
        format_of(quantised)


def _generation_ids(folder: Path) -> frozenset[int]:
    path = folder / "generation_config.json"
    return _token_ids(_decode(path, _Generation).eos_token_id) if path.exists() else frozenset()


def _token_ids(value: TokenIds) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
