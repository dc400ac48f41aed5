"""The shape of a network. Torch-free, and free of file formats: it can be made from numbers without any library."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, named as in transformers' `rope_parameters`.

    `original_positions` is the context length before scaling; `factor` is the ratio of the new length to it.

    `dims`: the number of a head's first numbers that are rotated; 0 means all. `is_interleaved`: the numbers of a pair
    are neighbours in the checkpoint, and otherwise half of the rotated ones apart. `factors`: longrope's stretching of
    each pair. `query_growth`: beta of Llama 4, by which queries beyond the original context grow.
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
    dims: int = 0
    is_interleaved: bool = False
    factors: tuple[float, ...] = ()
    query_growth: float = 0.0

    def order(self, head_dim: int) -> list[int] | None:
        """The order of a head's numbers in which each pair is half a head apart; None if a checkpoint has it already.

        The two numbers of a pair that is not rotated are any two of the others.
        """
        dims = self.dims or head_dim
        if dims == head_dim and not self.is_interleaved:
            return None
        pairs = dims // 2
        rotated = range(dims)
        first, second = (rotated[::2], rotated[1::2]) if self.is_interleaved else (rotated[:pairs], rotated[pairs:])
        rest = (head_dim - dims) // 2
        return [*first, *range(dims, dims + rest), *second, *range(dims + rest, head_dim)]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `chosen` of `count` gated MLPs of width `inner` compute each token.

    `scoring`: the router's logits become weights by `softmax` over all, by `softmax_chosen` over the chosen ones, or by
    `sigmoid`. With `is_normalised` the weights of a token add up to 1; all are multiplied by `scale`.

    `groups` of experts compete first: experts of the best `chosen_groups` can be chosen. `has_correction`: a bias is
    added to the scores for the choice only (DeepSeek V3). `shared_inner`: the width of an MLP that computes all tokens.
    `layers` are the layers with experts; the others have an MLP.
    """

    count: int
    chosen: int
    inner: int
    layers: frozenset[int]
    scoring: str = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    has_correction: bool = False
    shared_inner: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA, arXiv 2405.04434): all heads share one compressed key and value per token.

    The cache holds `rank` compressed numbers and a rotated key of `rope_dim` numbers. A head's own key has `nope_dim`
    numbers beside the rotated ones, its value `value_dim`. `query_rank`: the queries' rank; None if not compressed.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Everything that determines what a network computes, except its weights.

    `windows` has one entry per layer: the number of positions that a token sees there, including its own; None is all.
    `local_rope` is the rope of layers with a window, if it differs. `score_scale` multiplies attention scores; None is
    1 / sqrt(head_dim). `wide_norm`: queries and keys are normalised over all heads together. With `latent`, one KV head
    of rank + rope_dim numbers serves all heads as key and as value.
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
    wide_norm: bool = False
    local_rope: Rope | None = None
    activation: str = "silu"
    embedding_scale: float = 1.0
    score_scale: float | None = None
    has_sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The largest window of a layer; None if no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    def of_layers(self, *, windowed: bool) -> NetworkConfig:
        """The shape of only the layers with a window, or of only the others, for the memory of their KV."""
        return replace(self, windows=tuple(window for window in self.windows if (window is not None) == windowed))

    @property
    def kv_places(self) -> tuple[int, ...]:
        """The number of each layer among those that have a window too, or among those that have none too."""
        kinds = [window is None for window in self.windows]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

    @property
    def kv_planes(self) -> int:
        """Tensors that the cache holds for each KV head: keys and values, or one that serves as both."""
        return 1 if self.latent is not None else 2

    @property
    def rotary_dim(self) -> int:
        """The numbers of a head that rope is laid out for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    def rope_of(self, layer: int) -> Rope:
        """The rope of a layer."""
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope
