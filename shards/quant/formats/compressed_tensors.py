"""compressed-tensors, as LLM Compressor writes it: FP8, int8, or packed int4 and int8.

By `format` of a group of config_groups: float-quantized and int-quantized have `NAME.weight` as float8_e4m3fn or int8
[out, in]; pack-quantized has `NAME.weight_packed` int32 [out, in * bits / 32] of numbers that are raised by half of
their range, and `NAME.weight_shape`. All have `NAME.weight_scale`, [1], [out, 1], [out, groups] or one for each block,
and may have `NAME.weight_zero_point` (packed along rows if the numbers are) and `NAME.weight_g_idx`. Source: the
library compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from shards.network.errors import BrokenCheckpoint
from shards.quant.formats.base import FLOATS, StoredTensors
from shards.quant.formats.fields import read_fields, unsupported
from shards.quant.formats.fp8 import block_matrix, scales_by_row
from shards.quant.formats.words import unpacked_words, zeros_or_none
from shards.quant.matrix import QuantisedMatrix, ordered_by_group, pack_four_bits

METHODS = ("compressed-tensors",)

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
_KINDS = (("float", 8), ("int", 8), ("int", 4))
_STRATEGIES = ("tensor", "channel", "group", "block")
_UNUSED = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale", ".output_scale")


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: Any = None


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None
    format: str | None = None


class _Fields(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str = "dense"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage of the matrices that `matches` accepts by name, as in a group of config_groups."""

    matches: Callable[[str], bool]
    bits: int
    is_float: bool
    is_packed: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    quantises_inputs: bool

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix."""
        if not self.is_packed:
            return self._plain(name, outputs, inputs, stored)
        per_word = 32 // self.bits
        words = stored.take_stored(f"{name}.weight_packed", outputs, -(-inputs // per_word), kinds=("I32",))
        shape = stored.take_stored(f"{name}.weight_shape", 2, kinds=("I64", "I32")).tolist()
        if shape != [outputs, inputs]:
            raise BrokenCheckpoint(f"tensor {name}.weight_shape is {shape}, config.json says {[outputs, inputs]}")
        numbers, order = unpacked_words(words, self.bits)[:, :inputs], None
        group = self._group_of(inputs)
        if stored.has(f"{name}.weight_g_idx"):
            of_inputs = stored.take_stored(f"{name}.weight_g_idx", inputs, kinds=("I32", "I64"))
            try:
                numbers, order = ordered_by_group(numbers, of_inputs, group)
            except ValueError as error:
                raise BrokenCheckpoint(f"matrix {name}: {error}") from error
        scales = self._scales(name, outputs, inputs, stored)
        zeros = self._packed_zeros(name, scales, stored)
        if self.bits == 4:
            return QuantisedMatrix(pack_four_bits(numbers), scales, group, zeros, order)
        return QuantisedMatrix((numbers ^ 128).view(torch.int8), scales, group, zeros, order, self.quantises_inputs)

    def _plain(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        kinds = ("F8_E4M3",) if self.is_float else ("I8",)
        numbers = stored.take_stored(f"{name}.weight", outputs, inputs, kinds=kinds)
        if self.block is not None:
            return block_matrix(numbers, f"{name}.weight_scale", self.block, stored)
        scales, zeros = self._scales(name, outputs, inputs, stored), None
        if stored.has(f"{name}.weight_zero_point"):
            shape = stored.shape(f"{name}.weight_zero_point")
            held = stored.take_stored(f"{name}.weight_zero_point", *shape, kinds=("I8", "F8_E4M3", *FLOATS))
            by_group = held.float().to(torch.int16).reshape(-1, scales.shape[1])
            zeros = zeros_or_none(by_group.expand(scales.shape), 0)
        return QuantisedMatrix(
            numbers, scales, self._group_of(inputs), zeros, quantises_inputs=self.quantises_inputs and not self.is_float
        )

    def _scales(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> Tensor:
        scales = f"{name}.weight_scale"
        if self.strategy != "group":
            return scales_by_row(scales, outputs, stored)
        return stored.take_stored(scales, outputs, -(-inputs // self.group), kinds=FLOATS)

    def _packed_zeros(self, name: str, scales: Tensor, stored: StoredTensors) -> Tensor | None:
        if not stored.has(f"{name}.weight_zero_point"):
            return None
        outputs, groups = scales.shape
        words = -(-outputs * self.bits // 32)
        packed = stored.take_stored(f"{name}.weight_zero_point", words, groups, kinds=("I32",))
        raised = unpacked_words(packed.t(), self.bits)[:, :outputs].t().to(torch.int16)
        return zeros_or_none(raised, 8) if self.bits == 4 else zeros_or_none(raised - 128, 0)

    def _group_of(self, inputs: int) -> int:
        return min(self.group, inputs) if self.strategy == "group" else inputs


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The schemes of a checkpoint, in the order of its config_groups."""

    schemes: tuple[Scheme, ...]

    def holds(self, name: str, stored: StoredTensors) -> bool:
        """Whether there are scales of this matrix."""
        return stored.has(f"{name}.weight_scale")

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix."""
        scheme = next((scheme for scheme in self.schemes if scheme.matches(name)), None)
        if scheme is None:
            raise BrokenCheckpoint(f"matrix {name} is quantised, and no group of config_groups names it")
        return scheme.take(name, outputs, inputs, stored)

    def ignores(self, name: str) -> bool:
        """Scales of activations and of KV."""
        return name.endswith(_UNUSED)


def read(given: dict[str, Any]) -> CompressedTensors:
    """The format that quantization_config describes. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
    fields = read_fields(given, _Fields)
    if fields.sparsity_config and fields.sparsity_config.get("format", "dense") != "dense":
        raise unsupported("compressed-tensors", f"sparse weights ({fields.sparsity_config['format']})")
    if fields.transform_config and fields.transform_config.get("config_groups"):
        raise unsupported("compressed-tensors", "transforms of activations")
    groups = [group for group in fields.config_groups.values() if group.weights is not None]
    # names come before classes of modules, which fit every matrix
    schemes = [_scheme(group, group.format or fields.format) for group in groups]
    named = [has_names for group in groups for has_names in [any(map(_is_name, group.targets))]]
    ranked = sorted(zip(named, range(len(schemes)), strict=True), key=lambda pair: (not pair[0], pair[1]))
    return CompressedTensors(tuple(schemes[index] for _, index in ranked))


def _scheme(group: _Group, name: str) -> Scheme:
    weights = group.weights
    assert weights is not None, "groups without weights were left out"
    kind = (weights.type, weights.num_bits)
    if name not in _FORMATS:
        raise unsupported("compressed-tensors", f"format {name}")
    if kind not in _KINDS:
        raise unsupported("compressed-tensors", f"weights of type {weights.type} in {weights.num_bits} bits")
    strategy = weights.strategy or ("group" if weights.group_size else "tensor")
    if strategy not in _STRATEGIES:
        raise unsupported("compressed-tensors", f"strategy {strategy}")
    if strategy == "group" and (not weights.group_size or weights.group_size < 2 or weights.group_size % 2):
        raise unsupported("compressed-tensors", f"groups of {weights.group_size}")
    if strategy == "block" and weights.block_structure is None:
        raise BrokenCheckpoint("config.json, quantization_config: strategy block needs a block_structure")
    if name == "pack-quantized" and (weights.type == "float" or strategy == "block"):
        raise unsupported("compressed-tensors", f"format {name} of {weights.type} by {strategy}")
    return Scheme(
        matches=_matcher(group.targets),
        bits=weights.num_bits,
        is_float=weights.type == "float",
        is_packed=name == "pack-quantized",
        strategy=strategy,
        group=weights.group_size or 0,
        block=weights.block_structure if strategy == "block" else None,
        quantises_inputs=group.input_activations is not None and weights.type == "int",
    )


def _is_name(target: str) -> bool:
    """Whether a target names modules, and not a class of them."""
    return target.startswith("re:") or "." in target or target == "lm_head"


def _matcher(targets: list[str]) -> Callable[[str], bool]:
    try:
        patterns = [re.compile(target.removeprefix("re:")) for target in targets if target.startswith("re:")]
    except re.error as error:
        raise BrokenCheckpoint(f"config.json, quantization_config: {error}") from error
    names = {target for target in targets if _is_name(target) and not target.startswith("re:")}
    fits_all = not all(map(_is_name, targets))

    def matches(name: str) -> bool:
        return fits_all or name in names or any(pattern.match(name) for pattern in patterns)

    return matches
