"""AWQ: four bits with scales and zeros of groups of inputs (arXiv 2306.00978), packed for its "gemm" kernel.

`NAME.qweight` int32 [in, out / 8], `NAME.qzeros` int32 [groups, out / 8], `NAME.scales` [groups, out]. Eight outputs
share a word, and its nibbles, from the low one on, are the outputs 0, 2, 4, 6, 1, 3, 5, 7. Source: AutoAWQ's
WQLinear_GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from shards.quant.formats.base import FLOATS, StoredTensors
from shards.quant.formats.fields import read_fields, unsupported
from shards.quant.formats.words import require_whole_words, zeros_or_none
from shards.quant.matrix import QuantisedMatrix, pack_four_bits, unpack_four_bits

METHODS = ("awq",)

_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word's nibbles."""


class _Fields(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    version: str = "gemm"


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ with a scale for each `group` inputs; -1: all of them."""

    group: int

    def holds(self, name: str, stored: StoredTensors) -> bool:
        """Whether the matrix is packed."""
        return stored.has(f"{name}.qweight")

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix."""
        require_whole_words(name, outputs, 8)
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        words = stored.take_stored(f"{name}.qweight", inputs, outputs // 8, kinds=("I32",))
        zeros = stored.take_stored(f"{name}.qzeros", groups, outputs // 8, kinds=("I32",))
        scales = stored.take_stored(f"{name}.scales", groups, outputs, kinds=FLOATS)
        numbers = pack_four_bits(_unpacked(words).t().contiguous())
        own = zeros_or_none(_unpacked(zeros).t().to(torch.int16), 8)
        return QuantisedMatrix(numbers, scales.t().contiguous(), group, own)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 - the format has nothing else
        """Nothing."""
        return False


def read(given: dict[str, Any]) -> Awq:
    """The format that quantization_config describes. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
    fields = read_fields(given, _Fields)
    if fields.bits != 4:
        raise unsupported("awq", f"{fields.bits} bits")
    if fields.version.lower() != "gemm":
        raise unsupported("awq", f"version {fields.version}")
    if fields.group_size != -1 and (fields.group_size < 2 or fields.group_size % 2):
        raise unsupported("awq", f"groups of {fields.group_size}")
    return Awq(fields.group_size)


def _unpacked(words: Tensor) -> Tensor:
    """uint8 [rows, 8 * words] from int32 [rows, words]."""
    nibbles = unpack_four_bits(words.contiguous().view(torch.uint8)).view(len(words), -1, 8)
    out = torch.empty_like(nibbles)
    out[..., list(_OUTPUTS)] = nibbles
    return out.flatten(1)
