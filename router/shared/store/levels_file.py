"""Levels of a ledger in an SQLite file, so that budgets survive their router."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from policies.quota.ledger import MeterLevel
from router.private_files import make_private, private

_VERSION = 1

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_TAKEN = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

_TABLE = """
CREATE TABLE levels (
  ledger TEXT, name TEXT, used INTEGER NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (ledger, name)
) WITHOUT ROWID
"""

_log = logging.getLogger("pointsman.quotas")


class LevelsUnkept(Exception):
    """The file cannot be used now: the reason. `is_taken`: another router has it."""

    def __init__(self, reason: str, *, is_taken: bool = False) -> None:
        super().__init__(reason)
        self.is_taken = is_taken


class LevelsFile:
    """The levels at `path`. One process has it, until it closes it or ends. Methods block, and raise LevelsUnkept.

    SQLite's lock in exclusive mode is that right, and needs no memory that processes share: network file systems have
    none. A damaged file is set aside as `path.damaged`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database: sqlite3.Connection | None = None
        self._kept: dict[tuple[str, str], MeterLevel] = {}

    def __repr__(self) -> str:
        return f"<LevelsFile {self.path}{'' if self.is_open else ', closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether it is ours."""
        return self._database is not None

    def open(self) -> list[MeterLevel]:
        """Take the file, and make it if it is not there; returns its levels."""
        try:
            levels = self._taken()
        except sqlite3.DatabaseError as error:
            if _code(error) not in _DAMAGED:
                raise self._unkept(error) from error
            levels = self._anew(error)
        except OSError as error:
            raise self._unkept(error) from error
        self._kept = {level.id: level for level in levels}
        return levels

    def save(self, levels: Iterable[MeterLevel]) -> None:
        """Have `levels` and no others in the file; writes the difference. A file that was removed is made again."""
        if not self.path.exists():
            self.close()
            self.open()
        assert self._database is not None
        kept, changed = {}, []
        for level in levels:
            kept[level.id] = level
            if self._kept.get(level.id) != level:
                changed.append(level)
        gone = self._kept.keys() - kept.keys()
        if not changed and not gone:
            return
        try:
            with self._database as transaction:
                transaction.executemany("INSERT OR REPLACE INTO levels VALUES (?, ?, ?, ?)", changed)
                transaction.executemany("DELETE FROM levels WHERE ledger = ? AND name = ?", gone)
        except sqlite3.Error as error:
            raise self._unkept(error) from error
        self._kept = kept

    def close(self) -> None:
        """Let another router have it."""
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _taken(self) -> list[MeterLevel]:
        if not self.path.exists():
            os.close(private(str(self.path), os.O_RDWR | os.O_CREAT))
        make_private(self.path)
        # calls come from one thread at a time
        database = sqlite3.connect(self.path, timeout=0, check_same_thread=False)
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            with database:
                database.execute("BEGIN EXCLUSIVE")
                (version,) = database.execute("PRAGMA user_version").fetchone()
                if version > _VERSION:
                    raise LevelsUnkept(f"{self.path} was written by a newer Pointsman")
                if version < _VERSION:
                    database.execute(_TABLE)
                    database.execute(f"PRAGMA user_version = {_VERSION}")
            levels = [MeterLevel(*row) for row in database.execute("SELECT ledger, name, used, at FROM levels")]
        except BaseException:
            database.close()
            raise
        self._database = database
        return levels

    def _anew(self, error: sqlite3.DatabaseError) -> list[MeterLevel]:
        aside = self.path.with_name(f"{self.path.name}.damaged")
        _log.error("%s is damaged (%s): it is kept as %s, and budgets begin anew", self.path, error, aside.name)
        try:
            self.path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)
            return self._taken()
        except (sqlite3.Error, OSError) as again:
            raise self._unkept(again) from again

    def _unkept(self, error: Exception) -> LevelsUnkept:
        if _code(error) in _TAKEN:
            return LevelsUnkept(f"{self.path} is in use by another router", is_taken=True)
        return LevelsUnkept(f"{self.path}: {error}")


def _code(error: Exception) -> int:
    """SQLite's own number of it; the upper bytes say more."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
