"""gpt-oss: a mixture of experts in MXFP4, a window in every second layer, and attention sinks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shards.network.config import Experts, NetworkConfig
from shards.network.errors import UnsupportedCheckpoint
from shards.network.family import Family, TensorNames
from shards.network.fields import Count, Fields, Positive, RopeKind
from shards.network.mlp import ACTIVATIONS, SWIGLU_ALPHA, SWIGLU_LIMIT, GatedMlp
from shards.network.moe import MixtureOfExperts
from shards.network.tensors import Builder
from shards.quant.mxfp4 import GROUP, dequantise


class GptOssFields(Fields, kw_only=True):
    """gpt-oss's config.json."""

    head_dim: Count | None = 64
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = True
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    sliding_window: Count = 128
    layer_types: list[str] | None = None
    swiglu_limit: float = SWIGLU_LIMIT
    swiglu_alpha: float = SWIGLU_ALPHA


def _read(fields: GptOssFields, architecture: str) -> NetworkConfig:
    if (fields.swiglu_limit, fields.swiglu_alpha) != (SWIGLU_LIMIT, SWIGLU_ALPHA):
        raise UnsupportedCheckpoint(
            f"swiglu_limit {fields.swiglu_limit:g} with swiglu_alpha {fields.swiglu_alpha:g} is not supported",
            hint=f"supported: {SWIGLU_LIMIT:g} with {SWIGLU_ALPHA:g}",
        )
    alternating = [("sliding_attention", "full_attention")[layer % 2] for layer in range(fields.num_hidden_layers)]
    return replace(
        fields.network(architecture, fields.rope(RopeKind(theta=150_000.0))),
        windows=fields.windows_of(fields.layer_types or alternating, fields.sliding_window),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        activation="clamped_swiglu",
        has_sinks=True,
        experts=Experts(
            count=fields.num_local_experts,
            chosen=fields.num_experts_per_tok,
            inner=fields.intermediate_size,
            layers=frozenset(range(fields.num_hidden_layers)),
            scoring="softmax_chosen",
        ),
    )


def _mixture(builder: Builder, index: int) -> MixtureOfExperts:
    """The experts of a layer, which share their tensors: one for all gates and up-projections, one for all others."""
    config, take, linear = builder.config, builder.source.take, builder.form.linear
    experts = config.experts
    assert experts is not None, "gpt-oss has experts in every layer"
    prefix, count, own = builder.name(index, "mlp.experts."), experts.count, builder.own_experts(experts.count)
    gate_up_bias = take(f"{prefix}gate_up_proj_bias", count, 2 * experts.inner, own=own)
    down_bias = take(f"{prefix}down_proj_bias", count, config.hidden_size, own=own)
    gate_up = _matrices(builder, f"{prefix}gate_up_proj", 2 * experts.inner, config.hidden_size)
    down = _matrices(builder, f"{prefix}down_proj", config.hidden_size, experts.inner)
    return MixtureOfExperts(
        router=builder.router(index, has_bias=True),
        experts=tuple(
            GatedMlp(
                # gates and up-projections alternate by row
                gate_up=linear([gate_up[number][::2], gate_up[number][1::2]], _apart(gate_up_bias[number])),
                down=linear([down[number].contiguous()], down_bias[number]),
                activation=ACTIVATIONS[config.activation],
            )
            for number in range(len(own))
        ),
        first=own.start,
    )


def _matrices(builder: Builder, name: str, outputs: int, inputs: int) -> Tensor:
    """The matrices of all experts of this process, [experts, out, in]."""
    experts, source = builder.config.experts, builder.source
    assert experts is not None, "gpt-oss has experts in every layer"
    own = builder.own_experts(experts.count)
    if not source.has(f"{name}_blocks"):
        # unquantised files have [in, out]
        return source.take(name, experts.count, inputs, outputs, own=own).transpose(1, 2)
    groups = inputs // GROUP
    blocks = source.take_bytes(f"{name}_blocks", experts.count, outputs, groups, GROUP // 2, own=own)
    scales = source.take_bytes(f"{name}_scales", experts.count, outputs, groups, own=own)
    return dequantise(blocks, scales, source.dtype)


def _apart(bias: Tensor) -> Tensor:
    return bias.view(-1, 2).t().flatten()


FAMILY = Family(
    ("GptOssForCausalLM",),
    ("gpt_oss",),
    GptOssFields,
    _read,
    TensorNames(router="mlp.router"),
    mlp=_mixture,
    quantised=frozenset({"mxfp4"}),
)
