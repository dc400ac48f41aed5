"""A step's rows sorted by their adapter, on the host, into the tiles that `shards.kernels.low_rank` multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shards.gpu.fill import Arrays
from shards.gpu.layout import FieldShape
from shards.gpu.spans import Ints
from shards.kernels.low_rank import FEW_ROWS, MANY_ROWS, AdaptedRows

Numbers = npt.NDArray[np.int32]

MOST_FEW = 256
"""Up to so many rows, as in a decoding step, tiles are small."""


def tile_rows(rows: int) -> int:
    """The rows of a tile in a product of `rows` rows."""
    return FEW_ROWS if rows <= MOST_FEW else MANY_ROWS


def most_tiles(rows: int, slots: int, most: int) -> int:
    """The most tiles of `most` rows that `rows` rows with `slots` adapters can have: one of each may not be full."""
    return min(rows, -(-rows // most) + slots)


def sorted_rows(slots: Ints, *, most: int) -> tuple[Numbers, Numbers]:
    """The rows by slot, without those of slot -1, and tiles [tiles, slot|start|stop] of at most `most` of them."""
    order = np.argsort(slots, kind="stable")
    order = order[np.count_nonzero(slots < 0) :]
    found = slots[order]
    starts = np.flatnonzero(np.diff(found, prepend=-1)).tolist()
    tiles = [
        (found[start], at, min(at + most, stop))
        for start, stop in pairwise([*starts, len(found)])
        for at in range(start, stop, most)
    ]
    return order.astype(np.int32), np.array(tiles, dtype=np.int32).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class AdaptedFields:
    """The fields that say which of `rows` rows of a product have which adapter; `of` tells several products apart.

    Tiles have at most `most` rows, and there are as many as rows with `slots` adapters may need.
    """

    rows: int
    slots: int
    most: int
    of: str = ""

    @property
    def shapes(self) -> list[FieldShape]:
        """Their names, kinds and shapes."""
        tiles = most_tiles(self.rows, self.slots, self.most)
        return [(f"adapted{self.of}", "int32", (self.rows,)), (f"adapted tiles{self.of}", "int32", (tiles, 3))]

    def fill(self, arrays: Arrays, slots: Ints) -> None:
        """Write the rows; the last ones may be padding, with no entry in `slots`."""
        sources, tiles = sorted_rows(slots, most=self.most)
        for name, values, padding in (("adapted", sources, 0), ("adapted tiles", tiles, -1)):
            arrays[f"{name}{self.of}"][: len(values)] = values
            arrays[f"{name}{self.of}"][len(values) :] = padding

    def read(self, fields: Mapping[str, Tensor]) -> AdaptedRows:
        """The rows on the device."""
        return AdaptedRows(fields[f"adapted{self.of}"], fields[f"adapted tiles{self.of}"], self.most)


def shapes_of(adapted: Sequence[AdaptedFields]) -> tuple[FieldShape, ...]:
    """The shapes of all fields of `adapted`."""
    return tuple(shape for each in adapted for shape in each.shapes)
