"""The database: a batch counts once, sums are exact, and SQLite and a real PostgreSQL have equal rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sql

from policies.errors import ConfigError
from router.operate.usage.database import MIGRATIONS, USAGE, VERSION, WRITERS, UsageDatabase
from router.operate.usage.rows import AMOUNTS, HOUR_S, Rows, UsageKey, add
from tests.router.operate.usage.parts import HAS_POSTGRES, NOON, PostgresServer, a_key, a_postgres, some_rows

NEEDS_POSTGRES = pytest.mark.skipif(not HAS_POSTGRES, reason="there is no PostgreSQL here")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer | None]:
    if not HAS_POSTGRES:
        yield None
        return
    with a_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=NEEDS_POSTGRES)])
def database(request: pytest.FixtureRequest, server: PostgresServer | None, tmp_path: Path) -> Iterator[UsageDatabase]:
    yield from opened(str(tmp_path / "usage.sqlite") if request.param == "sqlite" else cleaned(server))


def cleaned(server: PostgresServer | None) -> str:
    assert server is not None
    server.clean()
    return server.url


def opened(place: str) -> Iterator[UsageDatabase]:
    database = UsageDatabase(place)
    database.migrate()
    yield database
    database.close()


def rows_of(database: UsageDatabase) -> Rows:
    return {
        UsageKey(*(row[name] for name in UsageKey._fields)): [row[name] for name in AMOUNTS] for row in database.sums()
    }


def shown(rows: Rows) -> Rows:
    """`rows` at noon, as the database shows them."""
    return {UsageKey("2026-11-24T12:00Z", *key[1:]): sums for key, sums in rows.items()}  # type: ignore[arg-type]


def test_rows_of_all_writers_add_up(database: UsageDatabase) -> None:
    database.add("a", 1, some_rows(), now=NOON)
    database.add("b", 1, some_rows(), now=NOON)
    twice = some_rows()
    add(twice, some_rows())
    assert rows_of(database) == shown(twice)


def test_a_batch_counts_once_and_an_older_one_not_at_all(database: UsageDatabase) -> None:
    for seq in (7, 7, 3):
        database.add("a", seq, some_rows(), now=NOON)
    assert rows_of(database) == shown(some_rows())
    assert (database.last("a"), database.last("b")) == (7, 0)


def test_sums_are_whole_numbers_beyond_what_a_float_holds(database: UsageDatabase) -> None:
    large: Rows = {a_key(): [0] * (len(AMOUNTS) - 1) + [2**60 + 1]}
    database.add("a", 1, large, now=NOON)
    database.add("a", 2, large, now=NOON)
    [row] = database.sums(["tenant"])
    assert row["cost"] == 2**61 + 2
    assert type(row["cost"]) is int


def test_sums_by_time_and_by_name(database: UsageDatabase) -> None:
    for number, (hour, tenant) in enumerate([(0, "a"), (1, "a"), (13, "b"), (24 * 10, "a")]):
        database.add("w", number + 1, some_rows(tenant=tenant) if not hour else moved(tenant, hour), now=NOON)
    assert [(row["day"], row["finished"]) for row in database.sums(["day"])] == [
        ("2026-11-24", 2),
        ("2026-11-25", 1),
        ("2026-12-04", 1),
    ]
    assert [(row["month"], row["tenant"], row["finished"]) for row in database.sums(["month", "tenant"])] == [
        ("2026-11", "a", 2),
        ("2026-11", "b", 1),
        ("2026-12", "a", 1),
    ]
    assert [row["hour"] for row in database.sums(["hour"], until=NOON + 2 * HOUR_S)] == [
        "2026-11-24T12:00Z",
        "2026-11-24T13:00Z",
    ]
    assert [row["finished"] for row in database.sums(["tenant"], since=NOON + HOUR_S, where={"tenant": "a"})] == [2]


def moved(tenant: str, hours: int) -> Rows:
    return {a_key(hour=NOON + hours * HOUR_S, tenant=tenant): sums for sums in some_rows().values()}


def test_amounts_of_two_currencies_are_not_added_up(database: UsageDatabase) -> None:
    database.add("a", 1, some_rows(currency="USD") | some_rows(currency=""), now=NOON)
    assert [(row["currency"], row["finished"]) for row in database.sums(["tenant"])] == [("", 1), ("USD", 1)]


def test_old_rows_are_forgotten(database: UsageDatabase) -> None:
    database.add("a", 1, some_rows(3), now=NOON)
    database.forget(NOON + 2 * HOUR_S)
    assert [row["hour"] for row in database.sums(["hour"])] == ["2026-11-24T14:00Z"]
    assert database.last("a") == 0


def test_a_schema_is_made_once_and_a_newer_one_is_refused(database: UsageDatabase) -> None:
    database.add("a", 1, some_rows(), now=NOON)
    database.migrate()
    assert rows_of(database) == shown(some_rows())
    with database._engine.begin() as connection:
        connection.execute(sql.update(VERSION).values(version=len(MIGRATIONS) + 1))
    with pytest.raises(ConfigError, match="was written by a newer Pointsman") as caught:
        database.migrate()
    assert "usage.store" in (caught.value.hint or "")


def test_rows_of_the_first_schema_go_on_without_a_team(database: UsageDatabase) -> None:
    with database._engine.begin() as connection:
        USAGE.drop(connection)
        WRITERS.drop(connection)
        connection.execute(VERSION.delete())
        MIGRATIONS[0](connection)
        connection.execute(VERSION.insert(), {"version": 1})
        connection.execute(
            sql.text(
                "INSERT INTO pointsman_usage VALUES "
                f"({NOON}, 'acme', '', '', 'm', 'chat', 'own', 'vllm', 'USD', 1, 0, 0, 0, 0, 100, 40, 10, 123456789)"
            )
        )
    database.migrate()
    assert rows_of(database) == shown(some_rows())
    database.add("a", 1, some_rows() | some_rows(team="search"), now=NOON)
    assert [(row["team"], row["finished"]) for row in database.sums(["team"])] == [("", 2), ("search", 1)]


@NEEDS_POSTGRES
def test_both_databases_have_equal_rows_of_the_same_batches(server: PostgresServer | None, tmp_path: Path) -> None:
    dice = random.Random(7)
    places = [str(tmp_path / "usage.sqlite"), cleaned(server)]
    databases = [next(opened(place)) for place in places]
    everything: Rows = {}
    for seq in range(1, 60):
        rows: Rows = {}
        for _ in range(dice.randrange(1, 40)):
            key = a_key(
                hour=NOON + dice.randrange(48) * HOUR_S,
                tenant=dice.choice("ab"),
                user=dice.choice(["", "ümläut", "a'; --"]),
                currency=dice.choice(["", "USD"]),
            )
            add(rows, {key: [dice.randrange(10**9) for _ in AMOUNTS]})
        for database in databases:
            for _ in range(dice.randrange(1, 3)):
                database.add("w", seq, rows, now=NOON)
        add(everything, rows)
    one, other = map(rows_of, databases)
    assert one == other
    assert [sum(column) for column in zip(*one.values(), strict=True)] == [
        sum(column) for column in zip(*everything.values(), strict=True)
    ]
    for database in databases:
        database.close()


@NEEDS_POSTGRES
def test_a_postgres_that_is_away_is_a_connection_error_and_comes_back(server: PostgresServer | None) -> None:
    database = next(opened(cleaned(server)))
    assert server is not None
    server.stop()
    with pytest.raises(ConnectionError, match="UsageDatabase"):
        database.add("a", 1, some_rows(), now=NOON)
    server.start()
    database.add("a", 1, some_rows(), now=NOON)
    assert rows_of(database) == shown(some_rows())
    database.close()


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("nowhere/usage.sqlite", "the folder nowhere of usage.store does not exist"),
        ("postgresql://host:port/database", "no address of a PostgreSQL"),
    ],
)
def test_a_place_that_can_never_be_used_is_an_error_at_once(place: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        UsageDatabase(place)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(UsageDatabase("postgresql://user:secret@host/database"))


def test_a_file_is_for_its_user_alone_with_those_beside_it(tmp_path: Path) -> None:
    left_open = tmp_path / "older.sqlite"
    left_open.touch(0o644)
    for path in (tmp_path / "usage.sqlite", left_open):
        database = UsageDatabase(str(path))
        database.migrate()
        assert {each.stat().st_mode & 0o777 for each in tmp_path.glob(f"{path.name}*")} == {0o600}
        database.close()
