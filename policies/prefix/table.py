"""KeyTable: a map from 64-bit keys to small values in one flat array, oldest out first, without long pauses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.int64]

ROW_BYTES = 16
VALUE_BITS = 22
"""Bits of the value in a cell; the other bits are the stamp of its last use. A row is a key and a cell."""

MOST_VALUE = (1 << VALUE_BITS) - 1
MOST_STAMP = (1 << (64 - VALUE_BITS)) - 1
_VALUE = np.uint64(MOST_VALUE)
_STAMP_SHIFT = np.uint64(VALUE_BITS)

_SEGMENT_ROWS = 4096
"""Rows that are moved at once, in about 1 ms (busy 2.5 GHz core, 2026-11); up to twice as many in some tables."""

_FULL = 0.75
"""Share of a segment's rows that may be used; linear probing slows down steeply beyond."""

_SPLIT_FROM, _SPLIT_TO = 0.55, 0.7
"""The loads at which the first and the last segment of a generation are split in two."""

_DROPPED_SHARE = 8
"""A full segment drops the oldest 1/8 of its rows at once, so that the cost of moving is spread over many stores."""

_LEAST_ROWS = 8
_MOST_16 = 1 << 16

_FEW = 64
"""Up to this number of unplaced keys of a batch, placing them one by one is faster."""


def _unchanged(values: Values) -> Values:
    return values


def _nothing(_: Values) -> None:
    pass


class KeyTable:
    """Open addressing with linear probing in segments, which grow in number one by one: linear hashing (Litwin, 1980).

    All rows within `max_bytes` are one array from the start; the system commits only touched pages. A table
    grows by moving only one segment. At the end of growth a full segment drops its oldest rows, and `dropped` gets
    their values. Whenever a segment is moved, `renewed` replaces its values; rows with 0 are removed.

    `claim` gives a key's place in `cells`, where callers read and write `stamp << VALUE_BITS | value`; a place is valid
    until the next claim. Keys are hashes and not 0: their low bits choose the segment, their high bits the row.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        renewed: Callable[[Values], Values] = _unchanged,
        dropped: Callable[[Values], None] = _nothing,
    ) -> None:
        rows = max_bytes // ROW_BYTES
        if rows < _LEAST_ROWS:
            raise ValueError(f"a table of {max_bytes} bytes holds nothing")
        self._most_segments = 1 << max(0, (rows // _SEGMENT_ROWS).bit_length() - 1)
        self.segment_rows = rows // self._most_segments
        self._rows = np.zeros((self._most_segments * self.segment_rows, 2), np.uint64)
        self._flat = self._rows.reshape(-1)
        self.cells = self._flat.data
        self._renewed, self._dropped = renewed, dropped
        self._most_used = int(self.segment_rows * _FULL)
        self._used = [0]
        self._total = self._split = self._refreshed = 0
        self._plan(0)

    def __len__(self) -> int:
        """Rows in use, including those with stale values."""
        return self._total

    def __repr__(self) -> str:
        return f"<KeyTable {self._total} of {self.most_keys} rows used, {len(self._used)} segments>"

    @property
    def most_keys(self) -> int:
        """Most keys that it can hold at once."""
        return self._most_used * self._most_segments

    def size_bytes(self) -> int:
        """Memory of its segments."""
        return len(self._used) * self.segment_rows * ROW_BYTES

    def seek(self, key: int) -> int:
        """The place in `cells` of `key`, or of an empty cell, 0, if it is unknown."""
        cells, row = self.cells, key % self._rows_split_from
        if row < self._split_rows:
            row = key % self._rows_split_to
        at = 2 * row
        found = cells[at]
        if found != key and found:
            end = 2 * self.segment_rows * (row // self.segment_rows + 1)
            while found != key and found:
                at += 2
                if at == end:
                    at -= 2 * self.segment_rows
                found = cells[at]
        return at + 1

    def find(self, key: int) -> int | None:
        """The place in `cells` of `key`; None if it is unknown."""
        place = self.seek(key)
        return place if self.cells[place - 1] else None

    def claim(self, key: int) -> int:
        """The place in `cells` of `key`, with an empty cell if it was unknown."""
        place = self.seek(key)
        if not self.cells[place - 1]:
            segment = place // (2 * self.segment_rows)
            if self._used[segment] >= self._most_used or self._total >= self._split_at:
                self._make_room(np.array([key], np.uint64))
                return self.claim(key)
            self.cells[place - 1] = key
            self._used[segment] += 1
            self._total += 1
        return place

    @property
    def batch(self) -> int:
        """Most keys that `claim_many` takes at once: they fit even if all belong to one segment of few."""
        return self._most_used // (2 if len(self._used) >= _DROPPED_SHARE else _DROPPED_SHARE) or 1

    def claim_many(self, keys: Keys) -> Values:
        """The places of `keys`, at most `batch` and mostly unknown; the vector form of `claim`.

        A table that is full may drop old keys even for those that are known.
        """
        self._make_room(keys)
        places, at = np.full(len(keys), -1, np.int64), 2 * self._homes(keys)
        left, filled = np.arange(len(keys)), [at[:0]]
        while len(left) > _FEW:
            here, wanted = at[left], keys[left]
            free = self._flat[here] == 0
            # of several keys for the same row, one gets it
            self._flat[here[free]] = wanted[free]
            filled.append(here[free])
            got = self._flat[here] == wanted
            places[left[got]] = here[got] + 1
            left = left[~got]
            at[left] = self._next(at[left])
        filled_rows = np.unique(np.concatenate(filled))
        segments = filled_rows // (2 * self.segment_rows)
        for segment, used in zip(*np.unique(segments, return_counts=True), strict=True):
            self._used[int(segment)] += int(used)
        self._total += len(filled_rows)
        for number in left.tolist():
            places[number] = self.claim(int(keys[number]))
        return places

    def find_many(self, keys: Keys) -> Values:
        """The places of all `keys` in `cells`, -1 for unknown ones; the vector form of `find`."""
        places, at = np.full(len(keys), -1, np.int64), 2 * self._homes(keys)
        left, wanted = np.arange(len(keys)), keys
        while len(left) > _FEW:
            found = self._flat[at]
            is_here = found == wanted
            places[left[is_here]] = at[is_here] + 1
            is_open = ~is_here & (found != 0)
            left, wanted, at = left[is_open], wanted[is_open], self._next(at[is_open])
        for number in left.tolist():
            places[number] = -1 if (place := self.find(int(keys[number]))) is None else place
        return places

    def put_many(self, keys: Keys, values: Values, stamps: Keys, *, known: int | None = None) -> None:
        """Store each of `keys` with its value and stamp; where only the first `known` are there, that is faster."""
        sought = len(keys) if known is None else known
        places = self.find_many(keys[:sought])
        is_here = np.flatnonzero(places >= 0)
        self.write(places[is_here], values[is_here], stamps[is_here])
        is_missing = np.ones(len(keys), np.bool_)
        is_missing[is_here] = False
        missing, batch = np.flatnonzero(is_missing), self.batch
        for start in range(0, len(missing), batch):
            some = missing[start : start + batch]
            self.write(self.claim_many(keys[some]), values[some], stamps[some])

    def used(self) -> tuple[Keys, Values, Keys]:
        """Every key with its value and stamp, in no order; a copy."""
        rows = self._rows[: len(self._used) * self.segment_rows]
        rows = rows[rows[:, 0] != 0]
        return rows[:, 0].copy(), (rows[:, 1] & _VALUE).astype(np.int64), rows[:, 1] >> _STAMP_SHIFT

    def stamps_at(self, places: Values) -> Keys:
        """The stamps in the cells at `places`."""
        return self._flat[places] >> _STAMP_SHIFT

    def values_at(self, places: Values) -> Values:
        """The values in the cells at `places`."""
        return (self._flat[places] & _VALUE).astype(np.int64)

    def write(self, places: Values, values: Values, stamps: Keys | None = None) -> None:
        """Write the cells at `places`; without `stamps` they keep theirs."""
        kept = self._flat[places] & ~_VALUE if stamps is None else stamps << _STAMP_SHIFT
        self._flat[places] = kept | values.astype(np.uint64)

    def refresh(self) -> None:
        """Rewrite the next segment in place, without its rows with stale values."""
        self._refreshed = (self._refreshed + 1) % len(self._used)
        self._move(self._refreshed)

    def check(self) -> None:
        """Assert that each key can be found, that rows are counted, and that the bounds hold."""
        assert self._total == sum(self._used), "rows are miscounted"
        assert len(self._used) <= self._most_segments, "a segment too many"
        for segment, used in enumerate(self._used):
            start = segment * self.segment_rows
            rows = self._rows[start : start + self.segment_rows]
            keys = rows[:, 0][rows[:, 0] != 0]
            assert len(keys) == used <= self._most_used, f"segment {segment} has {len(keys)} keys and counts {used}"
            assert (self._segments(keys) == segment).all(), "a key is in a wrong segment"
            assert (self.find_many(keys) >= 0).all(), "a key cannot be found"
            assert len(np.unique(keys)) == len(keys), "a key is there twice"
        assert not self._rows[len(self._used) * self.segment_rows :].any(), "a row beyond the last segment is used"

    def _homes(self, keys: Keys) -> Values:
        """The rows where `keys` would be in an otherwise empty table."""
        rows = keys % np.uint64(self._rows_split_from)
        if self._split_rows:
            rows = np.where(rows < self._split_rows, keys % np.uint64(self._rows_split_to), rows)
        return rows.astype(np.int64)

    def _next(self, at: Values) -> Values:
        """The places of the next rows in the same segments."""
        after, whole = at + 2, 2 * self.segment_rows
        return np.where(after % whole == 0, after - whole, after)

    def _segments(self, keys: Keys) -> Values:
        return self._homes(keys) // self.segment_rows

    def _plan(self, split: int) -> None:
        """Set that `split` segments of this generation are split: the segments of keys, and the next split's load."""
        generation = len(self._used) - split
        if split == generation:
            generation, split = 2 * generation, 0
        self._split, self._split_rows = split, split * self.segment_rows
        self._rows_split_from = generation * self.segment_rows
        self._rows_split_to = 2 * self._rows_split_from
        share = _SPLIT_FROM + (_SPLIT_TO - _SPLIT_FROM) * split / generation
        self._split_at = math.inf if generation == self._most_segments else share * self.segment_rows * generation

    def _make_room(self, keys: Keys) -> None:
        """Split and move segments until `keys`, which are new, fit."""
        while self._total + len(keys) > self._split_at:
            segment = self._split
            self._used.append(0)
            self._plan(segment + 1)
            self._move(segment)
        for segment, room in zip(*np.unique(self._segments(keys), return_counts=True), strict=True):
            if self._used[segment] + room > self._most_used:
                self._move(int(segment), room=int(room))

    def _move(self, segment: int, *, room: int = 0) -> None:
        """Rewrite the rows of `segment`, each to its present place: after a split half of them to the last segment.

        If there is no `room` for so many more, the oldest are dropped; then all others stay in their segment.
        """
        start = segment * self.segment_rows
        rows = self._rows[start : start + self.segment_rows]
        kept = _rows_where(rows, rows[:, 0] != 0)
        values = self._renewed((kept[:, 1] & _VALUE).astype(np.int64))
        kept[:, 1] = kept[:, 1] & ~_VALUE | values.astype(np.uint64)
        if not values.all():
            kept, values = _rows_where(kept, values != 0), values[values != 0]
        if room and len(kept) + room > self._most_used:
            surplus = min(len(kept), max(len(kept) + room - self._most_used, len(kept) // _DROPPED_SHARE))
            oldest = np.argpartition(kept[:, 1] >> _STAMP_SHIFT, surplus - 1)[:surplus]
            self._dropped(values[oldest])
            is_kept = np.ones(len(kept), np.bool_)
            is_kept[oldest] = False
            kept = _rows_where(kept, is_kept)
        rows[:] = 0
        self._total -= self._used[segment]
        self._used[segment] = 0
        if room:
            self._fill(segment, kept)
            return
        segments = self._segments(kept[:, 0])
        for target in {segment, len(self._used) - 1}:
            self._fill(target, _rows_where(kept, segments == target))

    def _fill(self, segment: int, rows: Keys) -> None:
        """Write `rows` into `segment`, which has none of them, as if one by one in the order of homes."""
        start, steps = segment * self.segment_rows, np.arange(len(rows))
        homes = self._homes(rows[:, 0]) - start
        # numbers of 16 bits are sorted in a fifth of the time
        order = np.argsort(homes.astype(np.uint16) if self.segment_rows <= _MOST_16 else homes, kind="stable")
        places = steps + np.maximum.accumulate(homes[order] - steps)
        inside = places < self.segment_rows
        self._rows[start + places[inside]] = rows.take(order[inside], axis=0)
        # the cluster at the end continues at the beginning, in any free rows
        free = start + np.flatnonzero(self._rows[start : start + len(rows), 0] == 0)
        wrapped = rows[order[~inside]]
        self._rows[free[: len(wrapped)]] = wrapped
        self._used[segment] += len(rows)
        self._total += len(rows)


def _rows_where(rows: Keys, is_wanted: NDArray[np.bool_]) -> Keys:
    """A copy of the wanted rows; `take` is five times as fast as an index of booleans."""
    return rows.take(np.flatnonzero(is_wanted), axis=0)


def as_keys(keys: Sequence[int]) -> Keys:
    """`keys` as the table's vector operations need them. 0 marks an empty row; a key of 0 counts as 1."""
    vector = np.fromiter(keys, np.uint64, len(keys))
    vector[vector == 0] = 1
    return vector
