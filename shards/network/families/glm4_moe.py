"""GLM-4.5, 4.6 and 4.7: a mixture of experts behind a few dense layers, with one shared expert."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import Experts, NetworkConfig
from shards.network.family import Family
from shards.network.fields import Count, Fields, Number, Positive, RopeKind


class Glm4MoeFields(Fields, kw_only=True):
    """The config.json of GLM-4's mixtures of experts."""

    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: Count = 1408
    n_routed_experts: Count = 128
    n_shared_experts: Number = 1
    num_experts_per_tok: Count = 8
    routed_scaling_factor: Positive = 1.0
    norm_topk_prob: bool = True
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: Number = 1


def _read(fields: Glm4MoeFields, architecture: str) -> NetworkConfig:
    return replace(
        fields.network(architecture, fields.rope(RopeKind(share=0.5))),
        qkv_bias=fields.attention_bias,
        query_key_norm=fields.use_qk_norm,
        experts=Experts(
            count=fields.n_routed_experts,
            chosen=fields.num_experts_per_tok,
            inner=fields.moe_intermediate_size,
            layers=frozenset(range(fields.first_k_dense_replace, fields.num_hidden_layers)),
            scoring="sigmoid",
            is_normalised=fields.norm_topk_prob,
            scale=fields.routed_scaling_factor,
            groups=fields.n_group,
            chosen_groups=fields.topk_group,
            has_correction=True,
            shared_inner=fields.n_shared_experts * fields.moe_intermediate_size,
        ),
    )


FAMILY = Family(("Glm4MoeForCausalLM",), ("glm4_moe",), Glm4MoeFields, _read)
