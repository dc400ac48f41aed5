"""Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import Experts, NetworkConfig
from shards.network.errors import BrokenCheckpoint
from shards.network.families.qwen3 import Qwen3Fields
from shards.network.families.qwen3 import read as read_qwen3
from shards.network.family import Family
from shards.network.fields import Count


class Qwen3MoeFields(Qwen3Fields, kw_only=True):
    """Qwen3-MoE's config.json. transformers 5 writes `num_local_experts` for `num_experts`."""

    moe_intermediate_size: Count
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None


def _read(fields: Qwen3MoeFields, architecture: str) -> NetworkConfig:
    count = fields.num_experts or fields.num_local_experts
    if count is None or fields.num_experts_per_tok > count:
        raise BrokenCheckpoint(f"{fields.num_experts_per_tok} experts compute each token, and num_experts is {count}")
    dense, step = fields.mlp_only_layers or [], fields.decoder_sparse_step
    layers = (layer for layer in range(fields.num_hidden_layers) if layer not in dense and not (layer + 1) % step)
    return replace(
        read_qwen3(fields, architecture),
        experts=Experts(
            count=count,
            chosen=fields.num_experts_per_tok,
            inner=fields.moe_intermediate_size,
            layers=frozenset(layers),
            is_normalised=fields.norm_topk_prob,
        ),
    )


FAMILY = Family(("Qwen3MoeForCausalLM",), ("qwen3_moe",), Qwen3MoeFields, _read)
