"""Qwen3: queries and keys are normalised, head by head."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.fields import Count, WindowFields


class Qwen3Fields(WindowFields, kw_only=True):
    """Qwen3's config.json."""

    head_dim: Count | None = 128
    attention_bias: bool = False


def read(fields: Qwen3Fields, architecture: str) -> NetworkConfig:
    """The network of these fields."""
    return replace(
        fields.network(architecture, fields.rope()),
        windows=fields.windows,
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        query_key_norm=True,
    )


FAMILY = Family(("Qwen3ForCausalLM",), ("qwen3",), Qwen3Fields, read)
