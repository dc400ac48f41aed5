"""A LoRA adapter in memory, as CPUs compute with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class LoadedAdapter(Protocol):
    """An adapter in memory, in the form that the network computes with.

    `digest` identifies the weights: adapters with different weights differ in it, whatever their `name`.
    """

    @property
    def name(self) -> str:
        """Its name for clients."""
        ...

    @property
    def digest(self) -> str:
        """A hash of its files."""
        ...


class Update(NamedTuple):
    """Outputs `start` up to `stop` of a matrix get `up` [stop - start, r] times the numbers `ranks` of `down`'s."""

    start: int
    stop: int
    ranks: slice
    up: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one matrix [out, in]: `down` [ranks, in] is shared by all `updates`, which have its scale."""

    down: Tensor
    updates: tuple[Update, ...]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.down.nbytes + sum(update.up.nbytes for update in self.updates)

    def add_to(self, outputs: Tensor, hidden: Tensor) -> None:
        """Add the change for `hidden` [tokens, in] to `outputs` [tokens, out], in place."""
        inner = hidden @ self.down.t()
        for start, stop, ranks, up in self.updates:
            outputs[:, start:stop].addmm_(inner[:, ranks], up.t())


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The changes of a network's matrices, by the names of `shards.lora.sites`. Only the same object is equal."""

    name: str
    digest: str
    changes: Mapping[str, LowRank]

    def __repr__(self) -> str:
        return f"Adapter({self.name}: {len(self.changes)} matrices, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(change.nbytes for change in self.changes.values())
