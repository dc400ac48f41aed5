"""Files and jobs as documents and contents of a store. All methods block."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from router.batches.ids import made_at
from router.batches.job import Job
from router.batches.store.base import BatchStore, BatchStoreFailed, ContentDraft
from router.batches.stored_file import StoredFile

T = TypeVar("T")

_FILES, _JOBS = msgspec.json.Decoder(StoredFile), msgspec.json.Decoder(Job)

_MOST_TOLD = 1000

_log = logging.getLogger("pointsman.batches")


class BatchShelf:
    """The files and jobs of all tenants in `store`."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self._told = set[str]()
        """Documents of which the log has said that they cannot be read."""

    def __repr__(self) -> str:
        return f"<BatchShelf in {self.store!r}>"

    # files

    def add_file(self, file: StoredFile, draft: ContentDraft) -> None:
        """Keep `draft` as the content of `file`."""
        draft.commit(_content(file))
        self.store.write(_file_key(file.tenant, file.id), msgspec.json.encode(file))

    def file(self, tenant: str, id: str) -> StoredFile | None:  # noqa: A002 - it is the file's id
        """The file of `tenant` with this id."""
        return self._read(_file_key(tenant, id), _FILES)

    def files(self, tenant: str) -> Sequence[str]:
        """The ids of a tenant's files, the oldest first."""
        return [name.removesuffix(".json") for name in self.store.names(f"files/{tenant}")]

    def content(self, file: StoredFile) -> Path:
        """The content of `file`. Raises FileNotFoundError."""
        return self.store.local(_content(file))

    def drop_file(self, file: StoredFile) -> None:
        """Delete it; jobs that run on it go on."""
        self.store.delete(_file_key(file.tenant, file.id))
        self.store.delete(_content(file))

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of everything that is stored for a tenant: files, inputs of jobs that outlive their file, answers
        without a result yet, and unfinished uploads."""
        folders = (f"{kind}/{tenant}" for kind in ("contents", "results", "files", "jobs"))
        running = (key for _, job in self.open_jobs(tenant) for key in (f"inputs/{job}", f"logs/{job}"))
        return self.store.sizes(*folders, *running) + self.store.drafted(tenant)

    # jobs

    def add_job(self, job: Job) -> None:
        """Begin `job`; its input is there."""
        # a mark without a job does no harm, a job without a mark would never begin
        self.store.write(_open_key(job.tenant, job.id), b"")
        self.store.write(_job_key(job.tenant, job.id), msgspec.json.encode(job))

    def lend_input(self, job: Job, file: StoredFile) -> None:
        """Have the content of `file` as the input of `job`. Raises FileNotFoundError."""
        self.store.link(_content(file), _input_key(job))

    def give_input(self, job: Job, draft: ContentDraft) -> None:
        """Have `draft` as the input of `job`."""
        draft.commit(_input_key(job))

    def drop_input(self, job: Job) -> None:
        """Delete the input of `job`, which has not begun."""
        self.store.delete(_input_key(job))

    def input(self, job: Job) -> Path:
        """The input of `job`. Raises FileNotFoundError."""
        return self.store.local(_input_key(job))

    def save_job(self, job: Job) -> Job:
        """Keep `job` as the state behind the one that its writer has read; as it was kept. What ended is final.

        Raises BatchStoreFailed if it has ended or was deleted, or another router has kept another state.
        """
        key, saved = _job_key(job.tenant, job.id), replace(job, seq=job.seq + 1)
        data = msgspec.json.encode(saved)

        def change(found: bytes | None) -> bytes | None:
            if found == data:
                return None
            before = None if found is None else self._decoded(key, found, _JOBS)
            if before is None or before.has_ended or before.seq != job.seq:
                raise BatchStoreFailed(f"{key} was changed by another router, and is not changed here")
            return data

        self.store.change(key, change)
        return saved

    def job(self, tenant: str, id: str) -> Job | None:  # noqa: A002
        """The job of `tenant` with this id, with the time at which it was cancelled if it was."""
        job = self._read(_job_key(tenant, id), _JOBS)
        if job is None or job.has_ended or job.cancelling_at is not None:
            return job
        mark = self.store.read(_cancel_key(tenant, id))
        return job if mark is None else replace(job, cancelling_at=_time_of(mark, job))

    def jobs(self, tenant: str) -> Sequence[str]:
        """The ids of a tenant's jobs, the oldest first of each API."""
        return [name.removesuffix(".json") for name in self.store.names(f"jobs/{tenant}")]

    def open_jobs(self, tenant: str | None = None) -> Iterator[tuple[str, str]]:
        """The tenant and the id of each job that has not ended."""
        for owner in self.store.names("open") if tenant is None else (tenant,):
            for name in self.store.names(f"open/{owner}"):
                yield owner, name

    def cancel(self, job: Job, at: float) -> None:
        """Mark `job` as cancelled; the router that runs it sees that."""
        self.store.write(_cancel_key(job.tenant, job.id), repr(at).encode())

    def close_job(self, job: Job) -> None:
        """Drop what an ended job does not need any more."""
        for key in (_cancel_key(job.tenant, job.id), log_key(job), _input_key(job), _open_key(job.tenant, job.id)):
            self.store.delete(key)

    def drop_job(self, job: Job) -> None:
        """Delete an ended job and its results of its own."""
        self.store.delete(_job_key(job.tenant, job.id))
        self.store.delete(results_key(job))

    def results(self, job: Job) -> Path:
        """The results of an ended job that has them by itself. Raises FileNotFoundError."""
        return self.store.local(results_key(job))

    def tenants(self) -> set[str]:
        """Those that have anything here."""
        kinds = ("files", "jobs", "contents", "results", "open")
        return {tenant for kind in kinds for tenant in self.store.names(kind)}

    def sweep(self, before: float) -> None:
        """Drop what a router left that was killed between two steps before this Unix time: a mark or a result of a job
        that is not there or cannot be read, an input or a log without an open job, a content without its file."""

        def old(folder: str) -> Iterator[str]:
            return (name for name in self.store.names(folder) if made_at(name) < before)

        is_open = set[str]()
        for tenant in self.tenants():
            files, jobs = set(self.files(tenant)), set(self.jobs(tenant))
            for kind, known in (("contents", files), ("results", jobs)):
                for name in old(f"{kind}/{tenant}"):
                    if name not in known:
                        self.store.delete(f"{kind}/{tenant}/{name}")
            for name in self.store.names(f"open/{tenant}"):
                if made_at(name) < before and self.job(tenant, name) is None:
                    self.store.delete(_cancel_key(tenant, name))
                    self.store.delete(_open_key(tenant, name))
                else:
                    is_open.add(name)
        for kind in ("inputs", "logs"):
            for name in old(kind):
                if name not in is_open:
                    self.store.delete(f"{kind}/{name}")

    def _read(self, key: str, decoder: msgspec.json.Decoder[T]) -> T | None:
        """The document `key`; None without one, and if it cannot be read: the others are not held up by it."""
        raw = self.store.read(key)
        return None if raw is None else self._decoded(key, raw, decoder)

    def _decoded(self, key: str, raw: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
        try:
            return decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if key not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(key)
                _log.error("%s in the store of batches cannot be read, and counts as not there: %s", key, error)
            return None


def _time_of(mark: bytes, job: Job) -> float:
    """When a job was cancelled: the mark is there, whatever it says."""
    try:
        return float(mark)
    except ValueError:
        return job.created_at


def _file_key(tenant: str, file: str) -> str:
    return f"files/{tenant}/{file}.json"


def _content(file: StoredFile) -> str:
    return f"contents/{file.tenant}/{file.id}"


def _job_key(tenant: str, job: str) -> str:
    return f"jobs/{tenant}/{job}.json"


def _input_key(job: Job) -> str:
    return f"inputs/{job.id}"


def log_key(job: Job) -> str:
    """Where the answers of `job` are appended."""
    return f"logs/{job.id}"


def results_key(job: Job) -> str:
    """Where the results of `job` are, if it has no files."""
    return f"results/{job.tenant}/{job.id}"


def _open_key(tenant: str, job: str) -> str:
    return f"open/{tenant}/{job}"


def _cancel_key(tenant: str, job: str) -> str:
    return f"cancelled/{tenant}/{job}"
