"""Moves of KV to other positions, as a network makes them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class KvMove(NamedTuple):
    """The KV of `tokens` positions of the `source` blocks, from position `start` on, for position `into` and those
    behind it in the `target` blocks.
    """

    source: tuple[int, ...]
    start: int
    target: tuple[int, ...]
    into: int
    tokens: int


@runtime_checkable
class BlendingNetwork(Protocol):
    """A network that can move KV to other positions. Calls take effect in order with `forward` and `submit`."""

    def blend(self, move: KvMove) -> None:
        """Copy the KV of `move`, with keys as if they had been computed at their new positions."""
        ...

    def deviations(self, move: KvMove) -> Sequence[float]:
        """How far the target's KV is from what `blend` would put there, for each token: over all layers, the squared
        distances of keys and of values, each in units of their mean square in the layer.
        """
        ...
