"""DeepSeek V2, V3 and R1: latent attention, and a mixture of experts behind a few dense layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from shards.network.config import Experts, Latent, NetworkConfig, Rope
from shards.network.errors import UnsupportedCheckpoint
from shards.network.family import Family
from shards.network.fields import Count, Fields, Number, Positive, RopeKind
from shards.network.latent import LatentProjection
from shards.network.rope import yarn_mscale
from shards.network.tensors import Builder
from shards.quant.matrix import select_rows

_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever config.json says of the others."""


class DeepseekFields(Fields, kw_only=True):
    """The fields that both versions have."""

    attention_bias: bool = False
    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = 1536
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128
    moe_intermediate_size: Count
    n_routed_experts: Count
    n_shared_experts: Number | None = None
    num_experts_per_tok: Count
    routed_scaling_factor: Positive = 1.0
    n_group: Count | None = 1
    topk_group: Count | None = 1
    first_k_dense_replace: Number = 0
    moe_layer_freq: Count = 1


class DeepseekV2Fields(DeepseekFields, kw_only=True):
    """DeepSeek V2's config.json."""

    topk_method: str = "greedy"
    norm_topk_prob: bool = False


class DeepseekV3Fields(DeepseekFields, kw_only=True):
    """DeepSeek V3's config.json."""

    norm_topk_prob: bool = True
    rope_interleave: bool = True


def _read_v2(fields: DeepseekV2Fields, architecture: str) -> NetworkConfig:
    if fields.topk_method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedCheckpoint(
            f"topk_method {fields.topk_method} is not supported", hint="supported: greedy, group_limited_greedy"
        )
    network = _read(fields, architecture, is_interleaved=True)
    assert network.experts is not None, "DeepSeek has experts"
    groups = fields.n_group or 1 if fields.topk_method == "group_limited_greedy" else 1
    # its weights are not normalised, whatever norm_topk_prob says; see transformers
    experts = replace(network.experts, groups=groups, chosen_groups=min(network.experts.chosen_groups, groups))
    return replace(network, experts=replace(experts, is_normalised=False))


def _read_v3(fields: DeepseekV3Fields, architecture: str) -> NetworkConfig:
    network = _read(fields, architecture, is_interleaved=fields.rope_interleave)
    assert network.experts is not None, "DeepSeek has experts"
    experts = replace(network.experts, scoring="sigmoid", has_correction=True, is_normalised=fields.norm_topk_prob)
    return replace(network, experts=experts)


def _read(fields: DeepseekFields, architecture: str, *, is_interleaved: bool) -> NetworkConfig:
    latent = Latent(
        rank=fields.kv_lora_rank,
        rope_dim=fields.qk_rope_head_dim,
        nope_dim=fields.qk_nope_head_dim,
        value_dim=fields.v_head_dim,
        query_rank=fields.q_lora_rank,
    )
    rope = fields.rope(RopeKind(head_dim=latent.rope_dim, is_interleaved=is_interleaved))
    layers = range(fields.first_k_dense_replace, fields.num_hidden_layers)
    return replace(
        fields.network(architecture, rope),
        kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        output_bias=fields.attention_bias,
        qkv_bias=fields.attention_bias,
        score_scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _temperature(rope) ** 2,
        latent=latent,
        experts=Experts(
            count=fields.n_routed_experts,
            chosen=fields.num_experts_per_tok,
            inner=fields.moe_intermediate_size,
            layers=frozenset(layer for layer in layers if not layer % fields.moe_layer_freq),
            scale=fields.routed_scaling_factor,
            groups=fields.n_group or 1,
            chosen_groups=fields.topk_group or 1,
            shared_inner=(fields.n_shared_experts or 0) * fields.moe_intermediate_size,
        ),
    )


def _temperature(rope: Rope) -> float:
    """YaRN's sharpening of the scores, which other families have on cosines and sines."""
    return yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" and rope.mscale_all_dim else 1.0


def _attention(builder: Builder, index: int) -> LatentProjection:
    config, latent = builder.config, builder.config.latent
    assert latent is not None, "DeepSeek has latent attention"
    heads, hidden, prefix = config.heads, config.hidden_size, builder.name(index, "self_attn.")
    order = config.rope.order(latent.rope_dim) or list(range(latent.rope_dim))
    wide, own = latent.nope_dim + latent.rope_dim, list(range(latent.nope_dim))
    by_head = [*own, *(latent.nope_dim + number for number in order)]
    query_order = torch.arange(heads * wide).view(heads, wide)[:, by_head].flatten()
    inputs = hidden if latent.query_rank is None else latent.query_rank
    query_name = "q_proj" if latent.query_rank is None else "q_b_proj"
    query = builder.source.matrix(f"{prefix}{query_name}", heads * wide, inputs)
    down = builder.source.matrix(f"{prefix}kv_a_proj_with_mqa", latent.rank + latent.rope_dim, hidden)
    down_order = torch.tensor([*range(latent.rank), *(latent.rank + number for number in order)])
    up = builder.source.take(f"{prefix}kv_b_proj.weight", heads * (latent.nope_dim + latent.value_dim), latent.rank)
    key_up, value_up = torch.split(up.view(heads, -1, latent.rank), [latent.nope_dim, latent.value_dim], 1)
    down_bias = (
        builder.source.take(f"{prefix}kv_a_proj_with_mqa.bias", latent.rank + latent.rope_dim)[down_order]
        if config.qkv_bias
        else None
    )
    return LatentProjection(
        shape=latent,
        heads=heads,
        eps=_NORM_EPS,
        query=builder.form.linear([select_rows(query, query_order)], None),
        key_value_down=builder.form.linear([select_rows(down, down_order)], down_bias),
        key_value_norm=builder.norm(f"{prefix}kv_a_layernorm", latent.rank),
        key_up=builder.activated(key_up.contiguous()),
        value_up=builder.activated(value_up.transpose(1, 2).contiguous()),
        linear_out=builder.linear(f"{prefix}o_proj", heads * latent.value_dim, hidden, config.output_bias),
        query_down=None
        if latent.query_rank is None
        else builder.linear(f"{prefix}q_a_proj", hidden, latent.query_rank, config.qkv_bias),
        query_norm=None if latent.query_rank is None else builder.norm(f"{prefix}q_a_layernorm", latent.query_rank),
    )


V2 = Family(("DeepseekV2ForCausalLM",), ("deepseek_v2",), DeepseekV2Fields, _read_v2, attention=_attention)
V3 = Family(("DeepseekV3ForCausalLM",), ("deepseek_v3",), DeepseekV3Fields, _read_v3, attention=_attention)
