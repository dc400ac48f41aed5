"""Budgets in a file: what one ledger settled, the next one has; nothing else may use the file meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from policies.quota.ledger import MeterLevel
from router.shared.store.levels_file import LevelsFile, LevelsUnkept

DAY = MeterLevel("acme", "cost", 1_500, 19_675)
MINUTE = MeterLevel("acme", "requests~Zoë 'x'", 60_000, 1_700_049_600_000)

OTHER = """
import sys
from pathlib import Path
from router.shared.store.levels_file import LevelsFile
file = LevelsFile(Path(sys.argv[1]))
print(len(file.open()), flush=True)
sys.stdin.read()
"""


def saved(path: Path, *levels: MeterLevel) -> None:
    file = LevelsFile(path)
    file.open()
    file.save(levels)
    file.close()


def found(path: Path) -> set[MeterLevel]:
    file = LevelsFile(path)
    try:
        return set(file.open())
    finally:
        file.close()


def test_the_levels_that_were_saved_last_are_there_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    saved(path, DAY, MINUTE)
    assert found(path) == {DAY, MINUTE}
    saved(path, changed := DAY._replace(used=1_600))
    assert found(path) == {changed}


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    saved(tmp_path / "budgets", DAY)
    assert stat.S_IMODE((tmp_path / "budgets").stat().st_mode) == 0o600
    file = LevelsFile(tmp_path / "budgets")
    file.open()
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    # memory that processes share is what network file systems lack
    assert not list(tmp_path.glob("*-shm"))
    file.close()


def test_another_process_waits_until_the_file_is_left_or_its_owner_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    saved(path, DAY)
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        mine = LevelsFile(path)
        with pytest.raises(LevelsUnkept, match="in use by another router") as taken:
            mine.open()
        assert taken.value.is_taken
        assert not mine.is_open
        os.kill(other.pid, signal.SIGKILL)
    assert mine.open() == [DAY]
    mine.close()


@pytest.mark.parametrize("garbage", [b"no database\n" * 500, b"SQLite format 3\0" + bytes(4096)])
def test_a_damaged_file_is_set_aside_and_budgets_begin_anew(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "budgets"
    path.write_bytes(garbage)
    saved(path, DAY)
    assert found(path) == {DAY}
    assert (tmp_path / "budgets.damaged").read_bytes() == garbage


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    saved(path, DAY)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(LevelsUnkept, match="newer Pointsman"):
        LevelsFile(path).open()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM levels").fetchone() == (1,)
    database.close()


def test_a_file_that_was_removed_is_made_again_with_all_levels(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    file = LevelsFile(path)
    file.open()
    file.save([DAY])
    path.unlink()
    file.save([DAY])
    file.close()
    assert found(path) == {DAY}


def test_a_folder_that_is_not_there_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(LevelsUnkept, match="No such file"):
        LevelsFile(tmp_path / "gone" / "budgets").open()


def test_a_disk_without_room_loses_no_level_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    file = LevelsFile(path)
    file.open()
    file.save([DAY])
    # SQLite says the same of a file that may not grow as of a disk without room
    assert file._database is not None
    (pages,) = file._database.execute("PRAGMA page_count").fetchone()
    file._database.execute(f"PRAGMA max_page_count = {pages}")
    many = [MeterLevel("acme", f"cost~{number:0>200}", 1, 1) for number in range(100)]
    with pytest.raises(LevelsUnkept, match="full"):
        file.save([DAY, *many])
    file._database.execute("PRAGMA max_page_count = 100000")
    file.save([DAY, *many])
    file.close()
    assert len(found(path)) == 101
