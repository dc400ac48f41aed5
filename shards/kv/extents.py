"""Free block ids, organised so that a growing sequence gets the block behind its last one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise


class FreeBlocks:
    """The free ids of 0 .. size-1 as sorted, disjoint extents that never touch.

    A sequence with consecutive blocks is one extent of memory, which a CPU reads without gathering. So `take`
    continues behind a given block if possible, and otherwise starts in the middle of the largest extent. The
    beginning of that is left to the sequence that grows towards it.
    """

    def __init__(self, size: int) -> None:
        self._starts = [0] if size else []
        self._ends = [size] if size else []
        self._count = size

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        at = bisect_right(self._starts, block) - 1
        return at >= 0 and block < self._ends[at]

    def __repr__(self) -> str:
        return f"FreeBlocks({self._count} in {len(self._starts)} extents)"

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Take `count` free ids: first those behind `after`, then in as few runs as possible.

        Raises IndexError if fewer are free; nothing is taken then.
        """
        if count > self._count:
            raise IndexError(f"{count} blocks are wanted and {self._count} are free")
        taken: list[int] = []
        if after is not None:
            at = bisect_left(self._starts, after + 1)
            if at < len(self._starts) and self._starts[at] == after + 1:
                taken += self._carve(at, after + 1, count)
        while len(taken) < count:
            wanted = count - len(taken)
            at = max(range(len(self._starts)), key=lambda i: self._ends[i] - self._starts[i])
            start = self._starts[at]
            slack = self._ends[at] - start - wanted
            taken += self._carve(at, start + slack // 2 if start and slack > 0 else start, wanted)
        return taken

    def give(self, block: int) -> None:
        """Make `block` free; it must not be free already."""
        at = bisect_left(self._starts, block)
        joins_left = at > 0 and self._ends[at - 1] == block
        joins_right = at < len(self._starts) and self._starts[at] == block + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] += 1
        elif joins_right:
            self._starts[at] -= 1
        else:
            self._starts.insert(at, block)
            self._ends.insert(at, block + 1)
        self._count += 1

    def ids(self) -> list[int]:
        """All free ids, ascending."""
        return [block for start, end in zip(self._starts, self._ends, strict=True) for block in range(start, end)]

    def check(self) -> None:
        """Assert that the extents are sorted, disjoint and counted."""
        edges = [edge for extent in zip(self._starts, self._ends, strict=True) for edge in extent]
        assert all(left < right for left, right in pairwise(edges)), "extents overlap or touch"
        assert len(self.ids()) == self._count, "free blocks are miscounted"

    def _carve(self, at: int, start: int, wanted: int) -> list[int]:
        """Cut up to `wanted` ids out of extent `at`, beginning with `start`, which lies in it."""
        left, right = self._starts[at], self._ends[at]
        end = min(right, start + wanted)
        rest = [(a, b) for a, b in ((left, start), (end, right)) if a < b]
        self._starts[at : at + 1] = [a for a, _ in rest]
        self._ends[at : at + 1] = [b for _, b in rest]
        self._count -= end - start
        return list(range(start, end))
