"""A group of which only one process is there: enough to read a part, and to compute what needs no other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shards.network.config_file import read_config
from shards.network.layers import Weights
from shards.network.loading import load_weights
from shards.parallel.cut import PartBuilder
from shards.parallel.part import Part


class LoneGroup:
    """The group of part `rank` of `size`, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, part: Tensor) -> Tensor:
        """Fails: nothing is to be added up."""
        raise AssertionError(part)

    def logits(self, part: Tensor, vocabulary: int, *, out: Tensor | None = None) -> Tensor:
        """Fails: nothing is to be gathered."""
        raise AssertionError(part, vocabulary, out)


def part_weights(folder: Path, part: Part, **options: Any) -> Weights:
    """The weights of `part` of the checkpoint in `folder`."""
    build = partial(PartBuilder.of, group=LoneGroup(part.rank, part.size), part=part)
    return load_weights(folder, read_config(folder), builder_of=build, **options)
