"""The blocks on disk, and the order in which they are deleted. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from shards.kv.raw_block import BlockLabel


@dataclass(slots=True, eq=False)
class DiskEntry:
    """A block on disk, or one that `is_written` only soon. Its file takes `size` bytes.

    `domain` is the hash of its cache domain and `chain` that of its whole prefix. The least `worth` is deleted first.
    """

    key: int
    parent: int
    depth: int
    domain: bytes
    chain: bytes
    size: int
    worth: float
    is_written: bool = False
    number: int = 0


class DiskIndex:
    """The entries by key. O(log n) for each call, except for a whole domain.

    The entry of least worth among those without children is the next `victim`: a child that outlives its parent cannot
    be found. An entry `in_use` is passed over until `rest`.
    """

    def __init__(self) -> None:
        self._entries: dict[int, DiskEntry] = {}
        self._children: Counter[int] = Counter()
        self._in_use: set[int] = set()
        self._heap: list[tuple[float, int, DiskEntry]] = []
        self._pushed = 0
        self.used = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[DiskEntry]:
        return iter(self._entries.values())

    def __contains__(self, entry: DiskEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def __repr__(self) -> str:
        return f"DiskIndex({len(self)} blocks, {self.used} bytes)"

    def get(self, key: int) -> DiskEntry | None:
        """The entry called `key`, whatever block it is."""
        return self._entries.get(key)

    def find(self, label: BlockLabel) -> DiskEntry | None:
        """The entry of exactly the block of `label`, once it is written."""
        entry = self._entries.get(label.key)
        return entry if entry is not None and entry.is_written and entry.chain == label.chain else None

    def add(self, label: BlockLabel, *, size: int, worth: float) -> DiskEntry:
        """A new entry, in use; its key must be free."""
        assert label.key not in self._entries, "a key names one file"
        entry = DiskEntry(label.key, label.parent, label.depth, label.domain, label.chain, size, worth)
        self._entries[label.key] = entry
        self._children[label.parent] += 1
        self._in_use.add(label.key)
        self.used += size
        return entry

    def resize(self, entry: DiskEntry, size: int) -> None:
        """Let the file of `entry` take `size` bytes."""
        self.used += size - entry.size
        entry.size = size

    def remove(self, entry: DiskEntry) -> None:
        """Remove `entry`; no error if it is not a member."""
        if entry not in self:
            return
        del self._entries[entry.key]
        self._in_use.discard(entry.key)
        self.used -= entry.size
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            parent = self._entries.get(entry.parent)
            if parent is not None:
                self._ripen(parent)

    def raise_worth(self, entry: DiskEntry, worth: float) -> None:
        """Raise the worth of `entry` to `worth`."""
        if worth > entry.worth:
            entry.worth = worth
            self._ripen(entry)

    def use(self, entry: DiskEntry) -> None:
        """Keep `entry` until `rest`."""
        self._in_use.add(entry.key)

    def rest(self, entry: DiskEntry, worth: float) -> None:
        """End the use of `entry`, and raise its worth to `worth`."""
        if entry in self:
            self._in_use.discard(entry.key)
            entry.worth = max(entry.worth, worth)
            self._ripen(entry)

    def victim(self) -> DiskEntry | None:
        """The entry of least worth that may be deleted; None if there is none."""
        while self._heap:
            worth, number, entry = self._heap[0]
            is_ripe = entry in self and entry.number == number and entry.key not in self._children
            if is_ripe and entry.key not in self._in_use and entry.worth == worth:
                return entry
            heappop(self._heap)
        return None

    def check(self) -> None:
        """Assert that children and bytes are counted, and that each entry without children can be deleted."""
        assert Counter(entry.parent for entry in self) == self._children, "children on disk are miscounted"
        assert sum(entry.size for entry in self) == self.used, "bytes on disk are miscounted"
        assert self._in_use <= self._entries.keys(), "a deleted block is in use"
        entries = {(entry.key, number) for _, number, entry in self._heap}
        for entry in self:
            assert entry.is_written or entry.key in self._in_use, "a block is never written"
            if entry.key not in self._children and entry.key not in self._in_use:
                assert (entry.key, entry.number) in entries, "a block could never be deleted"

    def _ripen(self, entry: DiskEntry) -> None:
        if entry.key in self._children or entry.key in self._in_use:
            return
        self._pushed += 1
        entry.number = self._pushed
        heappush(self._heap, (entry.worth, entry.number, entry))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if item[2] in self and item[2].number == item[1]]
            heapify(self._heap)
