"""Levels that changed since they were kept last, in a file beside the kept ones: a killed router forgets none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from policies.quota.ledger import MeterLevel
from router.private_files import private

_MOST_BYTES = 16 * 1024 * 1024
"""Of one file. While the levels cannot be kept, it would grow for ever."""

_LINES = msgspec.json.Decoder(list[tuple[str, str, int, int]])
_ENCODER = msgspec.json.Encoder()

_log = logging.getLogger("pointsman.quotas")


class LevelsJournal:
    """The levels of each settlement since the file `kept` was written, a line each, in files that are named after it.

    Only the router that has `kept` may use it. A line holds levels, not changes, so that reading one twice does no
    harm. What was written survives the process, though not the machine. Nothing here raises OSError: what cannot be
    written is kept a second later, with the rest.
    """

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._number = 0
        self._file: int | None = None
        self._bytes = 0
        self.is_open = False
        """Whether levels are wanted: after `read`, until `close`."""

    def __repr__(self) -> str:
        return f"<LevelsJournal of {self._kept}{'' if self.is_open else ', closed'}>"

    def read(self) -> list[MeterLevel]:
        """What earlier routers left, the latest of each meter; from now on it takes levels."""
        found = dict[tuple[str, str], MeterLevel]()
        for number, path in self._files():
            self._number = number
            with suppress(OSError):
                found |= {level.id: level for level in _levels(path.read_bytes())}
        self.is_open = True
        return list(found.values())

    def add(self, levels: Sequence[MeterLevel]) -> None:
        """Append `levels`."""
        if self._bytes > _MOST_BYTES:
            return
        line = _ENCODER.encode(levels) + b"\n"
        try:
            if self._file is None:
                self._number += 1
                self._file = private(str(self._path(self._number)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if os.write(self._file, line) < len(line):
                # a part of a line would spoil the next one
                os.write(self._file, b"\n")
            self._bytes += len(line)
        except OSError as error:
            _log.warning("budgets are kept once a second only: %s cannot be written: %s", self._kept, error)
            # until the levels are kept the next time
            self._bytes = _MOST_BYTES + 1

    def turn(self) -> int:
        """Begin a new file; returns the number of the last one before it. What is read of the levels from now on covers
        all up to it.
        """
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._bytes = 0
        return self._number

    def forget(self, number: int) -> None:
        """The levels are kept up to the file with this `number`."""
        for each, path in self._files():
            if each <= number:
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Take no more levels."""
        self.turn()
        self.is_open = False

    def _path(self, number: int) -> Path:
        return self._kept.with_name(f"{self._kept.name}.since-{number}")

    def _files(self) -> Iterator[tuple[int, Path]]:
        """In the order in which they were written."""
        prefix = self._path(0).name[:-1]
        found = self._kept.parent.glob(f"{prefix}*")
        yield from sorted(
            (int(path.name[len(prefix) :]), path) for path in found if path.name[len(prefix) :].isdecimal()
        )


def _levels(written: bytes) -> Iterator[MeterLevel]:
    # what broke off behind the last line end had not been settled
    for line in written.split(b"\n")[:-1]:
        try:
            yield from (MeterLevel(*each) for each in _LINES.decode(line))
        except (ValueError, RecursionError):
            # one that a full disk has damaged
            continue
