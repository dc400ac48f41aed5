"""The SLA file is written whole or not at all, as it was, and what it replaces is kept."""

from __future__ import annotations

import fcntl
import os
from itertools import count, pairwise
from pathlib import Path

import pytest

from policies.errors import Conflict
from router.start.config_writer import MOST_KEPT, ConfigWriter, version_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sla.yaml"
    path.write_text("one")
    return path


def a_writer(path: Path) -> ConfigWriter:
    seconds = count(1000)
    return ConfigWriter(path, lambda: float(next(seconds)))


def test_a_text_takes_the_files_place_with_its_mode_and_the_old_one_is_kept(file: Path) -> None:
    file.chmod(0o640)
    writer = a_writer(file)
    writer.replace("two", expected=version_of("one"))
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("two", 0o640)
    assert [kept.version for kept in writer.kept()] == [version_of("one")]
    assert writer.kept_text(version_of("one")) == "one"
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_the_owner_stays(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    os.chown(file, 1234, 4321)
    a_writer(file).replace("two", expected=version_of("one"))
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 4321)


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "linked.yaml"
    link.parent.mkdir()
    link.symlink_to(file)
    a_writer(link).replace("two", expected=version_of("one"))
    assert link.is_symlink()
    assert file.read_text() == "two"


def test_a_file_that_has_changed_meanwhile_stays(file: Path) -> None:
    file.write_text("by hand")
    with pytest.raises(Conflict, match=f"has version {version_of('by hand')} by now, not {version_of('one')}"):
        a_writer(file).replace("two", expected=version_of("one"))
    assert file.read_text() == "by hand"
    assert len(list(file.parent.iterdir())) == 1


def test_only_one_process_writes_at_a_time(file: Path) -> None:
    other = file.with_name(".sla.yaml.new")
    with other.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="is being written by another process"):
            a_writer(file).replace("two", expected=version_of("one"))
    # what a process left that crashed is in no one's way
    a_writer(file).replace("two", expected=version_of("one"))
    assert file.read_text() == "two"


def test_a_mounted_config_map_says_how_to_change_it(file: Path) -> None:
    (file.parent / "..data").symlink_to(file.parent)
    with pytest.raises(Conflict, match=r"mounted from a ConfigMap.*kubectl create configmap"):
        a_writer(file).replace("two", expected=version_of("one"))


def test_a_folder_that_cannot_be_written_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system")

    writer = a_writer(file)
    monkeypatch.setattr("router.start.config_writer.os.open", refuse)
    with pytest.raises(Conflict, match=r"cannot write .*Read-only file system \(write the text there yourself"):
        writer.replace("two", expected=version_of("one"))


def test_a_file_that_is_gone_is_a_conflict(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="cannot read"):
        a_writer(tmp_path / "none.yaml").text()
    with pytest.raises(Conflict, match="No such file"):
        a_writer(tmp_path / "none.yaml").replace("two", expected="x")


def test_the_oldest_versions_go(file: Path) -> None:
    writer, texts = a_writer(file), ["one", *(f"text {number}" for number in range(MOST_KEPT + 5))]
    for before, after in pairwise(texts):
        writer.replace(after, expected=version_of(before))
    assert [kept.version for kept in writer.kept()] == [
        version_of(text) for text in reversed(texts[-MOST_KEPT - 1 : -1])
    ]
    with pytest.raises(Conflict, match=r"version 'nope' is not kept \(known: "):
        writer.kept_text("nope")
