"""GPTQ: 4 or 8 bits with scales and zeros of groups of inputs (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

`NAME.qweight` int32 [in * bits / 32, out], `NAME.qzeros` int32 [groups, out * bits / 32], `NAME.scales` [groups, out],
`NAME.g_idx` int32 [in]: the group of each input, in any order if inputs were quantised by activation (desc_act). Zeros
are stored less 1, except in the format gptq_v2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from shards.network.errors import BrokenCheckpoint
from shards.quant.formats.base import FLOATS, StoredTensors
from shards.quant.formats.fields import read_fields, unsupported
from shards.quant.formats.words import require_whole_words, unpacked_words, zeros_or_none
from shards.quant.matrix import QuantisedMatrix, ordered_by_group, pack_four_bits

METHODS = ("gptq",)

_ADDED = {"gptq": 1, "gptq_v2": 0}
"""By format: the number to add to stored zeros."""


class _Fields(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    dynamic: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ in `bits` with a scale for each `group` inputs; -1: all of them. `added` is added to stored zeros."""

    bits: int
    group: int
    added: int

    def holds(self, name: str, stored: StoredTensors) -> bool:
        """Whether the matrix is packed."""
        return stored.has(f"{name}.qweight")

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix, with the inputs of a group beside each other."""
        per_word = 32 // self.bits
        require_whole_words(name, inputs, per_word)
        require_whole_words(name, outputs, per_word)
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        words = stored.take_stored(f"{name}.qweight", inputs // per_word, outputs, kinds=("I32",))
        zeros = stored.take_stored(f"{name}.qzeros", groups, outputs // per_word, kinds=("I32",))
        scales = stored.take_stored(f"{name}.scales", groups, outputs, kinds=FLOATS).t().contiguous()
        numbers, order = unpacked_words(words.t(), self.bits), None
        if stored.has(f"{name}.g_idx"):
            of_inputs = stored.take_stored(f"{name}.g_idx", inputs, kinds=("I32",))
            numbers, order = _ordered(name, numbers, of_inputs, group)
        by_row = unpacked_words(zeros, self.bits).t().to(torch.int16) + self.added
        if self.bits == 4:
            return QuantisedMatrix(pack_four_bits(numbers), scales, group, zeros_or_none(by_row, 8), order)
        signed = (numbers ^ 128).view(torch.int8)
        return QuantisedMatrix(signed, scales, group, zeros_or_none(by_row - 128, 0), order)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 - the format has nothing else
        """Nothing."""
        return False


def read(given: dict[str, Any]) -> Gptq:
    """The format that quantization_config describes. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
    fields = read_fields(given, _Fields)
    if fields.bits not in (4, 8):
        raise unsupported("gptq", f"{fields.bits} bits")
    if fields.is_marlin_format or fields.checkpoint_format not in _ADDED:
        raise unsupported("gptq", "marlin's packing" if fields.is_marlin_format else fields.checkpoint_format)
    if any(not pattern.startswith("-:") for pattern in fields.dynamic or ()):
        raise unsupported("gptq", "other bits or groups in some layers (dynamic)")
    if fields.group_size != -1 and (fields.group_size < 2 or fields.group_size % 2):
        raise unsupported("gptq", f"groups of {fields.group_size}")
    return Gptq(fields.bits, fields.group_size, _ADDED[fields.checkpoint_format])


def _ordered(name: str, numbers: Tensor, groups: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
    try:
        return ordered_by_group(numbers, groups, group)
    except ValueError as error:
        raise BrokenCheckpoint(f"matrix {name}: {error}") from error
