"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import Experts, NetworkConfig
from shards.network.families.mistral import MistralFields
from shards.network.families.mistral import read as read_mistral
from shards.network.family import Family, TensorNames
from shards.network.fields import Count, Positive, RopeKind


class MixtralFields(MistralFields, kw_only=True):
    """Mixtral's config.json."""

    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    sliding_window: Count | None = None
    rms_norm_eps: Positive = 1e-5


def _read(fields: MixtralFields, architecture: str) -> NetworkConfig:
    return replace(
        read_mistral(fields, architecture, RopeKind(theta=1_000_000.0)),
        experts=Experts(
            count=fields.num_local_experts,
            chosen=fields.num_experts_per_tok,
            inner=fields.intermediate_size,
            layers=frozenset(range(fields.num_hidden_layers)),
        ),
    )


_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

FAMILY = Family(("MixtralForCausalLM",), ("mixtral",), MixtralFields, _read, _NAMES)
