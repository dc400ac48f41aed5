"""The files of one audit log: the one that is written, and older ones, `FILE.1` the newest of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from router.operate.audit.chain import MOST_LINE_BYTES

_CHUNK = 256 << 10


def files_of(path: Path) -> list[Path]:
    """The files that are there, oldest first."""
    older: list[Path] = []
    while (file := Path(f"{path}.{len(older) + 1}")).exists():
        older.append(file)
    return [*reversed(older), *([path] if path.exists() else [])]


def set_aside(path: Path, keep: int) -> None:
    """Make `path` the newest of the older files; of all, `keep` are left."""
    older = len([file for file in files_of(path) if file != path])
    for number in range(older, 0, -1):
        file = Path(f"{path}.{number}")
        if number + 1 >= keep:
            file.unlink()
        else:
            file.replace(f"{path}.{number + 1}")
    path.replace(f"{path}.1")


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
