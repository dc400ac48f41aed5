from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.kv.block_files import BlockFiles, bytes_on_disk
from shards.kv.raw_block import HEADER_BYTES, AnotherBlock, BrokenBlock
from tests.shards.kv.blocks_on_disk import FINGERPRINT, a_header, a_label

CONTENT = bytes(range(200))


def put(files: BlockFiles, *tokens: int, content: bytes = CONTENT, **more: str) -> None:
    files.write(a_header(a_label(*tokens, **more), content), [memoryview(content[:50]), memoryview(content[50:])])


def get(files: BlockFiles, *tokens: int, size: int = len(CONTENT), **more: str) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    files.read(a_label(*tokens, **more), [view[:50], view[50:]])
    return bytes(buffer)


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "kv", FINGERPRINT)


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "kv").rglob("*.kv")
    return path


def test_a_block_comes_back_as_it_was(files: BlockFiles) -> None:
    put(files, 1, 2)
    assert get(files, 1, 2) == CONTENT
    headers, broken = files.scan()
    assert ([header.label for header in headers], broken) == ([a_label(1, 2)], 0)


def test_files_and_folders_are_private(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_scan_has_parents_first(files: BlockFiles) -> None:
    for tokens in ((1, 2, 3), (1,), (4,), (1, 2)):
        put(files, *tokens)
    assert [header.label.depth for header in files.scan()[0]] == [0, 0, 1, 2]


@pytest.mark.parametrize("at", [0, 20, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_a_changed_byte_is_found(files: BlockFiles, tmp_path: Path, at: int) -> None:
    put(files, 1)
    data = bytearray(the_file(tmp_path).read_bytes())
    data[at] ^= 0xFF
    the_file(tmp_path).write_bytes(data)
    with pytest.raises(BrokenBlock):
        get(files, 1)


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 199])
def test_a_truncated_file_is_broken_and_a_scan_deletes_it(files: BlockFiles, tmp_path: Path, size: int) -> None:
    put(files, 1)
    os.truncate(the_file(tmp_path), size)
    with pytest.raises(BrokenBlock):
        get(files, 1)
    assert files.scan() == ([], 1)
    assert not list((tmp_path / "kv").rglob("*.kv"))


def test_a_block_of_another_size_is_broken(files: BlockFiles) -> None:
    put(files, 1)
    with pytest.raises(BrokenBlock, match="not as long"):
        get(files, 1, size=300)


def test_another_block_under_the_key_is_not_read(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    name = the_file(tmp_path)
    put(files, 2, domain="acme")
    other = next(path for path in (tmp_path / "kv").rglob("*.kv") if path != name)
    other.rename(name)
    with pytest.raises(AnotherBlock, match="holds another block"):
        get(files, 1)
    assert files.scan() == ([], 1)


def test_what_was_not_finished_is_deleted(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    the_file(tmp_path).rename(the_file(tmp_path).parent / "unfinished")
    assert files.scan() == ([], 0)
    assert not list(files._folder.iterdir())


def test_a_write_that_fails_leaves_nothing(files: BlockFiles) -> None:
    (files._folder / f"{a_label(1).key:016x}.kv").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        put(files, 1)
    assert not files._temporary.exists()


def test_deleting_twice_is_no_error(files: BlockFiles) -> None:
    put(files, 1)
    files.delete(a_label(1).key)
    files.delete(a_label(1).key)
    with pytest.raises(FileNotFoundError):
        get(files, 1)


def test_blocks_of_another_fingerprint_are_foreign_and_can_be_deleted(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    files.close()
    later = BlockFiles(tmp_path / "kv", bytes(32))
    assert later.scan() == ([], 0)
    (folder,) = later.foreign()
    assert folder.size == bytes_on_disk(HEADER_BYTES + len(CONTENT)) == 4096
    later.delete_foreign(folder)
    assert later.foreign() == []


def test_two_processes_have_two_lanes_and_a_later_one_finds_the_first(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    beside = BlockFiles(tmp_path / "kv", FINGERPRINT)
    assert beside.scan() == ([], 0)
    assert beside.foreign() == []
    files.close()
    assert len(BlockFiles(tmp_path / "kv", FINGERPRINT).scan()[0]) == 1


def test_a_directory_has_64_lanes(tmp_path: Path) -> None:
    held = [BlockFiles(tmp_path, FINGERPRINT) for _ in range(64)]
    with pytest.raises(OSError, match="64 shards use"):
        BlockFiles(tmp_path, FINGERPRINT)
    assert repr(held[63]) == f"BlockFiles({tmp_path}/63/{FINGERPRINT.hex()[:32]})"


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        BlockFiles(tmp_path / "file" / "kv", FINGERPRINT)


@pytest.mark.parametrize("which", ["lane", "fingerprint"])
def test_a_folder_that_is_a_link_is_refused_and_its_target_stays_as_it_is(tmp_path: Path, which: str) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o755)
    lane = tmp_path / "kv" / "0"
    place = lane if which == "lane" else lane / FINGERPRINT.hex()[:32]
    place.parent.mkdir(parents=True)
    place.symlink_to(target)
    with pytest.raises(OSError, match="is a link, or of another user"):
        BlockFiles(tmp_path / "kv", FINGERPRINT)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    lane = tmp_path / "kv" / "0"
    lane.mkdir(parents=True)
    os.chown(lane, 12345, 12345)
    with pytest.raises(OSError, match="is a link, or of another user"):
        BlockFiles(tmp_path / "kv", FINGERPRINT)


def as_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("replaced", [as_a_link, as_a_pipe, as_a_device])
def test_a_block_that_is_no_file_is_broken_and_a_scan_deletes_it(
    files: BlockFiles, tmp_path: Path, replaced: Callable[[Path], None]
) -> None:
    put(files, 1)
    replaced(the_file(tmp_path))
    with pytest.raises(BrokenBlock):
        get(files, 1)
    assert files.scan() == ([], 1)
    assert not list((tmp_path / "kv").rglob("*.kv"))


def test_each_flipped_bit_of_a_file_is_found_by_reading_or_scanning(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    path = the_file(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises((BrokenBlock, AnotherBlock)):
            get(files, 1)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BrokenBlock):
            get(files, 1)
    path.write_bytes(whole)
    assert get(files, 1) == CONTENT
