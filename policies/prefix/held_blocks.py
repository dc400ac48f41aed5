"""HeldBlocks: which caches hold a block, for a search that looks many blocks up one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class HeldBlocks:
    """Caches as bits of a mask: those in an index, of which `in_index` returns the holders of a block among `of_index`,
    and `learned` ones, of which each returns whether it is believed to hold a block at a depth.

    It reads tables that change with the next event, so it is to be used at once.
    """

    def __init__(
        self, in_index: Callable[[int], int], of_index: int, learned: Sequence[Callable[[int, int], bool]]
    ) -> None:
        first = of_index.bit_length()
        self._in_index, self._of_index = in_index, of_index
        self._learned = [(1 << (first + number), holds) for number, holds in enumerate(learned)]
        self.all = of_index | sum(bit for bit, _ in self._learned)

    def __repr__(self) -> str:
        return f"<HeldBlocks of {self.all.bit_count()} caches>"

    def of(self, key: int, depth: int, among: int) -> int:
        """The caches `among` these that hold the block `key`, behind `depth` others."""
        # an index has bits for backends beyond those too
        found = self._in_index(key) & self._of_index & among
        for bit, holds in self._learned:
            if among & bit and holds(key, depth):
                found |= bit
        return found
