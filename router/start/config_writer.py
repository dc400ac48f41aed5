"""Writes the SLA file as its authors would, whole or not at all, and keeps the versions that it replaced."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from policies.errors import Conflict
from router.private_files import private
from router.regular_file import read_regular

MOST_KEPT = 20
"""Earlier versions kept; the oldest is deleted first."""

_MOUNTED = "..data"
"""The link in a folder that Kubernetes mounts from a ConfigMap or Secret, and replaces when that changes."""


class Kept(NamedTuple):
    """An earlier version of the file, and the Unix time at which another one took its place."""

    version: str
    until: float


def version_of(text: str) -> str:
    """The name of a file with this text, as Config.version has it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class ConfigWriter:
    """The SLA file at `path`. Earlier versions are in the folder `PATH.versions` beside it. Everything here blocks."""

    path: Path
    unix_time: Callable[[], float] = time.time

    def __str__(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        """Where earlier versions are."""
        file = self._file
        return file.with_name(f"{file.name}.versions")

    def text(self) -> str:
        """The file's text now. Raises Conflict if it cannot be read."""
        try:
            return read_regular(self.path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise Conflict(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}") from error

    def replace(self, text: str, *, expected: str) -> None:
        """Have `text` in the file, in one step, with the owner and mode that it has; its old text is kept.

        Raises Conflict, and leaves the file as it is, if its version is not the `expected` one, if another process
        writes it now, or if it cannot be written.
        """
        if (self.path.parent / _MOUNTED).is_symlink():
            raise Conflict(
                f"{self.path} is mounted from a ConfigMap, so it is read-only here",
                hint="put the text into the ConfigMap, as with `kubectl create configmap NAME --from-file=... "
                "--dry-run=client -o yaml | kubectl apply -f -`; the router takes it up by itself",
            )
        try:
            self._replace(text, expected)
        except OSError as error:
            reason = error.strerror or error
            hint = "write the text there yourself; the router takes it up by itself"
            raise Conflict(f"cannot write {self.path}: {reason}", hint=hint) from error

    def kept(self) -> list[Kept]:
        """Earlier versions, the newest first."""
        return [kept for kept, _ in self._files()]

    def kept_text(self, version: str) -> str:
        """The text of an earlier version. Raises Conflict if it is not kept."""
        for kept, file in self._files():
            if kept.version == version:
                with suppress(OSError):
                    return file.read_text(encoding="utf-8")
        known = ", ".join(kept.version for kept in self.kept()[:5]) or "none is kept"
        raise Conflict(f"version '{version[:40]}' is not kept", hint=f"known: {known}")

    @property
    def _file(self) -> Path:
        # a link stays a link
        return Path(os.path.realpath(self.path))

    def _replace(self, text: str, expected: str) -> None:
        file = self._file
        status, new = file.stat(), file.with_name(f".{file.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
            if not _is_ours(descriptor, new):
                raise Conflict(f"{self.path} is being written by another process", hint="try again")
            try:
                old = self.text()
                if (found := version_of(old)) != expected:
                    hint = "compare again, and apply what you get then"
                    raise Conflict(f"{self.path} has version {found} by now, not {expected}", hint=hint)
                os.ftruncate(descriptor, 0)
                writing.write(text)
                writing.flush()
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, status.st_uid, status.st_gid)
                os.fchmod(descriptor, status.st_mode & 0o7777)
                os.fsync(descriptor)
                self._keep(old, found, status)
                new.replace(file)
            except BaseException:
                with suppress(OSError):
                    new.unlink()
                raise
        _sync(file.parent)

    def _keep(self, text: str, version: str, status: os.stat_result) -> None:
        """Keep the text that is replaced, with the file's mode; the oldest goes where there are too many."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        kept = self.folder / f"{self.unix_time():017.6f}-{version}.yaml"
        with open(kept, "w", encoding="utf-8", opener=private) as writing:
            writing.write(text)
        kept.chmod(status.st_mode & 0o777)
        for _, old in self._files()[MOST_KEPT:]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Kept, Path]]:
        found = []
        with suppress(OSError):
            for file in self.folder.glob("*-*.yaml"):
                at, _, version = file.stem.partition("-")
                with suppress(ValueError):
                    found.append((Kept(version, float(at)), file))
        return sorted(found, key=lambda pair: pair[0].until, reverse=True)


def _is_ours(descriptor: int, new: Path) -> bool:
    """Lock the open file, which is to be the one at `new`; False if another process has it, or has put it in place."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), new.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync(folder: Path) -> None:
    """Have the entries of `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
