"""The recorder: what calls used reaches the database once, through kills and outages of the database."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from policies.errors import ConfigError
from policies.nouns import Outcome, Usage
from router.call.observer import Account, Spent
from router.operate.usage import journal
from router.operate.usage import recorder as recording
from router.operate.usage.database import UsageDatabase
from router.operate.usage.journal import Journal
from router.operate.usage.recorder import UsageRecorder
from router.operate.usage.rows import MOST_USER, OTHERS
from tests.router.operate.usage.parts import NOON, SPENT, an_account, some_rows


class Scene:
    """A recorder that runs, in a folder; its clocks stand still at noon."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.events = folder / "journal", list[str]()
        self.database = UsageDatabase(str(folder / "usage.sqlite"))
        self.recorder = UsageRecorder(
            self.database,
            self.folder,
            kind_of=lambda pool: {"own": "vllm"}.get(pool, ""),
            currency=lambda: "USD",
            clock=lambda: 100.0,
            unix_time=lambda: float(NOON),
            on_event=self.events.append,
            **options,
        )

    def end(self, *spent: Spent, outcome: Outcome = Outcome.FINISHED, **fields: Any) -> None:
        self.recorder.ended(an_account(*spent, started_at=100.0 - fields.pop("ago", 0.0), **fields), outcome, "", 0.0)

    def wait_for(self, event: str) -> None:
        deadline = time.monotonic() + 5
        while self.events[-1] != event:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)

    def rows(self, *by: str) -> list[tuple[Any, ...]]:
        assert self.recorder.sync()
        rows = self.database.sums(by)
        return [(*(row[name] for name in by), row["finished"], row["prompt_tokens"], row["cost"]) for row in rows]


@contextmanager
def a_scene(folder: Path, **options: Any) -> Iterator[Scene]:
    scene = Scene(folder, **options)
    scene.recorder.open()
    yield scene
    scene.recorder.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "JOURNAL_S", 0.001)
    monkeypatch.setattr(recording, "_AWAY_S", (0.02, 0.02))


def test_calls_are_summed_by_their_hour_user_and_pool(tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.end(SPENT, user="ann")
        scene.end(SPENT, user="ann")
        scene.end(SPENT, user="bob", ago=1.0)
        assert scene.rows("hour", "user", "pool", "kind") == [
            ("2026-11-24T11:00Z", "bob", "own", "vllm", 1, 100, 123_456_789),
            ("2026-11-24T12:00Z", "ann", "own", "vllm", 2, 200, 246_913_578),
        ]


def test_a_call_of_several_prompts_is_one_request(tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.end(SPENT, Spent("m", "other", Usage(1, 1, 0), 5), outcome=Outcome.CANCELLED)
        assert scene.rows("pool") == [("other", 0, 1, 5), ("own", 0, 100, 123_456_789)]
        assert sum(row["cancelled"] for row in scene.database.sums(["pool"])) == 1


def test_a_refused_call_is_counted_without_a_pool(tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.end(outcome=Outcome.REJECTED)
        assert scene.recorder.sync()
        [row] = scene.database.sums(["model", "pool"])
        assert (row["model"], row["pool"], row["rejected"], row["cost"]) == ("m", "", 1, 0)


def test_a_call_without_a_valid_key_has_no_tenant(tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.recorder.ended(Account("r", 100.0, {}, None, lambda *_: None), Outcome.REJECTED, "invalid_api_key", 0.0)
        assert scene.recorder.sync()
        [row] = scene.database.sums(["tenant"])
        assert (row["tenant"], row["rejected"]) == ("", 1)


@pytest.mark.parametrize(
    ("user", "kept"), [("x" * 500, "x" * MOST_USER), ("a\0b", "a?b"), ("\ud800", "?"), ("Jürgen", "Jürgen")]
)
def test_any_name_of_a_user_can_be_kept(user: str, kept: str, tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.end(SPENT, user=user)
        assert [row[0] for row in scene.rows("user")] == [kept]


def test_more_users_than_are_held_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.operate.usage.rows.MOST_ROWS", 3)
    scene = Scene(tmp_path)
    for number in range(10):
        scene.end(SPENT, user=f"u{number}")
    scene.recorder.open()
    assert scene.rows("user") == [
        (OTHERS, 7, 700, 7 * 123_456_789),
        *((f"u{number}", 1, 100, 123_456_789) for number in range(3)),
    ]
    scene.recorder.close()


def test_what_a_killed_router_left_is_added_at_the_next_start(tmp_path: Path) -> None:
    killed = Journal(tmp_path / "journal")
    killed.append(some_rows())
    killed.append(some_rows())
    killed.close(is_done=False)
    with a_scene(tmp_path) as scene:
        assert scene.rows("tenant") == [("acme", 2, 200, 246_913_578)]
        assert not killed.path.exists()


def test_a_batch_that_the_database_has_already_is_not_added_again(tmp_path: Path) -> None:
    killed = Journal(tmp_path / "journal")
    killed.append(some_rows())
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.migrate()
    database.add(killed.writer, 1, some_rows(), now=NOON)
    killed.append(some_rows())
    killed.close(is_done=False)
    with a_scene(tmp_path) as scene:
        assert scene.rows("tenant") == [("acme", 2, 200, 246_913_578)]


def test_while_the_database_is_away_the_journal_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = threading.Event()
    add = UsageDatabase.add

    def may_fail(self: UsageDatabase, *args: Any, **options: Any) -> None:
        if away.is_set():
            raise ConnectionError("away")
        add(self, *args, **options)

    monkeypatch.setattr(UsageDatabase, "add", may_fail)
    with a_scene(tmp_path) as scene:
        away.set()
        for _ in range(3):
            scene.end(SPENT)
            assert not scene.recorder.sync()
        assert scene.events == ["usage_store_away"]
        assert sum(len(file.read_bytes().splitlines()) for file in scene.folder.iterdir()) > 1
        away.clear()
        scene.wait_for("usage_store_back")
        assert scene.rows("tenant") == [("acme", 3, 300, 3 * 123_456_789)]


def test_a_commit_of_which_the_router_heard_nothing_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, failures = UsageDatabase.add, [True, True]

    def unheard(self: UsageDatabase, *args: Any, **options: Any) -> None:
        add(self, *args, **options)
        if failures:
            failures.pop()
            raise ConnectionError("the connection broke after the commit")

    monkeypatch.setattr(UsageDatabase, "add", unheard)
    with a_scene(tmp_path) as scene:
        scene.end(SPENT)
        calls = 1
        while failures:
            scene.recorder.sync()
            scene.end(SPENT)
            calls += 1
        scene.wait_for("usage_store_back")
        assert scene.rows("tenant") == [("acme", calls, 100 * calls, calls * 123_456_789)]


def test_a_journal_that_grows_long_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_JOURNAL_BYTES", 4096)
    monkeypatch.setattr(UsageDatabase, "add", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("away")))
    with a_scene(tmp_path) as scene:
        for _ in range(100):
            scene.end(SPENT)
            scene.recorder.sync()
        assert sum(file.stat().st_size for file in scene.folder.iterdir()) < 3 * 4096
    monkeypatch.undo()
    with a_scene(tmp_path) as scene:
        assert scene.rows("tenant") == [("acme", 100, 10_000, 12_345_678_900)]


def test_what_is_left_is_written_at_the_end_and_the_journal_is_gone(tmp_path: Path) -> None:
    with a_scene(tmp_path) as scene:
        scene.end(SPENT)
    assert list(scene.folder.iterdir()) == []
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    assert [row["finished"] for row in database.sums(["tenant"])] == [1]


def test_rows_are_kept_as_long_as_the_file_says(tmp_path: Path) -> None:
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.migrate()
    database.add("a", 1, some_rows(2), now=NOON)
    with a_scene(tmp_path, keep_s=-3600.0) as scene:
        assert [row[0] for row in scene.rows("hour")] == ["2026-11-24T13:00Z"]


@pytest.mark.parametrize("name", ["usage.sqlite", "journal"])
def test_a_place_that_cannot_be_written_is_an_error_at_the_start(name: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    if name == "journal":
        scene.folder.write_text("a file")
    else:
        (tmp_path / name).write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="usage"):
        scene.recorder.open()


def test_a_router_starts_while_the_disk_of_usage_is_full_and_keeps_what_is_used_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, is_full, write = Scene(tmp_path), threading.Event(), journal._write

    def write_or_fail(file: Any, data: bytes) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(journal, "_write", write_or_fail)
    is_full.set()
    limit = sql.event.listens_for(scene.database._engine, "connect")(
        lambda connection, _: connection.execute(f"PRAGMA max_page_count = {1 if is_full.is_set() else 1_000_000}")
    )
    scene.recorder.open()
    scene.end(SPENT, user="ann")
    assert set(scene.events) == {"usage_store_away", "usage_journal_failed"}
    is_full.clear()
    scene.database._engine.dispose()
    scene.wait_for("usage_store_back")
    assert scene.rows("user") == [("ann", 1, 100, 123_456_789)]
    scene.recorder.close()
    assert limit is not None


def test_a_router_that_ends_while_the_disk_of_usage_is_full_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "_write", fail)
    scene = Scene(tmp_path)
    scene.recorder.open()
    scene.recorder.close()
    assert not scene.recorder._thread.is_alive()
