"""The database of usage: SQLite or PostgreSQL, one schema for both."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from policies.errors import ConfigError
from router.operate.usage.rows import AMOUNTS, PERIODS, Rows, UsageKey
from router.private_files import make_private, private

POSTGRES = ("postgresql://", "postgres://")

_LOCK = 0x706F696E74736D
"""The advisory lock under which routers that start together change the schema of a PostgreSQL one by one."""

_AT_ONCE = 500
_DAY_S = 86_400

metadata = sql.MetaData()

USAGE = sql.Table(
    "pointsman_usage",
    metadata,
    sql.Column("hour", sql.BigInteger, primary_key=True, autoincrement=False),
    *(sql.Column(name, sql.Text, primary_key=True) for name in UsageKey._fields[1:]),
    *(sql.Column(name, sql.BigInteger, nullable=False) for name in AMOUNTS),
)
WRITERS = sql.Table(
    "pointsman_usage_writers",
    metadata,
    sql.Column("writer", sql.Text, primary_key=True),
    sql.Column("seq", sql.BigInteger, nullable=False),
    sql.Column("at", sql.BigInteger, nullable=False),
)
VERSION = sql.Table("pointsman_usage_version", metadata, sql.Column("version", sql.Integer, nullable=False))


def _first(connection: Connection) -> None:
    WRITERS.create(connection)
    _once(_FIRST_TEXTS, _FIRST_AMOUNTS).create(connection)


def _with_teams(connection: Connection) -> None:
    _remake(connection, 1, (_FIRST_TEXTS, _FIRST_AMOUNTS), ((*_FIRST_TEXTS, "team"), _FIRST_AMOUNTS))


def _with_tags(connection: Connection) -> None:
    amounts = (*_FIRST_AMOUNTS, "cache_write_tokens", "images", "backend_ms")
    texts = (*_FIRST_TEXTS, "team")
    _remake(connection, 2, (texts, _FIRST_AMOUNTS), ((*texts, "tags"), amounts))


_FIRST_TEXTS = ("tenant", "key", "user", "model", "service_class", "pool", "kind", "currency")
_FIRST_AMOUNTS = (
    *("finished", "cancelled", "rejected", "evicted", "failed"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost"),
)
_Columns = tuple[tuple[str, ...], tuple[str, ...]]


def _once(texts: Sequence[str], amounts: Sequence[str], name: str = USAGE.name) -> sql.Table:
    """The table of usage as it was with these columns."""
    return sql.Table(
        name,
        sql.MetaData(),
        sql.Column("hour", sql.BigInteger, primary_key=True, autoincrement=False),
        *(sql.Column(each, sql.Text, primary_key=True) for each in texts),
        *(sql.Column(each, sql.BigInteger, nullable=False) for each in amounts),
    )


def _remake(connection: Connection, version: int, before: _Columns, after: _Columns) -> None:
    """Give the table more columns, empty or 0 in the rows that it has: SQLite cannot change a primary key."""
    old, new = _once(*before, f"{USAGE.name}_{version}"), _once(*after)
    connection.execute(sql.text(f"ALTER TABLE {USAGE.name} RENAME TO {old.name}"))
    if connection.dialect.name == "postgresql":
        connection.execute(sql.text(f"ALTER INDEX {USAGE.name}_pkey RENAME TO {old.name}_pkey"))
    new.create(connection)
    kept = [column.name for column in old.columns]
    added: list[sql.ColumnElement[Any]] = []
    for column in new.columns:
        if column.name not in kept:
            kept.append(column.name)
            added.append(sql.literal("", sql.Text) if column.primary_key else sql.literal(0, sql.BigInteger))
    connection.execute(new.insert().from_select(kept, sql.select(*old.columns, *added)))
    old.drop(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_first, _with_teams, _with_tags)
"""The changes of the schema, in order. One that has been published never changes; a newer one is added behind it."""


class UsageDatabase:
    """Usage in the SQLite file or the PostgreSQL at `place`. Its methods block; each is one transaction.

    They raise ConnectionError where the database is away, full or refuses; nothing has changed then, or in the case of
    a connection that broke at the end of `add`, all of it: adding the same batch again changes nothing.
    """

    def __init__(self, place: str) -> None:
        self._engine = _engine(place)
        self._insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert

    def __repr__(self) -> str:
        return f"<UsageDatabase {self._engine.url.render_as_string(hide_password=True)}>"

    @property
    def is_file(self) -> bool:
        """Whether it is an SQLite file."""
        return self._engine.dialect.name == "sqlite"

    def migrate(self) -> None:
        """Make the schema the newest one. Raises ConfigError if that of the database is newer."""
        with self._transaction() as connection:
            if self._engine.dialect.name == "postgresql":
                connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK)))
            VERSION.create(connection, checkfirst=True)
            version = connection.scalar(sql.select(VERSION.c.version)) or 0
            if version > len(MIGRATIONS):
                raise ConfigError(
                    f"{self} was written by a newer Pointsman: its schema is {version}, and ours {len(MIGRATIONS)}",
                    hint="update this router, or give it a database of its own with usage.store",
                )
            for migration in MIGRATIONS[version:]:
                migration(connection)
            connection.execute(VERSION.delete())
            connection.execute(VERSION.insert(), {"version": len(MIGRATIONS)})

    def last(self, writer: str) -> int:
        """The number of the last batch of `writer` that was added; 0 for none."""
        with self._transaction() as connection:
            return connection.scalar(sql.select(WRITERS.c.seq).where(WRITERS.c.writer == writer)) or 0

    def add(self, writer: str, seq: int, rows: Rows, *, now: float) -> None:
        """Add `rows`, the batches of `writer` up to the number `seq`, unless they have been added."""
        with self._transaction() as connection:
            newest = self._insert(WRITERS).values(writer=writer, seq=seq, at=round(now))
            newest = newest.on_conflict_do_update(
                index_elements=[WRITERS.c.writer],
                set_={"seq": newest.excluded.seq, "at": newest.excluded.at},
                where=WRITERS.c.seq < newest.excluded.seq,
            )
            if connection.execute(newest.returning(WRITERS.c.seq)).first() is None:
                return
            insert = self._insert(USAGE)
            sums = {name: USAGE.c[name] + insert.excluded[name] for name in AMOUNTS}
            insert = insert.on_conflict_do_update(index_elements=list(USAGE.primary_key), set_=sums)
            # in one order, so that routers that write the same rows do not wait for each other in a circle
            values = [dict(zip((*UsageKey._fields, *AMOUNTS), (*key, *rows[key]), strict=True)) for key in sorted(rows)]
            for at in range(0, len(values), _AT_ONCE):
                connection.execute(insert, values[at : at + _AT_ONCE])

    def forget(self, before: float) -> None:
        """Delete rows of hours that began before the Unix time `before`, and writers that ended before it."""
        with self._transaction() as connection:
            connection.execute(USAGE.delete().where(USAGE.c.hour < before))
            connection.execute(WRITERS.delete().where(WRITERS.c.at < before))

    def sums(
        self,
        by: Sequence[str] = UsageKey._fields,
        *,
        since: float | None = None,
        until: float | None = None,
        where: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """The sums by each of the names `by` (of GROUPS), sorted: texts, and AMOUNTS as whole numbers.

        Hours that begin at `since` or later and before `until`, in Unix seconds; `where` the value of columns.
        Amounts of different currencies are never added up. A period is the text of its beginning: 2026-11-24T13:00Z,
        2026-11-24, 2026-11.
        """
        names = list(dict.fromkeys((*by, "currency")))
        period = next((name for name in PERIODS if name in names), None)
        columns: list[sql.ColumnElement[Any]] = [USAGE.c[name] for name in names if name not in PERIODS]
        if period is not None:
            # months differ in length: days are added up to them below
            hour = USAGE.c.hour if period == "hour" else USAGE.c.hour - USAGE.c.hour % _DAY_S
            columns.append(hour.label("hour"))
        amounts = [sql.cast(sql.func.sum(USAGE.c[name]), sql.BigInteger).label(name) for name in AMOUNTS]
        query = sql.select(*columns, *amounts).group_by(*columns)
        if since is not None:
            query = query.where(USAGE.c.hour >= since)
        if until is not None:
            query = query.where(USAGE.c.hour < until)
        for name, value in (where or {}).items():
            query = query.where(USAGE.c[name] == value)
        with self._transaction() as connection:
            found = [dict(row) for row in connection.execute(query).mappings()]
        sums: dict[tuple[str, ...], list[int]] = {}
        for row in found:
            at = tuple(_shown_period(row["hour"], name) if name in PERIODS else row[name] for name in names)
            before = sums.get(at, [0] * len(AMOUNTS))
            sums[at] = [old + row[name] for old, name in zip(before, AMOUNTS, strict=True)]
        return [dict(zip((*names, *AMOUNTS), (*at, *sums[at]), strict=True)) for at in sorted(sums)]

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            # a primary that became a standby takes no more writes, and answers everything else
            self._engine.dispose()
            cause = error.orig if isinstance(error, DBAPIError) else error
            text = f"{self}: {str(cause).strip()}"
            # the lower byte is the code, the rest says more of it
            if getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise ConnectionError(errno.ENOSPC, text) from error
            raise ConnectionError(text) from error


def _shown_period(hour: int, period: str) -> str:
    text = datetime.fromtimestamp(hour, UTC).isoformat()[: PERIODS[period]]
    return f"{text}:00Z" if period == "hour" else text


def _engine(place: str) -> sql.Engine:
    """Raises ConfigError."""
    if not place.startswith(POSTGRES):
        file = Path(place)
        if not file.parent.is_dir():
            raise ConfigError(f"the folder {file.parent} of usage.store does not exist", hint="make it first")
        engine = sql.create_engine(f"sqlite:///{file}", creator=lambda: _private_sqlite(file))
        sql.event.listen(engine, "connect", _set_up)
        sql.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    try:
        url = make_url(_one_host(place)).set(drivername="postgresql+psycopg")
        options = {name: value for name, value in _CONNECTION.items() if name not in url.query}
        return sql.create_engine(url, pool_pre_ping=True, pool_size=2, connect_args=options)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigError(
            "usage.store is a PostgreSQL, and psycopg is not installed", hint="pip install 'pointsman[postgres]'"
        ) from error
    except (ArgumentError, ValueError) as error:
        raise ConfigError(
            f"usage.store is no address of a PostgreSQL: {error}", hint="write postgresql://user:password@host/database"
        ) from error


def _private_sqlite(file: Path) -> sqlite3.Connection:
    """A connection to `file`, which is private, and so are those that SQLite has beside it. Raises sqlite3.Error."""
    try:
        os.close(private(str(file), os.O_RDWR | os.O_CREAT))
        make_private(file)
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    # the pool hands a connection to one thread at a time
    return sqlite3.connect(file, timeout=10.0, check_same_thread=False)


_CONNECTION: dict[str, int | str] = {
    "connect_timeout": 5,
    # of several hosts, and of a proxy's servers, the one that takes writes
    "target_session_attrs": "read-write",
    # a server that is gone without a word is noticed within ten seconds or so
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def _one_host(place: str) -> str:
    """The URL with several hosts, as libpq has it (host:port,host:port), in the form that SQLAlchemy takes."""
    scheme, _, rest = place.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    if "," not in hosts:
        return place
    options = "&".join(f"host={host}" for host in hosts.split(","))
    return f"{scheme}://{user}{at}{slash}{path}{'&' if '?' in path else '?'}{options}"


def _set_up(connection: Any, _: object) -> None:
    # transactions begin where we say so, and not at the first statement that writes
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    # a container may have no folder for temporary files that can be written
    connection.execute("PRAGMA temp_store = MEMORY")
