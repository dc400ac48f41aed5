"""Reads files that other programs write: neither a pipe nor a device nor a huge file holds the reader up."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 8 << 20
"""Of a file that is written by hand or by a template."""


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The contents of the regular file at `path`.

    Raises OSError, also for anything else than a regular file, which may have no end, and for more than `most_bytes`.
    """
    _require_regular(path, path.stat())
    # a file may be replaced between the two looks: opening must not wait for a writer
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        _require_regular(path, os.fstat(file.fileno()))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes >> 20} MiB (is it another file?)")
    return data


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise OSError(f"it is {kind}, not a regular file (write {path.name} to a file)")
