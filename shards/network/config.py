"""The shape of a network. Torch-free, and free of what reads it: a bare machine may make one from numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, named as in transformers' `rope_parameters`.

    `original_positions` is the context length before scaling; `factor` is how much longer it became.
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
    """All that decides what a network computes, apart from its weights.

    `windows` has one entry per layer: how many positions, its own included, a token sees there; None is all.
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
        """How many decoder layers there are."""
        return len(self.windows)
