"""The audit log is written from a thread, by several processes in turns, through kills, full disks and rotation."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from policies.errors import ConfigError
from router.operate.audit import log as module
from router.operate.audit.chain import START, Chain
from router.operate.audit.files import files_of
from router.operate.audit.log import AuditLog
from router.operate.audit.reader import AuditPeriod, checked, newest

EVENTS: list[str] = []


def a_log(path: Path, chain: Chain | None = None, **options: Any) -> AuditLog:
    audit = AuditLog(path, chain or Chain(), **options)
    audit.open()
    return audit


def wait(*written: Future[None]) -> None:
    for each in written:
        each.result(10)


def records_of(path: Path, chain: Chain | None = None) -> list[dict[str, Any]]:
    found = list(checked(path, chain or Chain()))
    assert [each.problem for each in found] == [None] * len(found)
    return [each.record for each in found]


def events_of(path: Path) -> list[str]:
    return [record["event"] for record in records_of(path)]


def test_a_record_is_on_the_disk_when_its_future_ends(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = a_log(path, unix_time=lambda: 1_795_632_000.5)
    wait(audit.put("call", name="ann", call="PATCH /admin/backends/{name:path}", status=200))
    record = records_of(path)[-1]
    assert (record["event"], record["name"], record["seq"]) == ("call", "ann", 2)
    assert record["at"] == "2026-11-25T18:40:00.500Z"
    audit.close()
    assert events_of(path) == ["opened", "call", "closed"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_later_router_goes_on_with_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for _ in range(3):
        a_log(path).close()
    assert [record["seq"] for record in records_of(path)] == [1, 2, 3, 4, 5, 6]


def test_refused_logins_are_counted_by_address_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = a_log(path)
    for number in range(100_000):
        audit.refused("clients", f"10.0.{number % 1000 >> 8}.{number % 256}", "the API key is not known")
    audit.refused("admin", "10.9.9.9", "the admin key is not known")
    audit.close()
    refused = [record for record in records_of(path) if record["event"] == "refused"]
    assert sum(record["count"] for record in refused) == 100_001
    assert len(refused) <= 66
    assert {record["address"] for record in refused} >= {"10.0.0.0", "others"}
    assert path.stat().st_size < 40_000


def test_a_large_file_is_set_aside_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = a_log(path, file_bytes=2_000, keep=3)
    for number in range(60):
        wait(audit.put("call", number=number))
    audit.close()
    assert len(files_of(path)) <= 3
    records = records_of(path)
    assert records[0]["seq"] > 1, "the oldest are gone"
    assert [record["seq"] for record in records] == list(range(records[0]["seq"], 63))
    assert [record["number"] for record in newest(path, most=5, event="call")] == [59, 58, 57, 56, 55]


@pytest.mark.parametrize("size", [1, 40, 200])
def test_a_line_that_a_kill_tore_is_cut_off_and_the_gap_recorded(size: int, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    a_log(path).close()
    whole = path.read_bytes()
    line, _ = Chain().line({"at": "", "event": "call", "more": "x" * 300}, START)
    path.write_bytes(whole + line[:size])
    a_log(path).close()
    assert events_of(path) == ["opened", "closed", "repaired", "opened", "closed"]
    assert records_of(path)[2]["torn_bytes"] == size


def test_a_running_router_notices_that_records_were_taken_away(tmp_path: Path) -> None:
    path, events = tmp_path / "audit.log", list[str]()
    audit = a_log(path, on_event=events.append)
    wait(audit.put("call", number=1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1]))
    wait(audit.put("call", number=2))
    assert events == ["audit_broken"]
    assert newest(path, most=1, event="broken")[0]["reason"].startswith("the file is shorter than before, when it had")
    path.unlink()
    wait(audit.put("call", number=3))
    audit.close()
    assert events == ["audit_broken", "audit_broken"]
    assert newest(path, most=1, event="broken")[0]["reason"].startswith("the file is gone, with record")


def test_a_changed_last_line_is_noticed_at_the_start(tmp_path: Path) -> None:
    path, events = tmp_path / "audit.log", list[str]()
    a_log(path).close()
    path.write_bytes(path.read_bytes().replace(b'"closed"', b'"clozed"'))
    a_log(path, on_event=events.append).close()
    assert events == ["audit_broken"]
    [bad] = [found for found in checked(path, Chain()) if found.problem]
    assert (bad.number, bad.problem) == (2, "was changed: its seal does not fit")


def test_while_the_disk_is_full_records_wait_and_then_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events, is_full = tmp_path / "audit.log", list[str](), threading.Event()
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    real = module._write_all

    def write_all(descriptor: int, data: bytearray) -> None:
        if is_full.is_set():
            real(descriptor, data[:20])
            raise OSError(28, "No space left on device")
        real(descriptor, data)

    monkeypatch.setattr(module, "_write_all", write_all)
    audit = a_log(path, on_event=events.append)
    is_full.set()
    first = audit.put("call", number=1)
    while audit.trouble is None:
        threading.Event().wait(0.005)
    assert not first.done()
    is_full.clear()
    wait(first, audit.put("call", number=2))
    audit.close()
    assert events == ["audit_failed"]
    assert [record.get("number") for record in records_of(path)] == [None, 1, 2, None]


def test_records_that_find_no_place_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    path, events = tmp_path / "audit.log", list[str]()
    audit = AuditLog(path, Chain(), on_event=events.append)
    futures = [audit.put("call", number=number) for number in range(5)]
    assert [future.done() for future in futures] == [False, False, True, True, True]
    audit.open()
    audit.close()
    assert events == ["audit_lost"] * 3
    assert [record["count"] for record in records_of(path) if record["event"] == "lost"] == [3]


def test_a_file_that_cannot_be_written_is_a_mistake_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written.*name another file with audit.file"):
        AuditLog(tmp_path / "missing" / "audit.log", Chain()).open()


WRITER = """
import sys
from pathlib import Path
from router.operate.audit.chain import Chain
from router.operate.audit.log import AuditLog
audit = AuditLog(Path(sys.argv[1]), Chain(b"k"), file_bytes=20_000, keep=100)
audit.open()
for number in range(100):
    audit.put("call", writer=sys.argv[2], number=number).result(30)
audit.close()
"""


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    records = records_of(path, Chain(b"k"))
    assert len(records) == 3 * 102
    assert len(files_of(path)) > 2
    for number in "012":
        assert [r["number"] for r in records if r.get("writer") == number] == list(range(100))


def only_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse what it refuses for a file with the attribute `a` (chattr): to cut and to rename it."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "ftruncate", refuse)
    monkeypatch.setattr(module, "set_aside", refuse)


def test_a_file_that_cannot_be_set_aside_has_each_record_once_and_the_trouble_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "audit.log", list[str]()
    with monkeypatch.context() as refusing:
        only_append(refusing)
        audit = a_log(path, file_bytes=500, on_event=events.append)
        for number in range(20):
            wait(audit.put("call", number=number))
        assert audit.trouble is None
        assert audit.overdue == "[Errno 1] Operation not permitted"
        assert events == ["audit_overdue"]
    audit._rotate_at = 0.0
    wait(audit.put("call", number=20))
    audit.close()
    assert (audit.overdue, len(files_of(path))) == (None, 2)
    assert [record["number"] for record in records_of(path) if "number" in record] == list(range(21))


@pytest.mark.parametrize("kept", [0, 1, 30, 300, 500, 10_000])
def test_what_a_write_that_failed_left_in_a_file_that_cannot_be_cut_is_not_written_again(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_full = tmp_path / "audit.log", threading.Event()
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    only_append(monkeypatch)
    real = module._write_all

    def write_all(descriptor: int, data: bytearray) -> None:
        real(descriptor, data[:kept] if is_full.is_set() else data)
        if is_full.is_set():
            is_full.clear()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_all", write_all)
    audit = a_log(path)
    is_full.set()
    wait(*[audit.put("call", number=number) for number in range(5)])
    wait(audit.put("call", number=5))
    audit.close()
    assert [record["number"] for record in records_of(path) if "number" in record] == list(range(6))


@pytest.mark.parametrize(
    "details",
    [
        {"asked": "x" * 200_000},
        {"asked": {"deep": ["y" * 100] * 2000}},
        {"asked": "half \ud83d a pair"},
        {"asked": object()},
    ],
)
def test_a_record_of_any_content_is_one_that_can_be_read(details: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = a_log(path)
    wait(audit.put("call", name="ann", **details), audit.put("call", name="bob"))
    audit.close()
    records = records_of(path)
    assert [record.get("name") for record in records] == [None, "ann", "bob", None]
    assert "shortened" in records[1]


def test_a_torn_line_is_good_only_if_the_record_behind_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    a_log(path).close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for forged in (lines[0] + b"torn\n" + lines[1], b"torn\n" + whole, whole + b"torn\n"):
        path.write_bytes(forged)
        [bad] = [found for found in checked(path, Chain()) if found.problem]
        assert bad.problem == "is no line of an audit log"


def test_the_chain_goes_on_behind_a_line_that_is_no_record(tmp_path: Path) -> None:
    path, events = tmp_path / "audit.log", list[str]()
    a_log(path).close()
    with path.open("ab") as file:
        file.write(b"another program wrote this\n")
    a_log(path, on_event=events.append).close()
    assert events == ["audit_broken"]
    assert [record["seq"] for record in newest(path, most=9)] == [5, 4, 3, 2, 1]


def test_records_behind_a_clock_that_was_set_back_are_found(tmp_path: Path) -> None:
    path, now = tmp_path / "audit.log", [1_795_632_000.0]
    audit = a_log(path, unix_time=lambda: now[0])
    for number, at in enumerate((0, 3600, 60)):
        now[0] = 1_795_632_000.0 + at
        wait(audit.put("call", number=number))
    audit.close()
    period = AuditPeriod.read("2026-11-25T19:00", None)
    assert [record["number"] for record in newest(path, most=9, period=period)] == [1]


@pytest.mark.parametrize("refused", ["audit.log", "audit.log.2", "audit.log.0"])
def test_files_that_cannot_all_be_moved_stay_and_are_read_in_their_order(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.log"
    audit = a_log(path, file_bytes=400)
    for number in range(12):
        wait(audit.put("call", number=number))
    before, replace = len(files_of(path)), Path.replace
    assert before > 3

    def replace_others(file: Path, to: Path | str) -> Path:
        if file.name == refused:
            raise PermissionError(1, "Operation not permitted")
        return replace(file, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_others)
        for number in range(12, 20):
            audit._rotate_at = 0.0
            wait(audit.put("call", number=number))
        assert [record["number"] for record in records_of(path) if "number" in record] == list(range(20))
    audit._rotate_at = 0.0
    wait(audit.put("call", number=20))
    audit.close()
    assert [record["number"] for record in records_of(path) if "number" in record] == list(range(21))
    assert not Path(f"{path}.0").exists()


def test_a_router_starts_while_the_disk_of_the_audit_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_full, write = tmp_path / "audit.log", threading.Event(), module.os.write

    def write_or_fail(file: int, data: bytes) -> int:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(module.os, "write", write_or_fail)
    is_full.set()
    audit = a_log(path)
    called = audit.put("call", status=200)
    is_full.clear()
    wait(called)
    audit.close()
    assert events_of(path) == ["opened", "call", "closed"]
