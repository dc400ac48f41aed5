"""Tiny checkpoints in every published quantised form, and the same numbers in floating point.

The packings are written here from the documents of each format, number by number, and share no code with the readers;
but MXFP4, which `tests.shards.quant.test_mxfp4` compares with its document.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shards.quant.mxfp4 import GROUP as MXFP4_GROUP
from shards.quant.mxfp4 import dequantise
from tests.shards.tiny_checkpoints import save_checkpoint

GROUP = 32
BLOCK = 48
"""Neither the rows nor the columns of most matrices are a multiple of it."""

_MATRICES = re.compile(r".*(_proj|_proj_with_mqa|experts\.\d+\.w[123])\.weight")
_LARGEST_E4M3 = 448.0


class Stored(NamedTuple):
    """One matrix: its tensors by suffix, and the float32 matrix that they stand for."""

    tensors: dict[str, Tensor]
    meant: Tensor


class Scheme(NamedTuple):
    """A published form: how a matrix is stored, and quantization_config."""

    store: Callable[[Tensor], Stored]
    config: dict[str, Any]


def save_quantised(folder: Path, kind: str, scheme: str, *, dtype: torch.dtype = torch.float32) -> None:
    """A checkpoint of this kind in three folders: `plain`, `quantised` and `meant`, the latter dequantised."""
    save_checkpoint(folder / "plain", kind, dtype=dtype)
    plain, (store, config) = load_file(folder / "plain" / "model.safetensors"), SCHEMES[scheme]
    torch.manual_seed(0)
    quantised: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if not _MATRICES.fullmatch(name):
            quantised[name] = meant[name] = tensor
            continue
        stored = store(tensor.float())
        prefix = name.removesuffix(".weight")
        quantised |= {f"{prefix}.{suffix}": held.contiguous() for suffix, held in stored.tensors.items()}
        meant[name] = stored.meant
    for form, tensors in (("quantised", quantised), ("meant", meant)):
        shutil.copytree(folder / "plain", folder / form)
        save_file(tensors, folder / form / "model.safetensors", {"format": "pt"})
    path = folder / "quantised" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def save_mxfp4(folder: Path) -> None:
    """A gpt-oss with random experts in MXFP4 in the folder `quantised`, and dequantised in `meant`."""
    save_checkpoint(folder / "meant", "gpt-oss")
    tensors = load_file(folder / "meant" / "model.safetensors")
    meant, packed, generator = dict(tensors), dict(tensors), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors[name].shape
        shape = (count, outputs, inputs // MXFP4_GROUP)
        blocks = torch.randint(0, 256, (*shape, MXFP4_GROUP // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = dequantise(blocks, scales, torch.float32).transpose(1, 2).contiguous()
        del packed[name]
    shutil.copytree(folder / "meant", folder / "quantised")
    for form, held in (("quantised", packed), ("meant", meant)):
        save_file(held, folder / form / "model.safetensors", {"format": "pt"})


def _e4m3(matrix: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3, and what they mean; `scales` are as large as the matrix."""
    numbers = (matrix / scales).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return numbers, numbers.float() * scales


def _fp8_tensor(matrix: Tensor) -> Stored:
    scale = matrix.abs().max() / _LARGEST_E4M3
    numbers, meant = _e4m3(matrix, scale.expand(matrix.shape))
    return Stored({"weight": numbers, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.1)}, meant)


def _fp8_channel(matrix: Tensor) -> Stored:
    scales = matrix.abs().amax(1, keepdim=True) / _LARGEST_E4M3
    numbers, meant = _e4m3(matrix, scales.expand(matrix.shape))
    return Stored({"weight": numbers, "weight_scale": scales}, meant)


def _fp8_block(suffix: str) -> Callable[[Tensor], Stored]:
    def store(matrix: Tensor) -> Stored:
        rows, columns = matrix.shape
        scales, wide = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK)), torch.empty_like(matrix)
        for down in range(scales.shape[0]):
            for right in range(scales.shape[1]):
                at = (slice(down * BLOCK, (down + 1) * BLOCK), slice(right * BLOCK, (right + 1) * BLOCK))
                scales[down, right] = matrix[at].abs().max() / _LARGEST_E4M3
                wide[at] = scales[down, right]
        numbers, meant = _e4m3(matrix, wide)
        return Stored({"weight": numbers, suffix: scales}, meant)

    return store


class _Grouped(NamedTuple):
    """Numbers from 0 on, [out, in]; the scales and zeros of groups [out, groups]; the group of each column."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def meant(self) -> Tensor:
        return (self.numbers - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def _grouped(matrix: Tensor, bits: int, *, group: int = GROUP, symmetric: bool, shuffled: bool = False) -> _Grouped:
    """Each group rounded to its range, or to a range around 0. `shuffled`: columns are in groups at random."""
    levels = 2**bits - 1
    columns = matrix.shape[1]
    groups = torch.arange(columns) // group
    # matrices that read the same inputs have the same order, as in published files
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    groups = groups[order] if shuffled else groups
    scales = torch.empty(len(matrix), int(groups.max()) + 1)
    zeros = torch.empty_like(scales)
    for number in range(scales.shape[1]):
        own = matrix[:, groups == number]
        if symmetric:
            scales[:, number] = own.abs().amax(1) / (levels // 2)
            zeros[:, number] = (levels + 1) // 2
        else:
            least, most = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, number] = (most - least) / levels
            # the first format of GPTQ cannot store a zero of 0
            zeros[:, number] = (-least / scales[:, number]).round().clamp(1, levels)
    scales = scales.half().float()
    numbers = (matrix / scales[:, groups]).round().add(zeros[:, groups]).clamp(0, levels)
    return _Grouped(numbers, scales, zeros, groups)


def _words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, numbers / (32 / bits)]: word w has, at bits n * `bits`, its number order[n] (n without an order)."""
    per_word = 32 // bits
    rows, count = numbers.shape
    padded = torch.zeros(rows, -(-count // per_word) * per_word, dtype=torch.int64)
    padded[:, :count] = numbers.long()
    words = torch.zeros(rows, padded.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        words |= padded[:, number::per_word] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _awq(matrix: Tensor) -> Stored:
    grouped = _grouped(matrix, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _words(grouped.numbers.t(), 4, order),
        "qzeros": _words(grouped.zeros.t(), 4, order),
        "scales": grouped.scales.t().half(),
    }
    return Stored(tensors, grouped.meant)


def _gptq(bits: int, *, symmetric: bool, shuffled: bool = False, subtracted: int = 1) -> Callable[[Tensor], Stored]:
    def store(matrix: Tensor) -> Stored:
        grouped = _grouped(matrix, bits, symmetric=symmetric, shuffled=shuffled)
        tensors = {
            "qweight": _words(grouped.numbers, bits).t(),
            "qzeros": _words(grouped.zeros.t() - subtracted, bits),
            "scales": grouped.scales.t().half(),
            "g_idx": grouped.groups.int(),
        }
        return Stored(tensors, grouped.meant)

    return store


def _packed(bits: int, *, symmetric: bool, shuffled: bool = False, group: int = GROUP) -> Callable[[Tensor], Stored]:
    def store(matrix: Tensor) -> Stored:
        width = matrix.shape[1] if group == -1 else group
        grouped = _grouped(matrix, bits, symmetric=symmetric, shuffled=shuffled, group=width)
        tensors = {
            "weight_packed": _words(grouped.numbers, bits),
            "weight_scale": grouped.scales.bfloat16() if symmetric and bits == 8 else grouped.scales,
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            # along the rows of a group
            tensors["weight_zero_point"] = _words(grouped.zeros.t(), bits).t()
        if shuffled:
            tensors["weight_g_idx"] = grouped.groups.int()
        meant = grouped._replace(scales=tensors["weight_scale"].float()).meant
        return Stored(tensors, meant)

    return store


def _int8(*, symmetric: bool) -> Callable[[Tensor], Stored]:
    def store(matrix: Tensor) -> Stored:
        grouped = _grouped(matrix, 8, symmetric=symmetric, group=matrix.shape[1])
        tensors = {"weight": (grouped.numbers - 128).to(torch.int8), "weight_scale": grouped.scales}
        if not symmetric:
            tensors["weight_zero_point"] = (grouped.zeros - 128).to(torch.int8)
        return Stored(tensors, grouped.meant)

    return store


def _compressed(name: str, *, inputs: bool = False, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | weights
    activations = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": True} | more


_BLOCKS = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
_IN_GROUPS = {"strategy": "group", "group_size": GROUP}

SCHEMES: dict[str, Scheme] = {
    "fp8, per tensor": Scheme(_fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, blocks": Scheme(
        _fp8_block("weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "fbgemm fp8, per channel": Scheme(_fp8_channel, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "compressed-tensors, fp8 per tensor": Scheme(
        _fp8_tensor, _compressed("float-quantized", inputs=True, type="float", strategy="tensor")
    ),
    "compressed-tensors, fp8 per channel": Scheme(
        _fp8_channel, _compressed("float-quantized", inputs=True, type="float", strategy="channel")
    ),
    "compressed-tensors, fp8 blocks": Scheme(
        _fp8_block("weight_scale"), _compressed("float-quantized", inputs=True, type="float", **_BLOCKS)
    ),
    "compressed-tensors, int8 W8A8": Scheme(
        _int8(symmetric=True), _compressed("int-quantized", inputs=True, strategy="channel")
    ),
    "compressed-tensors, int8 W8A8 with zeros": Scheme(
        _int8(symmetric=False), _compressed("int-quantized", inputs=True, strategy="channel", symmetric=False)
    ),
    "compressed-tensors, int8 W8A16": Scheme(
        _packed(8, symmetric=True, group=-1), _compressed("pack-quantized", strategy="channel")
    ),
    "compressed-tensors, int8 W8A16 in groups, with zeros": Scheme(
        _packed(8, symmetric=False), _compressed("pack-quantized", symmetric=False, **_IN_GROUPS)
    ),
    "compressed-tensors, int4 W4A16": Scheme(
        _packed(4, symmetric=True), _compressed("pack-quantized", num_bits=4, **_IN_GROUPS)
    ),
    "compressed-tensors, int4 W4A16 with zeros": Scheme(
        _packed(4, symmetric=False), _compressed("pack-quantized", num_bits=4, symmetric=False, **_IN_GROUPS)
    ),
    "compressed-tensors, int4 W4A16 by activation": Scheme(
        _packed(4, symmetric=True, shuffled=True),
        _compressed("pack-quantized", num_bits=4, actorder="group", **_IN_GROUPS),
    ),
    "awq": Scheme(_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": Scheme(_gptq(4, symmetric=True), _gptq_config(4)),
    "gptq, by activation, with zeros": Scheme(
        _gptq(4, symmetric=False, shuffled=True), _gptq_config(4, desc_act=True, sym=False)
    ),
    "gptq v2, with zeros": Scheme(
        _gptq(4, symmetric=False, subtracted=0), _gptq_config(4, sym=False, checkpoint_format="gptq_v2")
    ),
    "gptq, 8 bits, by activation": Scheme(_gptq(8, symmetric=True, shuffled=True), _gptq_config(8, desc_act=True)),
}
"""By name: each published form that a shard reads."""
