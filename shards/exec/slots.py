"""Places on a device for the state of answers that adjust their logits. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Slot(NamedTuple):
    """A place; if it `is_new`, it holds nothing of its sequence yet."""

    place: int
    is_new: bool


class Slots:
    """`size` places. A sequence keeps its own until another one needs it: then the one that drew longest ago gives way.

    So nothing has to be told of sequences that end or wait, and one that comes back either finds its state or begins.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: OrderedDict[int, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"Slots({len(self._places)} of {self.size})"

    def take(self, arrivals: Collection[int]) -> Mapping[int, Slot]:
        """The slots of these sequences, which draw in one step. Raises ValueError if there are too many."""
        if len(arrivals) > self.size:
            raise ValueError(f"{len(arrivals)} sequences adjust their logits, and there is room for {self.size}")
        taken: dict[int, Slot] = {}
        for arrival in arrivals:
            if arrival in self._places:
                self._places.move_to_end(arrival)
                taken[arrival] = Slot(self._places[arrival], is_new=False)
        for arrival in arrivals:
            if arrival not in taken:
                place = len(self._places) if len(self._places) < self.size else self._places.popitem(last=False)[1]
                self._places[arrival] = place
                taken[arrival] = Slot(place, is_new=True)
        return taken
