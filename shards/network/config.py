"""The shape of a network. Torch-free, and free of file formats: it can be made from numbers without any library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, named as in transformers' `rope_parameters`.

    `original_positions` is the context length before scaling; `factor` is the ratio of the new length to it.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Everything that determines what a network computes, except its weights.

    `windows` has one entry per layer: the number of positions that a token sees there, including its own; None is all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return len(self.windows)
