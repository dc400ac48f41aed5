"""Files and folders for this user alone: they hold prompts, answers, usage, decisions or keys."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk that is full: no mistake of the file that names it, and over once there is room."""


def private(path: str, flags: int) -> int:
    """The `opener` of a file that is private if this begins it."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def make_private(file: Path) -> None:
    """Take `file` away from other users if all of them may read it, as an earlier version left it. A group that an
    operator has let in stays. Raises OSError."""
    status = file.stat()
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o007 and status.st_uid == os.geteuid():
        file.chmod(PRIVATE_FILE)


def private_folder(folder: Path) -> None:
    """Have `folder`, which is private if this makes it, as is each folder that is made above it. Raises OSError."""
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(PRIVATE_FOLDER, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(folder))
