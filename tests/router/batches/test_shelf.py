"""Files and jobs in a store: states that follow one another, records that cannot be read, and what a kill leaves."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from policies.errors import QuotaExceeded
from router.batches.answers import Done, LineAnswer, answers_in
from router.batches.ids import made_at, new_id
from router.batches.job import Job, JobTokens
from router.batches.pace import Pace
from router.batches.shelf import BatchShelf, log_key
from router.batches.storage import Storage
from router.batches.store.base import BatchStoreFailed
from router.batches.store.directory import DirectoryStore
from router.batches.stored_file import StoredFile
from router.call.identify import Granted
from tests.router.batches.parts import files_in

NOW = 1_800_000_000.0
DAY_S = 86_400.0


@pytest.fixture
def shelf(tmp_path: Path) -> BatchShelf:
    store = DirectoryStore(tmp_path)
    store.open()
    return BatchShelf(store)


def a_job(number: int = 0, at: float = NOW) -> Job:
    return Job(
        id=new_id("batch_", at, random.Random(number)),
        tenant="acme",
        api="openai",
        endpoint="/v1/chat/completions",
        created_at=at,
        expires_at=at + DAY_S,
        granted=Granted("acme"),
    )


def begun(shelf: BatchShelf, job: Job, content: bytes = b"line\n") -> Job:
    draft = shelf.store.draft(job.tenant)
    draft.write(content)
    shelf.give_input(job, draft)
    shelf.add_job(job)
    return job


def a_file(shelf: BatchShelf, size: int, at: float = NOW) -> StoredFile:
    file = StoredFile(
        id=new_id("file-", at, random.Random(size)), tenant="acme", purpose="batch", name="f", size=size,
        created_at=at, expires_at=at + DAY_S,
    )  # fmt: skip
    draft = shelf.store.draft("acme")
    draft.write(b"x" * size)
    shelf.add_file(file, draft)
    return file


def test_a_state_is_kept_behind_the_one_that_its_writer_has_read(shelf: BatchShelf) -> None:
    first = begun(shelf, a_job())
    second = shelf.save_job(replace(first, status="in_progress"))
    assert shelf.job("acme", first.id) == second
    with pytest.raises(BatchStoreFailed, match="changed by another router"):
        shelf.save_job(replace(first, status="failed"))
    # a request that was sent again, because its answer was lost
    assert shelf.save_job(replace(first, status="in_progress")) == second
    assert shelf.job("acme", first.id) == second


def test_a_state_that_ended_is_final_and_a_deleted_job_stays_deleted(shelf: BatchShelf) -> None:
    job = shelf.save_job(replace(begun(shelf, a_job()), status="in_progress"))
    ended = shelf.save_job(replace(job, status="completed", ended_at=NOW))
    for late in (job, ended):
        with pytest.raises(BatchStoreFailed):
            shelf.save_job(replace(late, status="in_progress"))
    assert shelf.job("acme", job.id) == ended
    shelf.drop_job(ended)
    with pytest.raises(BatchStoreFailed):
        shelf.save_job(ended)
    assert shelf.job("acme", job.id) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"id": 1}', b"null", b'{"id":"' + b"x" * 100])
def test_a_document_that_cannot_be_read_is_said_once_and_holds_no_other_up(
    shelf: BatchShelf, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    torn, good = begun(shelf, a_job(1)), begun(shelf, a_job(2))
    shelf.store.write(f"jobs/acme/{torn.id}.json", content)
    shelf.store.write("files/acme/file-x.json", content)
    for _ in range(3):
        assert [shelf.job("acme", name) for name in shelf.jobs("acme")].count(None) == 1
        assert shelf.job("acme", good.id) == good
        assert shelf.file("acme", "file-x") is None
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


@pytest.mark.parametrize("mark", [b"", b"soon", b"\xff", b"1800000005.5"])
def test_a_mark_cancels_whatever_it_says(shelf: BatchShelf, mark: bytes) -> None:
    job = begun(shelf, a_job())
    shelf.store.write(f"cancelled/acme/{job.id}", mark)
    found = shelf.job("acme", job.id)
    assert found is not None
    assert found.cancelling_at == (NOW + 5.5 if mark.startswith(b"18") else NOW)


def test_answers_that_cannot_be_read_are_none_and_the_others_are_there(shelf: BatchShelf) -> None:
    job, done = a_job(), Done()
    log = shelf.store.log(log_key(job))
    answers = [LineAnswer(number, "succeeded", JobTokens(), msgspec.Raw(b'{"a":1}')) for number in (1, 2, 3)]
    for answer in answers:
        log.append(msgspec.json.encode(answer) + b"\n")
        # as an earlier version wrote an answer that was indented, and as a damaged disk reads
        log.append(b'[7,"succeeded",[0,0,0,0],{\n  "a": 1\n}]\n\xff\xfe\n\n[8,"never",[0,0,0,0],{}]\n')
    log.close()
    assert [each.number for each in answers_in(shelf.store, log_key(job), done, Pace())] == [1, 2, 3]
    assert 7 not in done


def test_what_a_kill_left_is_swept_after_a_day_and_nothing_else(shelf: BatchShelf) -> None:
    running, file = begun(shelf, a_job(1)), a_file(shelf, 10)
    never_begun, unreadable, marked, orphan = (a_job(number) for number in range(2, 6))
    shelf.store.write(f"inputs/{never_begun.id}", b"input")
    begun(shelf, unreadable)
    shelf.store.write(f"jobs/acme/{unreadable.id}.json", b"{")
    shelf.store.write(f"open/acme/{marked.id}", b"")
    shelf.store.write(f"results/acme/{orphan.id}", b"results")
    shelf.store.write(f"contents/acme/{new_id('file-', NOW, random.Random(9))}", b"content")
    before = len(files_in(shelf.store.scratch().parent))
    shelf.sweep(NOW - 1)
    assert len(files_in(shelf.store.scratch().parent)) == before
    shelf.sweep(NOW + 1)
    assert [name for _, name in shelf.open_jobs()] == [running.id]
    assert (shelf.store.names("inputs"), shelf.store.names("results/acme")) == ([running.id], [])
    assert shelf.store.names("contents/acme") == [file.id]
    assert shelf.job("acme", running.id) == running


def test_the_time_of_a_name_is_read_back() -> None:
    assert made_at(new_id("msgbatch_", NOW + 0.25, random.Random(1))) == NOW + 0.25
    assert made_at("another.json") == 0.0


def test_all_that_is_there_for_a_tenant_counts_until_it_is_deleted(shelf: BatchShelf) -> None:
    file, job = a_file(shelf, 1000), a_job()
    alone = shelf.stored_bytes("acme")
    assert 1000 < alone < 1500
    shelf.lend_input(job, file)
    shelf.add_job(job)
    lent = shelf.stored_bytes("acme")
    assert alone < lent < alone + 600
    shelf.drop_file(file)
    assert 1000 < shelf.stored_bytes("acme") < lent
    log = shelf.store.log(log_key(job))
    log.append(b"x" * 500 + b"\n")
    log.close()
    draft = shelf.store.draft("acme")
    draft.write(b"y" * 300)
    assert shelf.stored_bytes("acme") > 1800
    assert shelf.stored_bytes("other") == 0
    draft.discard()
    shelf.close_job(job)
    assert shelf.stored_bytes("acme") < 600


def test_uploads_at_once_are_granted_no_more_than_there_is(shelf: BatchShelf) -> None:
    storage = Storage(shelf, lambda: 5_000_000)
    with storage.upload("acme") as announced, storage.upload("acme") as unannounced:
        announced.announce(3_000_000)
        draft = shelf.store.draft("acme")
        for _ in range(20):
            unannounced.write(draft, b"x" * 100_000)
        with pytest.raises(QuotaExceeded, match="5,000,000 are its limit"):
            unannounced.write(draft, b"x")
        with storage.upload("other") as other:
            other.announce(4_000_000)
        draft.discard()
    with storage.upload("acme") as again:
        again.announce(5_000_000)


def test_a_thread_that_writes_when_its_call_was_cancelled_leaves_no_grant(shelf: BatchShelf) -> None:
    storage = Storage(shelf, lambda: 5_000_000)
    draft = shelf.store.draft("acme")
    with storage.upload("acme") as upload:
        upload.announce(1000)
    upload.write(draft, b"x" * 1000)
    draft.discard()
    assert "0 bytes on their way" in repr(storage)
