"""Random matrices in every form that `QuantisedMatrix` has."""

from __future__ import annotations

import torch

from shards.quant.matrix import QuantisedMatrix

GROUP = 32

KINDS = ("fp8", "fp8 in groups", "int8", "int8 in groups, with zeros", "int4", "int4 by row", "int4 with zeros")


def a_matrix(kind: str, outputs: int, inputs: int, device: torch.device) -> QuantisedMatrix:
    """A matrix [outputs, inputs] of this kind with weights near 1."""
    group = GROUP if "groups" in kind or kind in ("int4", "int4 with zeros") else inputs
    groups = -(-inputs // group)
    scales, zeros = torch.rand(outputs, groups) + 0.5, None
    if kind.startswith("fp8"):
        numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    elif kind.startswith("int8"):
        numbers, scales = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), scales / 64
    else:
        # every byte is a pair of numbers
        numbers, scales = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8), scales / 4
    if "zeros" in kind:
        low, high = (-128, 129) if kind.startswith("int8") else (0, 17)
        zeros = torch.randint(low, high, (outputs, groups), dtype=torch.int16).to(device)
    return QuantisedMatrix(numbers.to(device), scales.to(device), group, zeros)
