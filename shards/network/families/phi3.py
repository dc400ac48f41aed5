"""Phi-3, Phi-4 and Phi-4-mini: joined matrices, and rope on a part of each head in the small ones."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family, TensorNames
from shards.network.fields import Count, Fields, Positive, RopeKind


class Phi3Fields(Fields, kw_only=True):
    """The config.json of Phi-3 and of Phi-4."""

    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None


def _read(fields: Phi3Fields, architecture: str) -> NetworkConfig:
    rope = fields.rope(RopeKind(share=1.0))
    return replace(fields.network(architecture, rope), windows=(fields.sliding_window,) * fields.num_hidden_layers)


_NAMES = TensorNames(query_key_value=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

FAMILY = Family(("Phi3ForCausalLM",), ("phi3",), Phi3Fields, _read, _NAMES)
