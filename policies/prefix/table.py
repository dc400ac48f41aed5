"""KeyTable: 64-bit keys to small values in one flat array, oldest out first, without a long pause."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.int64]

ROW_BYTES = 16
VALUE_BITS = 22
"""A row is a key and a cell: a value of so many bits, and the stamp of its last use in the others."""

MOST_VALUE = (1 << VALUE_BITS) - 1
_STAMPS = 1 << (64 - VALUE_BITS)

_SEGMENT_ROWS = 4096
"""Rows that are moved at once: half a millisecond (busy 2.5 GHz core)."""

_FULL = 0.8
"""Share of a segment's rows that may be used; linear probing slows down steeply beyond."""

_SPLIT_FROM, _SPLIT_TO = 0.62, 0.78
"""The load at which the first segment of a generation is split in two, and the last one."""

_DROPPED_SHARE = 8
"""A full segment drops the oldest 1/8 of its rows at once, so that moving the others is paid by many stores."""

_BATCH = 1024


def _unchanged(values: Values) -> Values:
    return values


def _nothing(_: Values) -> None:
    pass


class KeyTable:
    """Open addressing with linear probing in segments, which grow in number one by one: linear hashing (Litwin, 1980).

    All rows that `max_bytes` allow are one array from the start, of which the system commits what is touched: a table
    grows without moving but one segment. At the end of growth a full segment drops its oldest rows, and `dropped` hears
    their values. Whenever a segment is moved, `renewed` says what its values have become; rows with 0 go.

    `claim` gives a key's place in `cells`, where callers read and write `cell(value, stamp)`; the place holds until the
    next claim.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        renewed: Callable[[Values], Values] = _unchanged,
        dropped: Callable[[Values], None] = _nothing,
    ) -> None:
        rows = max_bytes // ROW_BYTES
        if rows < 4:
            raise ValueError(f"a table of {max_bytes} bytes holds nothing")
        self._most_segments = 1 << max(0, (rows // _SEGMENT_ROWS).bit_length() - 1)
        self.segment_rows = rows // self._most_segments
        self._rows = np.zeros((self._most_segments * self.segment_rows, 2), np.uint64)
        self._keys = self._rows[:, 0]
        self.cells = memoryview(self._rows.reshape(-1))
        self._renewed, self._dropped = renewed, dropped
        self._most_used = int(self.segment_rows * _FULL)
        self._used = [0]
        self._generation, self._split = 0, 0
        self._total, self._split_at = 0, 0.0
        self._refreshed = 0
        self._plan_split()

    def __len__(self) -> int:
        """Rows in use, also those whose values are stale."""
        return self._total

    def __repr__(self) -> str:
        return f"<KeyTable {self._total} of {self.most_keys} rows used, {len(self._used)} segments>"

    @property
    def most_keys(self) -> int:
        """Keys that it can ever hold at once."""
        return self._most_used * self._most_segments

    def size_bytes(self) -> int:
        """What its segments take."""
        return len(self._used) * self.segment_rows * ROW_BYTES

    def find(self, key: int) -> int | None:
        """The place in `cells` of what is known of `key`."""
        cells = self.cells
        segment, rows = self._segment(key), self.segment_rows
        start = 2 * segment * rows
        at = start + 2 * ((key >> 40) * rows >> 24)
        end = start + 2 * rows
        while (found := cells[at]) != key:
            if not found:
                return None
            at += 2
            if at == end:
                at = start
        return at + 1

    def claim(self, key: int) -> int:
        """The place in `cells` of `key`, with an empty cell if it was not known; `key` is not 0."""
        at = self.find(key)
        if at is not None:
            return at
        segment = self._segment(key)
        if self._used[segment] >= self._most_used:
            self._move(segment, room=1)
        while self._total >= self._split_at:
            self._split_next()
        segment, rows, cells = self._segment(key), self.segment_rows, self.cells
        start = 2 * segment * rows
        at = start + 2 * ((key >> 40) * rows >> 24)
        while cells[at]:
            at += 2
            if at == start + 2 * rows:
                at = start
        cells[at] = key
        self._used[segment] += 1
        self._total += 1
        return at + 1

    def find_many(self, keys: Keys) -> Values:
        """The places of all `keys` in `cells`, -1 where one is not known; the vector form of `find`."""
        return self._search(keys, self._segments(keys))

    def claim_many(self, keys: Keys) -> Values:
        """The places of all `keys`, at most `batch` of them and none 0; the vector form of `claim`."""
        known = self.find_many(keys)
        missing = keys[known < 0]
        if not len(missing):
            return known
        self._make_room(keys, missing)
        return self._search(keys, self._segments(keys), insert=True)

    def refresh(self) -> None:
        """Move the next segment where it is, so that rows with stale values go."""
        self._refreshed = (self._refreshed + 1) % len(self._used)
        self._move(self._refreshed)

    @property
    def batch(self) -> int:
        """How many keys `claim_many` takes at once."""
        return min(_BATCH, self._most_used // _DROPPED_SHARE)

    def values_at(self, places: Values) -> Values:
        """The values in the cells at `places`."""
        return (self._flat()[places] & np.uint64(MOST_VALUE)).astype(np.int64)

    def write(self, places: Values, values: Values, stamps: Keys | None = None) -> None:
        """Write the cells at `places`; without `stamps` they keep theirs."""
        flat = self._flat()
        kept = flat[places] & ~np.uint64(MOST_VALUE) if stamps is None else (stamps << np.uint64(VALUE_BITS))
        flat[places] = kept | values.astype(np.uint64)

    def check(self) -> None:
        """Prove that each key can be found, that rows are counted, and that the bounds hold."""
        assert self._total == sum(self._used), "rows are miscounted"
        assert len(self._used) == (1 << self._generation) + self._split <= self._most_segments, "a segment too many"
        for segment, used in enumerate(self._used):
            start = segment * self.segment_rows
            rows = self._rows[start : start + self.segment_rows]
            keys = rows[:, 0][rows[:, 0] != 0]
            assert len(keys) == used <= self._most_used, f"segment {segment} has {len(keys)} keys and counts {used}"
            assert (self._segments(keys) == segment).all(), "a key is in a segment of others"
            places = self.find_many(keys)
            assert (places >= 0).all(), "a key cannot be found"
            assert len(np.unique(keys)) == len(keys), "a key is there twice"
        assert not self._keys[len(self._used) * self.segment_rows :].any(), "a row beyond the last segment is used"

    def _flat(self) -> Keys:
        return self._rows.reshape(-1)

    def _segment(self, key: int) -> int:
        segment = key & ((1 << self._generation) - 1)
        return segment if segment >= self._split else key & ((2 << self._generation) - 1)

    def _segments(self, keys: Keys) -> Values:
        low = keys & np.uint64((1 << self._generation) - 1)
        if self._split:
            low = np.where(low < self._split, keys & np.uint64((2 << self._generation) - 1), low)
        return low.astype(np.int64)

    def _plan_split(self) -> None:
        """Say how many rows are used before another segment is split."""
        segments = 1 << self._generation
        share = _SPLIT_FROM + (_SPLIT_TO - _SPLIT_FROM) * self._split / segments
        self._split_at = math.inf if segments == self._most_segments else share * self.segment_rows * segments

    def _make_room(self, keys: Keys, missing: Keys) -> None:
        while self._total + len(missing) > self._split_at:
            self._split_next()
        segments = self._segments(keys)
        for segment, fresh in zip(*np.unique(self._segments(missing), return_counts=True), strict=True):
            if self._used[segment] + fresh > self._most_used:
                # known keys of this batch may be old enough to be dropped, and are claimed anew
                self._move(int(segment), room=int(np.count_nonzero(segments == segment)))

    def _split_next(self) -> None:
        segment = self._split
        self._used.append(0)
        self._split += 1
        if self._split == 1 << self._generation:
            self._generation, self._split = self._generation + 1, 0
        self._plan_split()
        self._move(segment)

    def _move(self, segment: int, room: int = 0) -> None:
        """Write the rows of `segment` anew, each where it belongs now: after a split half of them in the last segment.

        If there is no `room` for so many more, the oldest are left out.
        """
        start = segment * self.segment_rows
        rows = self._rows[start : start + self.segment_rows]
        kept = rows[rows[:, 0] != 0]
        values = self._renewed((kept[:, 1] & np.uint64(MOST_VALUE)).astype(np.int64))
        kept[:, 1] = kept[:, 1] & ~np.uint64(MOST_VALUE) | values.astype(np.uint64)
        kept, values = kept[values != 0], values[values != 0]
        if room and len(kept) + room > self._most_used:
            oldest = self._oldest(kept, room)
            self._dropped(values[oldest])
            kept = np.delete(kept, oldest, axis=0)
        rows[:] = 0
        self._total -= self._used[segment]
        self._used[segment] = 0
        keys = np.ascontiguousarray(kept[:, 0])
        self._flat()[self._search(keys, self._segments(keys), insert=True)] = kept[:, 1]

    def _oldest(self, rows: Keys, room: int) -> Values:
        """Which of `rows` go so that there is `room` for more."""
        surplus = max(len(rows) + room - self._most_used, min(len(rows), self.segment_rows // _DROPPED_SHARE))
        return np.argpartition(rows[:, 1] >> np.uint64(VALUE_BITS), surplus - 1)[:surplus]

    def _search(self, keys: Keys, segments: Values, *, insert: bool = False) -> Values:
        """Places of `keys`, which belong in `segments`: -1 for those that are missing, or their new places."""
        rows = self.segment_rows
        starts = segments * rows
        at = starts + ((keys >> np.uint64(40)) * np.uint64(rows) >> np.uint64(24)).astype(np.int64)
        places = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        while len(left):
            here, wanted = at[left], keys[left]
            found = self._keys[here]
            if insert and (empty := found == 0).any():
                self._fill(here[empty], wanted[empty], segments[left[empty]])
                found = self._keys[here]
            hit = found == wanted
            places[left[hit]] = 2 * here[hit] + 1
            left = left[~hit if insert else ~hit & (found != 0)]
            step = at[left] + 1
            at[left] = np.where(step == starts[left] + rows, starts[left], step)
        return places

    def _fill(self, here: Values, keys: Keys, segments: Values) -> None:
        """Put `keys` into the empty rows `here`; of several that want the same row, one gets it."""
        self._keys[here] = keys
        _, firsts = np.unique(here, return_index=True)
        for segment, filled in zip(*np.unique(segments[firsts], return_counts=True), strict=True):
            self._used[int(segment)] += int(filled)
        self._total += len(firsts)


def cell(value: int, stamp: int) -> int:
    """What stands beside a key: `value`, and `stamp` as far as it fits."""
    return (stamp % _STAMPS) << VALUE_BITS | value
