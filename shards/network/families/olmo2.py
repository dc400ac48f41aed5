"""OLMo 2: norms behind attention and MLP only, and of all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family, TensorNames
from shards.network.fields import Fields, Positive


class Olmo2Fields(Fields, kw_only=True):
    """OLMo 2's config.json."""

    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False


def _read(fields: Olmo2Fields, architecture: str) -> NetworkConfig:
    return replace(
        fields.network(architecture, fields.rope()),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        query_key_norm=True,
        wide_norm=True,
    )


_NAMES = TensorNames(
    attention_norm=None,
    attention_after_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_after_norm="post_feedforward_layernorm",
)

FAMILY = Family(("Olmo2ForCausalLM",), ("olmo2",), Olmo2Fields, _read, _NAMES)
