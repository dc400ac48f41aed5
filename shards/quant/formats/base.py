"""The interface of a format, and how it gets at a checkpoint's tensors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shards.quant.matrix import QuantisedMatrix

FLOATS = ("F32", "F16", "BF16")
"""Types of scales, as safetensors names them."""


class StoredTensors(Protocol):
    """The tensors of a checkpoint as they are stored, by name."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor called `name`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`. Raises BrokenCheckpoint if it is missing."""
        ...

    def take_stored(self, name: str, *shape: int, kinds: tuple[str, ...]) -> Tensor:
        """The tensor called `name`, which has this shape and one of these types of safetensors.

        Raises BrokenCheckpoint or UnsupportedCheckpoint.
        """
        ...


class WeightFormat(Protocol):
    """How a checkpoint stores its quantised matrices."""

    def holds(self, name: str, stored: StoredTensors) -> bool:
        """Whether the matrix called `name` is quantised; formats leave some as they were."""
        ...

    def take(self, name: str, outputs: int, inputs: int, stored: StoredTensors) -> QuantisedMatrix:
        """The matrix [outputs, inputs] called `name`. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a shard does not need the tensor called `name`, such as a scale of activations."""
        ...
