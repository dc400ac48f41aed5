"""Mistral 7B, Nemo and Small 3: Llama's shape with a window in all layers, or in none."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.fields import Count, Fields

USUAL_WINDOW = 4096
"""The window of Mistral 7B, which its file may leave out."""


class MistralFields(Fields, kw_only=True):
    """Mistral's config.json."""

    sliding_window: Count | msgspec.UnsetType | None = msgspec.UNSET


def read(fields: MistralFields, architecture: str) -> NetworkConfig:
    """The network of these fields."""
    window = USUAL_WINDOW if fields.sliding_window is msgspec.UNSET else fields.sliding_window
    return replace(fields.network(architecture, fields.rope()), windows=(window,) * fields.num_hidden_layers)


FAMILY = Family(("MistralForCausalLM",), MistralFields, read)
