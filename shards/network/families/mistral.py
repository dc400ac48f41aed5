"""Mistral 7B, Nemo, Small 3 and Ministral 8B: Llama's shape with a window in all layers, in none, or in some."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.fields import Count, Fields, RopeKind

USUAL_WINDOW = 4096
"""The window of Mistral 7B, which its file may leave out."""


class MistralFields(Fields, kw_only=True):
    """Mistral's config.json."""

    sliding_window: Count | msgspec.UnsetType | None = msgspec.UNSET
    layer_types: list[str] | None = None


def read(fields: MistralFields, architecture: str, own: RopeKind | None = None) -> NetworkConfig:
    """The network of these fields, with its `own` rope where they say nothing else."""
    window = USUAL_WINDOW if fields.sliding_window is msgspec.UNSET else fields.sliding_window
    kinds = fields.layer_types or ["sliding_attention"] * fields.num_hidden_layers
    return replace(fields.network(architecture, fields.rope(own)), windows=fields.windows_of(kinds, window))


FAMILY = Family(("MistralForCausalLM", "MinistralForCausalLM"), ("mistral", "ministral"), MistralFields, read)
