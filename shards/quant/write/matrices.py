"""The names of a network's matrices: those that its family multiplies rows with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shards.network.config import NetworkConfig
from shards.network.families.table import family_of
from shards.network.layers import DenseLinear
from shards.network.tensors import Builder, Form
from shards.quant.matrix import StoredMatrix

HEAD = "lm_head"
"""Stays in floating point: its errors are those of the logits, and engines expect it so."""


def matrices_of(config: NetworkConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each matrix but the head, by the names that transformers uses."""
    source = _Names()
    Builder(config, family_of(config.architecture), source, Form(_no_linear)).weights()
    return {name: shape for name, shape in source.matrices.items() if name != HEAD}


class _Names:
    """A source of tensors without numbers, which remembers the matrices that were asked for."""

    def __init__(self) -> None:
        self.dtype = torch.bfloat16
        self.matrices: dict[str, tuple[int, int]] = {}

    def has(self, name: str) -> bool:  # noqa: ARG002 - as a checkpoint in floating point
        return False

    def leave(self, prefix: str) -> None:
        raise AssertionError(f"{prefix} belongs to another process, and there is none")

    def take_bytes(self, name: str, *shape: int, own: range | None = None) -> Tensor:  # noqa: ARG002 - none are there
        raise AssertionError(f"{name} {shape} is not in a checkpoint in floating point")

    def take(
        self,
        name: str,  # noqa: ARG002 - any name
        *shape: int,
        dtype: torch.dtype | None = None,
        own: range | None = None,  # noqa: ARG002 - all of it
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        self.matrices[name] = (outputs, inputs)
        return self.take(name, outputs, inputs)


def _no_linear(parts: Iterable[StoredMatrix], bias: Tensor | None) -> DenseLinear:
    # all parts are asked for
    return DenseLinear(torch.empty(len(list(parts)), 0, device="meta"), bias)
