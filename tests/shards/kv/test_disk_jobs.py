from __future__ import annotations

from pathlib import Path

import pytest

from shards.kv.block_files import BlockFiles, ForeignFolder
from shards.kv.disk_jobs import DiskDelete, DiskRead, DiskSweep, DiskThreads, DiskWrite
from shards.kv.raw_block import AnotherBlock
from tests.shards.kv.blocks_on_disk import FINGERPRINT, a_label

CONTENT = bytes(range(256)) * 64


def outcomes_of(threads: DiskThreads, count: int):
    outcomes = []
    while len(outcomes) < count:
        threads.wait(5.0)
        outcomes += threads.outcomes()
    return outcomes


@pytest.fixture
def threads(tmp_path: Path):
    threads = DiskThreads(BlockFiles(tmp_path, FINGERPRINT))
    yield threads
    threads.close()


def test_blocks_are_written_read_and_deleted_on_threads(threads: DiskThreads) -> None:
    jobs = [DiskWrite(a_label(number), 0.0, [memoryview(CONTENT)]) for number in range(20)]
    for job in jobs:
        threads.start(job)
    written = outcomes_of(threads, 20)
    assert [outcome.job for outcome in written] == jobs
    assert all(outcome.error is None and outcome.began_s <= outcome.ended_s for outcome in written)
    buffers = [bytearray(len(CONTENT)) for _ in range(20)]
    for number, buffer in enumerate(buffers):
        threads.start(DiskRead(a_label(number), [memoryview(buffer)]))
    assert all(outcome.error is None for outcome in outcomes_of(threads, 20))
    assert all(buffer == CONTENT for buffer in buffers)
    threads.start(DiskDelete(a_label(0).key))
    assert outcomes_of(threads, 1)[0].error is None
    threads.start(DiskRead(a_label(0), [memoryview(buffers[0])]))
    assert isinstance(outcomes_of(threads, 1)[0].error, FileNotFoundError)


def test_an_error_is_an_outcome_and_the_thread_goes_on(threads: DiskThreads, tmp_path: Path) -> None:
    threads.start(DiskWrite(a_label(1), 0.0, [memoryview(CONTENT)]))
    outcomes_of(threads, 1)
    (path,) = tmp_path.rglob("*.kv")
    path.rename(path.with_name(f"{a_label(2).key:016x}.kv"))
    for _ in range(2):
        threads.start(DiskRead(a_label(2), [memoryview(bytearray(len(CONTENT)))]))
        assert isinstance(outcomes_of(threads, 1)[0].error, AnotherBlock)


def test_a_sweep_deletes_a_folder(threads: DiskThreads, tmp_path: Path) -> None:
    (tmp_path / "0" / "old").mkdir()
    threads.start(DiskSweep(ForeignFolder(tmp_path / "0" / "old", 0)))
    assert outcomes_of(threads, 1)[0].error is None
    assert not (tmp_path / "0" / "old").exists()


def test_waiting_ends_without_an_outcome(threads: DiskThreads) -> None:
    threads.wait(0.01)
    assert threads.outcomes() == []
    assert "0 changes and 0 reads wait" in repr(threads)


def test_closing_finishes_what_was_started(tmp_path: Path) -> None:
    threads = DiskThreads(BlockFiles(tmp_path, FINGERPRINT))
    for number in range(30):
        threads.start(DiskWrite(a_label(number), 0.0, [memoryview(CONTENT)]))
    threads.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 30
    assert len(BlockFiles(tmp_path, FINGERPRINT).scan()[0]) == 30
