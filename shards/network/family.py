"""A family of networks: the fields of its config.json that it reads, and the names of its tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shards.network.config import NetworkConfig
from shards.network.fields import Fields

if TYPE_CHECKING:
    from shards.network.layers import Mlp, Projection


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors in a layer, without `model.layers.N.` and `.weight`, as most families have them.

    Several names are the parts of one matrix, in the order of rows. None: the family has no such tensor.
    """

    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attention_after_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_after_norm: str | None = None
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared: str = "mlp.shared_experts."


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of a family from the others. Each of its `architectures` has one of `model_types`, by which it is
    found in a config.json that names no architecture. `read` makes a config of its fields and the architecture's name.

    `is_nested`: the fields are in `text_config`, as in networks that also take images. `prefixes` are pairs (beginning
    of a tensor's name, its replacement); tensors that then begin with one of `ignored` are left out. `norm_offset` is
    added to all norm weights, which are float32 then. `activation` is the name of the only one that the family has.

    `attention` and `mlp` make the parts of a layer that `names` cannot describe, with the Builder of `tensors.py` and
    the number of the layer. `quantised` are methods of quantization_config that the family reads itself.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    fields: type[Fields]
    read: Callable[[Any, str], NetworkConfig]
    names: TensorNames = field(default_factory=TensorNames)
    is_nested: bool = False
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    norm_offset: float = 0.0
    activation: str = "silu"
    attention: Callable[[Any, int], Projection] | None = None
    mlp: Callable[[Any, int], Mlp] | None = None
    quantised: frozenset[str] = frozenset()

    def renamed(self, stored: str) -> str:
        """The name of a tensor that files call `stored`."""
        for prefix, replacement in self.prefixes:
            if stored.startswith(prefix):
                return replacement + stored.removeprefix(prefix)
        return stored
