"""Llama 2 and 3, and the networks that have its shape."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.fields import Fields


class LlamaFields(Fields, kw_only=True):
    """Llama's config.json."""

    attention_bias: bool = False
    mlp_bias: bool = False


def _read(fields: LlamaFields, architecture: str) -> NetworkConfig:
    return replace(
        fields.network(architecture, fields.rope()),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        mlp_bias=fields.mlp_bias,
    )


FAMILY = Family(("LlamaForCausalLM",), ("llama",), LlamaFields, _read)
