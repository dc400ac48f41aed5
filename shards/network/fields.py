"""The fields of a config.json that most families have, and their meaning. Torch-free.

A family's table of fields is a subclass of `Fields`: its own fields, and other defaults where the family has others.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, NamedTuple

import msgspec

from shards.network.config import NetworkConfig, Rope
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

_log = logging.getLogger(__name__)

Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Base = Annotated[float, msgspec.Meta(gt=1)]
TokenIds = int | list[int] | None

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_LAYER_KINDS = {"full_attention", "sliding_attention"}


class RopeKind(NamedTuple):
    """The rope of a family, where its file says nothing else.

    `share` of each head is rotated; None: all of it, and a file that says otherwise is not supported. `head_dim`: the
    numbers that rope is laid out for, if that is not the head. `is_interleaved`: see `Rope`.
    """

    theta: float = 10_000.0
    share: float | None = None
    head_dim: int | None = None
    is_interleaved: bool = False


class Fields(msgspec.Struct, kw_only=True):
    """The fields that all families have, named as in config.json."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: Base | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: TokenIds = None

    @property
    def kv_heads(self) -> int:
        """The number of KV heads. Raises BrokenCheckpoint if query heads do not share them evenly."""
        heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % heads:
            raise BrokenCheckpoint(f"{self.num_attention_heads} heads do not share {heads} kv heads evenly")
        return heads

    @property
    def head_numbers(self) -> int:
        """The size of a head. Raises BrokenCheckpoint if it has no pairs for rope."""
        numbers = self.head_dim or self.hidden_size // self.num_attention_heads
        if numbers < 1 or numbers % 2:
            raise BrokenCheckpoint(f"a head of {numbers} numbers has no pairs for rope to turn")
        return numbers

    def network(self, architecture: str, rope: Rope) -> NetworkConfig:
        """The network that the common fields describe, with this `rope` and without windows."""
        return NetworkConfig(
            architecture=architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_numbers,
            max_positions=self.positions(rope),
            rms_norm_eps=self.rms_norm_eps,
            rope=rope,
            windows=self.no_windows,
            tied_head=self.tie_word_embeddings,
        )

    @property
    def no_windows(self) -> tuple[int | None, ...]:
        """The windows of a network in which every token sees all before it."""
        return (None,) * self.num_hidden_layers

    def rope(self, own: RopeKind | None = None) -> Rope:
        """The rope of all layers: by rope_scaling, which model cards ask users to add to what transformers 5 saved as
        rope_parameters, else by that. Raises UnsupportedCheckpoint or BrokenCheckpoint."""
        given, saved = self.rope_scaling or self.rope_parameters or {}, self.rope_parameters or {}
        rope = self.rope_of(given, own)
        if saved.get("rope_theta", rope.theta) != rope.theta:
            _log.warning(
                "config.json: rope_scaling stands in place of rope_parameters, and with it a base of %g in place of %g,"
                " as in transformers (write `rope_theta` into rope_scaling to keep it)",
                rope.theta,
                saved["rope_theta"],
            )
        return rope

    def rope_of(self, given: dict[str, Any], own: RopeKind | None = None) -> Rope:
        """The rope with the parameters `given`; as in `rope`."""
        own = own or RopeKind()
        if any(isinstance(value, dict) for value in given.values()):
            raise UnsupportedCheckpoint("rope differs between layers", hint="one rope for all layers is supported")
        try:
            fields = msgspec.convert(given, _RopeFields)
        except msgspec.ValidationError as error:
            raise BrokenCheckpoint(f"config.json, rope parameters: {error}") from error
        kind, original = _kind_of(fields), self._original_of(fields)
        head = own.head_dim or self.head_numbers
        dims = self._rotated(fields, own, head)
        return Rope(
            kind=kind,
            theta=fields.rope_theta or self.rope_theta or own.theta,
            factor=fields.factor or self.max_position_embeddings / original,
            original_positions=original,
            low_freq_factor=fields.low_freq_factor,
            high_freq_factor=fields.high_freq_factor,
            beta_fast=fields.beta_fast or 32.0,
            beta_slow=fields.beta_slow or 1.0,
            truncate=fields.truncate,
            attention_factor=fields.attention_factor,
            mscale=fields.mscale,
            mscale_all_dim=fields.mscale_all_dim,
            dims=0 if dims == head else dims,
            is_interleaved=own.is_interleaved,
            factors=self._stretching(fields, original, dims) if kind == "longrope" else (),
            query_growth=fields.llama_4_scaling_beta or 0.0,
        )

    def positions(self, rope: Rope) -> int:
        """The longest context: that of the file, or the longer one that YaRN's factor promises."""
        if rope.kind != "yarn":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(rope.factor * rope.original_positions))

    def windows_of(self, kinds: list[str], window: int | None) -> tuple[int | None, ...]:
        """The windows of layers of these `kinds`. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
        if len(kinds) != self.num_hidden_layers:
            raise BrokenCheckpoint(
                f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if unknown := set(kinds) - _LAYER_KINDS:
            raise UnsupportedCheckpoint(
                f"layers of type {min(unknown)} are not supported", hint=f"supported: {', '.join(sorted(_LAYER_KINDS))}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _rotated(self, fields: _RopeFields, own: RopeKind, head: int) -> int:
        share = fields.partial_rotary_factor or self.partial_rotary_factor or own.share or 1.0
        if share != 1.0 and own.share is None:
            raise UnsupportedCheckpoint(
                "rope on a part of each head is not supported in this family", hint="partial_rotary_factor must be 1"
            )
        dims = int(head * share)
        if dims < 2 or dims % 2:
            raise BrokenCheckpoint(f"rope on {dims} numbers of a head leaves one without its pair")
        return dims

    def _original_of(self, fields: _RopeFields) -> int:
        return (
            self.original_max_position_embeddings
            or fields.original_max_position_embeddings
            or self.max_position_embeddings
        )

    def _stretching(self, fields: _RopeFields, original: int, dims: int) -> tuple[float, ...]:
        # one choice for all requests: with another one for short prompts, KV would change when a sequence outgrows it
        factors = fields.long_factor if self.max_position_embeddings > original else fields.short_factor
        if factors is None or len(factors) != dims // 2:
            raise BrokenCheckpoint(f"rope type longrope needs {dims // 2} numbers in long_factor and in short_factor")
        return tuple(factors)


class WindowFields(Fields, kw_only=True):
    """The fields of families with a sliding window in some layers, as in Qwen."""

    sliding_window: Count | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of all layers. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
        window = 4096 if self.sliding_window is msgspec.UNSET else self.sliding_window
        if not self.use_sliding_window:
            return self.no_windows
        if self.layer_types is not None:
            return self.windows_of(self.layer_types, window)
        return tuple(window if layer >= self.max_window_layers else None for layer in range(self.num_hidden_layers))


class _RopeFields(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: Annotated[float, msgspec.Meta(ge=0)] | None = None
    mscale_all_dim: Annotated[float, msgspec.Meta(ge=0)] | None = None
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    long_factor: list[Positive] | None = None
    short_factor: list[Positive] | None = None
    llama_4_scaling_beta: Annotated[float, msgspec.Meta(ge=0)] | None = None


def _kind_of(fields: _RopeFields) -> str:
    kind = fields.rope_type or fields.type or "default"
    # the name of longrope in the first files of Phi-3
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS:
        raise UnsupportedCheckpoint(f"rope type {kind} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}")
    if fields.factor is None and kind in ("linear", "llama3"):
        raise BrokenCheckpoint(f"rope type {kind} needs a factor")
    if fields.factor is not None and fields.rope_type is None and fields.type is None:
        raise BrokenCheckpoint(f"rope is scaled by {fields.factor:g}, but no rope type is given")
    if kind == "llama3" and fields.high_freq_factor <= fields.low_freq_factor:
        raise BrokenCheckpoint("rope type llama3 needs a high_freq_factor above its low_freq_factor")
    return kind
