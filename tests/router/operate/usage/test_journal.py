"""The journal: what was appended is there after any end of its process, and once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.operate.usage.journal import SUFFIX, UNREADABLE, Journal, orphans
from router.operate.usage.rows import MOST_AMOUNT, Rows, add, cleaned
from tests.router.operate.usage.parts import a_key, some_rows


def left(journal: Journal) -> Path:
    """The file as a process leaves it that is killed: unlocked, and there."""
    journal.close(is_done=False)
    return journal.path


def found(folder: Path, after: int = 0) -> list[tuple[str, int, Rows]]:
    seen = []
    for orphan in orphans(folder):
        seen.append((orphan.writer, *orphan.after(after)))
        orphan.release()
    return seen


def test_batches_of_a_router_that_was_killed_are_found_in_order_and_added_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert [journal.append(some_rows(hours)) for hours in (1, 2, 3)] == [1, 2, 3]
    left(journal)
    [(writer, seq, rows)] = found(tmp_path)
    everything: Rows = {}
    for hours in (1, 2, 3):
        add(everything, some_rows(hours))
    assert (writer, seq, rows) == (journal.writer, 3, everything)
    assert found(tmp_path, after=2) == [(journal.writer, 3, some_rows(3))]
    assert found(tmp_path, after=3) == [(journal.writer, 3, {})]


def test_the_journal_of_a_router_that_runs_is_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(some_rows())
    assert found(tmp_path) == []
    journal.rewrite([(1, some_rows())])
    assert found(tmp_path) == [], "the new file is locked before it has its name"
    left(journal)
    assert len(found(tmp_path)) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cut=st.integers(0, 5000))
def test_a_file_that_breaks_off_anywhere_has_whole_batches_or_none(cut: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for hours in (1, 2, 3):
        journal.append(some_rows(hours))
    whole = left(journal).read_bytes()
    journal.path.write_bytes(whole[: cut % (len(whole) + 1)])
    for _, seq, rows in found(tmp_path):
        expected: Rows = {}
        for hours in range(1, seq + 1):
            add(expected, some_rows(hours))
        assert rows == expected
    journal.path.unlink()


def test_a_journal_is_written_anew_with_what_is_still_needed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for _ in range(100):
        journal.append(some_rows())
    before = journal.size
    journal.rewrite([(90, some_rows(1)), (100, some_rows(2))])
    assert journal.size < before / 10
    assert journal.append(some_rows(3)) == 101
    left(journal)
    everything = some_rows(2)
    add(everything, some_rows(3))
    assert found(tmp_path, after=90) == [(journal.writer, 101, everything)]


def test_a_journal_that_is_done_is_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close(is_done=True)
    assert list(tmp_path.iterdir()) == []


def test_an_orphan_that_was_added_is_removed(tmp_path: Path) -> None:
    left(Journal(tmp_path))
    for orphan in orphans(tmp_path):
        orphan.remove()
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name, text in {f"a{SUFFIX}": "not a journal", f"b{SUFFIX}": "", "c.txt": "{}"}.items():
        (tmp_path / name).write_text(text)
    assert found(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_batch_that_cannot_be_written_leaves_no_part_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append(some_rows())

    def full(file: object, data: bytes) -> None:
        file.write(data[:20])  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("router.operate.usage.journal._write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(some_rows(2))
    assert journal.append(some_rows(3)) == 2
    left(journal)
    assert found(tmp_path, after=1) == [(journal.writer, 2, some_rows(3))]


def test_a_part_of_a_batch_that_cannot_be_cut_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(some_rows())
    file = journal._file

    class Appended:
        """Of a file that may only be appended to, or of a file system that is ill."""

        def truncate(self, _: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        def write(self, data: bytes) -> int:
            file.write(bytes(data)[:30])
            raise OSError(28, "No space left on device")

        def tell(self) -> int:
            return file.tell()

    monkeypatch.setattr(journal, "_file", Appended())
    with pytest.raises(OSError, match="No space"):
        journal.append(some_rows(2))
    monkeypatch.setattr(journal, "_file", file)
    assert journal.append(some_rows(3)) == 2
    left(journal)
    assert found(tmp_path, after=1) == [(journal.writer, 2, some_rows(3))]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"{",
        b'{"seq": "2", "rows": []}',
        b'{"seq": 2, "rows": [[1]]}',
        b'{"seq": 2, "rows": [["%b"]]}' % (b'","'.join([b"x"] * 25)),
    ],
)
def test_a_line_that_cannot_be_read_holds_no_other_up_and_is_kept(line: bytes, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(some_rows())
    journal._file.write(line + b"\n")
    journal.append(some_rows(2))
    left(journal)
    everything = some_rows()
    add(everything, some_rows(2))
    assert found(tmp_path) == [(journal.writer, 2, everything)]
    [orphan] = orphans(tmp_path)
    assert orphan.unreadable == 1
    orphan.remove()
    [kept] = tmp_path.iterdir()
    assert kept.suffix == UNREADABLE
    assert line in kept.read_bytes()
    assert found(tmp_path) == []


def test_journals_are_for_their_user_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "above" / "journal")
    journal.rewrite([(1, some_rows())])
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "above").rglob("*")]
    assert sorted(modes) == [0o600, 0o700]
    journal.close(is_done=True)


@given(st.text(st.characters(codec=None)), st.integers())
def test_rows_are_stored_whatever_a_client_or_a_backend_says(text: str, amount: int) -> None:
    [(key, amounts)] = cleaned({a_key(user=text, model=text): [amount] * 3}).items()
    key.user.encode()
    assert "\0" not in key.user
    assert all(0 <= each <= MOST_AMOUNT for each in amounts)
    if text.isprintable():
        assert key.user == text


def test_names_that_are_the_same_for_a_database_are_one_row() -> None:
    rows = {a_key(user="a\0"): [1, 2], a_key(user="a?"): [3, 4]}
    [sums] = cleaned(rows).values()
    assert sums[:2] == [4, 6]
