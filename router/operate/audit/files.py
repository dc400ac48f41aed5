"""The files of one audit log: the one that is written, and older ones, `FILE.1` the newest of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from router.operate.audit.chain import MOST_LINE_BYTES

_CHUNK = 256 << 10


def files_of(path: Path) -> list[Path]:
    """The files that are there, oldest first."""
    numbered = [(int(found[1]), file) for file in path.parent.iterdir() if (found := _is_older(path, file))]
    return [*(file for _, file in sorted(numbered, reverse=True)), *([path] if path.exists() else [])]


def set_aside(path: Path, keep: int) -> None:
    """Make `path` the newest of the older files; of all, `keep` are left. Raises OSError, and then all are there: the
    next call goes on."""
    aside = _aside(path)
    if not aside.exists():
        # the system may refuse this, and then no other file has moved
        path.replace(aside)
    # up to the first number without a file, which an earlier call may have left
    older = next(number for number in count() if not Path(f"{path}.{number + 1}").exists())
    for number in range(older, 0, -1):
        file = Path(f"{path}.{number}")
        if number + 1 >= keep:
            file.unlink()
        else:
            file.replace(f"{path}.{number + 1}")
    aside.replace(f"{path}.1")


def _aside(path: Path) -> Path:
    """The file on its way to the older ones."""
    return Path(f"{path}.0")


def _is_older(path: Path, file: Path) -> re.Match[str] | None:
    return re.fullmatch(re.escape(path.name) + r"\.([0-9]{1,9})", file.name)


def last_lines(descriptor: int) -> tuple[list[bytes], int]:
    """The last whole lines of the file without their newlines, the newest first, and how many bytes of a torn one
    follow them. The newest is whole, the others are as many as fit."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, min(size, 2 * MOST_LINE_BYTES), max(0, size - 2 * MOST_LINE_BYTES))
    *whole, torn = tail.split(b"\n")
    return whole[::-1], len(torn)


def newest_first(path: Path) -> Iterator[bytes]:
    """The lines of all files without their newlines, the newest first. Raises OSError."""
    for file in reversed(files_of(path)):
        with file.open("rb", buffering=0) as opened:
            at, rest = os.fstat(opened.fileno()).st_size, b""
            while at > 0:
                size = min(_CHUNK, at)
                at -= size
                lines = (os.pread(opened.fileno(), size, at) + rest).split(b"\n")
                rest = lines[0]
                yield from (line for line in reversed(lines[1:]) if line)
            if rest:
                yield rest
