"""The published forms that `pointsman quantize` writes: the tensors of a matrix, and quantization_config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from shards.quant.matrix import pack_four_bits
from shards.quant.write.rounding import to_fp8, to_fp8_blocks, to_int4, to_int8

FormName = Literal["fp8", "fp8-block", "int8", "int4"]

FORMS: tuple[FormName, ...] = get_args(FormName)

BLOCK = 128
"""The blocks of DeepSeek's and Qwen's files."""

GROUPS = (128, 64, 32)
"""Columns with a scale in common in four bits: the first that divides the inputs of all matrices."""


class WrittenForm(Protocol):
    """A published form."""

    def tensors(self, matrix: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a float32 `matrix` [out, in], by suffix of its name; `dtype` is that of the checkpoint."""
        ...

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """quantization_config; the matrices called `left` stay in floating point."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """compressed-tensors, e4m3 by row; engines that can round activations by token."""

    def tensors(self, matrix: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The numbers and scales."""
        numbers, scales = to_fp8(matrix, _scale_dtype(dtype))
        return {"weight": numbers, "weight_scale": scales}

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """quantization_config."""
        return _compressed("float-quantized", _channel(8, "float"), _by_token("float"), left)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """e4m3 in blocks of 128 x 128, as DeepSeek and Qwen publish."""

    def tensors(self, matrix: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:  # noqa: ARG002 - scales are float32
        """The numbers and scales."""
        numbers, scales = to_fp8_blocks(matrix, BLOCK)
        return {"weight": numbers, "weight_scale_inv": scales}

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """quantization_config."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(left),
        }


@dataclass(frozen=True, slots=True)
class Int8:
    """compressed-tensors, int8 by row, activations by token (W8A8)."""

    def tensors(self, matrix: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The numbers and scales."""
        numbers, scales = to_int8(matrix, _scale_dtype(dtype))
        return {"weight": numbers, "weight_scale": scales}

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """quantization_config."""
        return _compressed("int-quantized", _channel(8, "int"), _by_token("int"), left)


@dataclass(frozen=True, slots=True)
class Int4:
    """compressed-tensors, four bits in groups of columns (W4A16), packed."""

    group: int

    def tensors(self, matrix: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The packed numbers, their shape, and scales."""
        numbers, scales = to_int4(matrix, self.group, dtype)
        raised = (numbers + 8).to(torch.uint8)
        # eight numbers fill a word; a group is a multiple of them
        packed = pack_four_bits(raised).view(torch.int32)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(matrix.shape)}

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """quantization_config."""
        weights = _channel(4, "int") | {"strategy": "group", "group_size": self.group}
        return _compressed("pack-quantized", weights, None, left)


def form_of(name: FormName, inputs: Sequence[int]) -> WrittenForm:
    """The form called `name`, for matrices with these numbers of inputs. Raises ValueError if it does not fit them."""
    others: dict[FormName, WrittenForm] = {"fp8": Fp8Rows(), "fp8-block": Fp8Blocks(), "int8": Int8()}
    if name != "int4":
        return others[name]
    for group in GROUPS:
        if not any(count % group for count in inputs):
            return Int4(group)
    odd = next(count for count in inputs if count % GROUPS[-1])
    raise ValueError(f"int4 needs inputs in groups of {GROUPS[-1]}, and a matrix has {odd}; use int8 or fp8")


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    # in float16 a scale of e4m3 would be subnormal
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _channel(bits: int, kind: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}


def _by_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _compressed(
    name: str, weights: dict[str, Any], inputs: dict[str, Any] | None, left: Sequence[str]
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(left),
        "kv_cache_scheme": None,
    }
