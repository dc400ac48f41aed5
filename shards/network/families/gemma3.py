"""The text part of Gemma 3: norms on both sides, scaled embeddings, and windows in five of six layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from shards.network.config import NetworkConfig, Rope
from shards.network.errors import UnsupportedCheckpoint
from shards.network.family import Family, TensorNames
from shards.network.fields import Count, Fields, Positive, RopeKind

_GLOBAL, _LOCAL = RopeKind(theta=1_000_000.0), RopeKind(theta=10_000.0)


class Gemma3Fields(Fields, kw_only=True):
    """Gemma 3's config.json; published files leave out most of it."""

    vocab_size: Count = 262_208
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 131_072
    hidden_act: str = msgspec.field(name="hidden_activation", default="gelu_pytorch_tanh")
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Positive = 256.0
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    layer_types: list[str] | None = None
    rope_local_base_freq: Positive | None = None
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False


def _read(fields: Gemma3Fields, architecture: str) -> NetworkConfig:
    if fields.final_logit_softcapping or fields.attn_logit_softcapping or fields.use_bidirectional_attention:
        raise UnsupportedCheckpoint(
            "caps of logits and bidirectional attention are not supported in Gemma 3",
            hint="published checkpoints of its text model have none",
        )
    rope, local_rope = _ropes(fields)
    return replace(
        fields.network(architecture, rope),
        windows=fields.windows_of(_layer_types(fields), fields.sliding_window),
        local_rope=local_rope,
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        query_key_norm=True,
        activation="gelu_tanh",
        embedding_scale=fields.hidden_size**0.5,
        score_scale=fields.query_pre_attn_scalar**-0.5,
    )


def _layer_types(fields: Gemma3Fields) -> list[str]:
    if fields.layer_types is not None:
        return fields.layer_types
    layers = range(1, fields.num_hidden_layers + 1)
    return ["sliding_attention" if layer % fields.sliding_window_pattern else "full_attention" for layer in layers]


def _ropes(fields: Gemma3Fields) -> tuple[Rope, Rope]:
    """The ropes of layers without and with a window: nested in new files, two bases in old ones."""
    given: dict[str, Any] = fields.rope_parameters or {}
    if "full_attention" in given or "sliding_attention" in given:
        full, sliding = given.get("full_attention"), given.get("sliding_attention")
        return fields.rope_of((full or {}) | (fields.rope_scaling or {}), _GLOBAL), fields.rope_of(
            sliding or {}, _LOCAL
        )
    local = Rope(theta=fields.rope_local_base_freq or _LOCAL.theta, original_positions=fields.max_position_embeddings)
    return fields.rope(_GLOBAL), local


_NAMES = TensorNames(
    attention_after_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after_norm="post_feedforward_layernorm",
)

TEXT = Family(
    ("Gemma3ForCausalLM",),
    ("gemma3_text",),
    Gemma3Fields,
    _read,
    _NAMES,
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
)
"""The models of 270M and 1B parameters, which take text only."""

IMAGES = replace(
    TEXT,
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    is_nested=True,
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""The text part of the models that also take images."""
