"""GLM-4 (0414): norms on both sides, and rope on half of each head, with neighbours as pairs."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family, TensorNames
from shards.network.fields import Count, Fields, Positive, RopeKind


class Glm4Fields(Fields, kw_only=True):
    """GLM-4's config.json."""

    head_dim: Count | None = 128
    rms_norm_eps: Positive = 1.5625e-7
    attention_bias: bool = True


def _read(fields: Glm4Fields, architecture: str) -> NetworkConfig:
    rope = fields.rope(RopeKind(share=0.5, is_interleaved=True))
    return replace(fields.network(architecture, rope), qkv_bias=fields.attention_bias)


_NAMES = TensorNames(
    gate_up=("mlp.gate_up_proj",),
    attention_after_norm="post_self_attn_layernorm",
    mlp_after_norm="post_mlp_layernorm",
)

FAMILY = Family(("Glm4ForCausalLM",), ("glm4",), Glm4Fields, _read, _NAMES)
