"""FP8 (e4m3) with scales of a tensor, of rows, or of blocks, as DeepSeek and Qwen publish it.

`NAME.weight` float8_e4m3fn [out, in], with `NAME.weight_scale_inv` [out / 128, in / 128] (blocks), or
`NAME.weight_scale` [1] or [out, 1]. A number times its scale is the weight, also where the name says inv(erse).
`NAME.input_scale` is for engines that round activations too. Sources: transformers' FineGrainedFP8Config and FbgemmFp8,
vLLM's fp8.
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
from shards.quant.matrix import QuantisedMatrix

METHODS = ("fp8", "fbgemm_fp8")

_UNUSED = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")


class _Fields(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str | None = None


@dataclass(frozen=True, slots=True)
class Fp8:
    """FP8 with a scale for each `block` (rows, columns), or for each row or tensor."""

    block: tuple[int, int] | None

    def holds(self, name: str, stored: StoredTensors) -> bool:
        """Whether there are scales of this matrix."""
        return stored.has(f"{name}.weight_scale_inv") or stored.has(f"{name}.weight_scale")

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix."""
        numbers = stored.take_stored(f"{name}.weight", outputs, inputs, kinds=("F8_E4M3",))
        is_inverse = stored.has(f"{name}.weight_scale_inv")
        scales = f"{name}.weight_scale_inv" if is_inverse else f"{name}.weight_scale"
        if self.block is None:
            return QuantisedMatrix(numbers, scales_by_row(scales, outputs, stored), inputs)
        return block_matrix(numbers, scales, self.block, stored)

    def ignores(self, name: str) -> bool:
        """Scales of activations and of KV."""
        return name.endswith(_UNUSED)


def read(given: dict[str, Any]) -> Fp8:
    """The format that quantization_config describes. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
    fields = read_fields(given, _Fields)
    if fields.fmt not in (None, "e4m3"):
        raise unsupported("fp8", f"numbers in {fields.fmt}")
    if fields.weight_block_size is not None and min(fields.weight_block_size) < 1:
        raise BrokenCheckpoint(f"config.json, quantization_config: blocks of {list(fields.weight_block_size)}")
    return Fp8(fields.weight_block_size)


def scales_by_row(name: str, outputs: int, stored: StoredTensors) -> Tensor:
    """The scales [outputs, 1] of the tensor called `name`, which has one for each row or one for all."""
    shape = stored.shape(name)
    if shape not in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        raise BrokenCheckpoint(f"tensor {name} has shape {shape}; it has one scale, or one for each of {outputs} rows")
    return stored.take_stored(name, *shape, kinds=FLOATS).reshape(-1, 1).expand(outputs, 1).contiguous()


def block_matrix(numbers: Tensor, scales: str, block: tuple[int, int], stored: StoredTensors) -> QuantisedMatrix:
    """The matrix of `numbers` with the tensor called `scales`: one for each `block` of (rows, columns)."""
    (outputs, inputs), (rows, columns) = numbers.shape, block
    by_block = stored.take_stored(scales, -(-outputs // rows), -(-inputs // columns), kinds=FLOATS)
    # one for each row: 3 % more bytes, and every form of a matrix can be stacked, reordered and divided by rows
    by_row = torch.repeat_interleave(by_block, rows, 0)[:outputs].contiguous()
    return QuantisedMatrix(numbers, by_row, min(columns, inputs))
