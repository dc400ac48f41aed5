"""Reads the shape of a network from the config.json of a Hugging Face checkpoint. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from shards.network.config import NetworkConfig, Rope
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

_LAYER_KINDS = {"full_attention", "sliding_attention"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def read_config(folder: Path) -> NetworkConfig:
    """The configuration of the checkpoint in `folder`, in the spelling of transformers 4 or 5.

    Raises UnsupportedCheckpoint for features that the engine does not support, BrokenCheckpoint for unreadable files.
    """
    config_path = folder / "config.json"
    # first of all, since other architectures have other fields
    architecture, family = _family_of(_decode(config_path, _RawArchitecture))
    raw = _decode(config_path, _Raw)
    generation_path = folder / "generation_config.json"
    generation = _decode(generation_path, _RawGeneration) if generation_path.exists() else _RawGeneration()
    eos_token_ids = _token_ids(raw.eos_token_id) | _token_ids(generation.eos_token_id)
    return _network(raw, architecture, family, eos_token_ids)


_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Base = Annotated[float, msgspec.Meta(gt=1)]


class _RawArchitecture(msgspec.Struct):
    architectures: list[str] | None = None


class _RawGeneration(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Raw(msgspec.Struct, kw_only=True):
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    max_position_embeddings: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    rms_norm_eps: _Positive = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: _Base | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: _Count | None = None
    partial_rotary_factor: float | None = None
    sliding_window: _Count | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None


class _RawRope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Base | None = None
    factor: _Positive | None = None
    original_max_position_embeddings: _Count | None = None
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    truncate: bool = True
    attention_factor: _Positive | None = None
    mscale: Annotated[float, msgspec.Meta(ge=0)] | None = None
    mscale_all_dim: Annotated[float, msgspec.Meta(ge=0)] | None = None
    partial_rotary_factor: float | None = None


_Decoded = TypeVar("_Decoded", _Raw, _RawArchitecture, _RawGeneration)


def _decode(path: Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error.strerror}", hint="is this a checkpoint?") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenCheckpoint(f"{path}: {error}") from error


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences of an architecture from the others; numbers are transformers' defaults for missing entries."""

    qkv_bias: bool | None = None
    """None: as in `attention_bias`, and then the output projection has a bias too."""
    mlp_bias: bool = False
    query_key_norm: bool = False
    head_dim: int | None = None
    windowed: str = "never"


_FAMILIES = {
    "LlamaForCausalLM": _Family(mlp_bias=True),
    "MistralForCausalLM": _Family(qkv_bias=False, windowed="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windowed="by layer"),
    "Qwen3ForCausalLM": _Family(query_key_norm=True, head_dim=128, windowed="by layer"),
}


def _family_of(raw: _RawArchitecture) -> tuple[str, _Family]:
    """The first architecture that the file names, and its family. Raises UnsupportedCheckpoint."""
    architecture = raw.architectures[0] if raw.architectures else "none"
    if architecture not in _FAMILIES:
        raise UnsupportedCheckpoint(
            f"architecture {architecture} is not supported; a shard serves {', '.join(_FAMILIES)}",
            hint="serve it with another engine, in a pool of that engine's kind",
        )
    return architecture, _FAMILIES[architecture]


def _network(raw: _Raw, architecture: str, family: _Family, eos_token_ids: frozenset[int]) -> NetworkConfig:
    _refuse_unsupported(raw)
    head_dim = raw.head_dim or family.head_dim or raw.hidden_size // raw.num_attention_heads
    if head_dim < 1 or head_dim % 2:
        raise BrokenCheckpoint(f"a head of {head_dim} numbers has no pairs for rope to turn")
    return NetworkConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        max_positions=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope=_rope(raw),
        windows=_windows(raw, family),
        tied_head=raw.tie_word_embeddings,
        qkv_bias=raw.attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=raw.attention_bias and family.qkv_bias is None,
        mlp_bias=raw.mlp_bias and family.mlp_bias,
        query_key_norm=family.query_key_norm,
        # some checkpoints name tokens beyond the last logit, which can never be drawn
        eos_token_ids=frozenset(token for token in eos_token_ids if 0 <= token < raw.vocab_size),
    )


def _refuse_unsupported(raw: _Raw) -> None:
    if raw.hidden_act != "silu":
        raise UnsupportedCheckpoint(f"activation {raw.hidden_act} is not supported", hint="supported: silu")
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise UnsupportedCheckpoint(
            f"the weights are quantized ({method})", hint="use the float32, float16 or bfloat16 checkpoint"
        )
    if raw.num_attention_heads % (raw.num_key_value_heads or raw.num_attention_heads):
        raise BrokenCheckpoint(
            f"{raw.num_attention_heads} heads do not share {raw.num_key_value_heads} kv heads evenly"
        )


def _windows(raw: _Raw, family: _Family) -> tuple[int | None, ...]:
    layers = raw.num_hidden_layers
    window = 4096 if raw.sliding_window is msgspec.UNSET else raw.sliding_window
    if family.windowed == "never" or (family.windowed == "by layer" and not raw.use_sliding_window):
        return (None,) * layers
    if family.windowed == "always":
        return (window,) * layers
    if raw.layer_types is not None:
        if len(raw.layer_types) != layers:
            raise BrokenCheckpoint(f"layer_types names {len(raw.layer_types)} layers, num_hidden_layers is {layers}")
        if unknown := set(raw.layer_types) - _LAYER_KINDS:
            raise UnsupportedCheckpoint(
                f"layers of type {min(unknown)} are not supported", hint=f"supported: {', '.join(sorted(_LAYER_KINDS))}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in raw.layer_types)
    return tuple(window if layer >= raw.max_window_layers else None for layer in range(layers))


def _rope(raw: _Raw) -> Rope:
    given = raw.rope_parameters or raw.rope_scaling or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedCheckpoint("rope differs between layers", hint="one rope for all layers is supported")
    try:
        rope = msgspec.convert(given, _RawRope)
    except msgspec.ValidationError as error:
        raise BrokenCheckpoint(f"config.json, rope parameters: {error}") from error
    kind = rope.rope_type or rope.type or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedCheckpoint(f"rope type {kind} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}")
    if (rope.partial_rotary_factor or raw.partial_rotary_factor or 1.0) != 1.0:
        raise UnsupportedCheckpoint(
            "rope on a part of each head is not supported", hint="partial_rotary_factor must be 1"
        )
    original = (
        raw.original_max_position_embeddings or rope.original_max_position_embeddings or raw.max_position_embeddings
    )
    if rope.factor is None and kind in ("linear", "llama3"):
        raise BrokenCheckpoint(f"rope type {kind} needs a factor")
    if rope.factor is not None and rope.rope_type is None and rope.type is None:
        raise BrokenCheckpoint(f"rope is scaled by {rope.factor:g}, but no rope type is given")
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise BrokenCheckpoint("rope type llama3 needs a high_freq_factor above its low_freq_factor")
    return Rope(
        kind=kind,
        theta=rope.rope_theta or raw.rope_theta or 10_000.0,
        factor=rope.factor or raw.max_position_embeddings / original,
        original_positions=original,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate,
        attention_factor=rope.attention_factor,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
    )
