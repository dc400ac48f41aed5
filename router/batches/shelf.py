"""Files and jobs as documents and contents of a store. All methods block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from router.batches.job import Job
from router.batches.store.base import BatchStore, ContentDraft
from router.batches.stored_file import StoredFile

_FILES, _JOBS = msgspec.json.Decoder(StoredFile), msgspec.json.Decoder(Job)


class BatchShelf:
    """The files and jobs of all tenants in `store`."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store

    def __repr__(self) -> str:
        return f"<BatchShelf in {self.store!r}>"

    # files

    def add_file(self, file: StoredFile, draft: ContentDraft) -> None:
        """Keep `draft` as the content of `file`."""
        draft.commit(_content(file))
        self.store.write(_file_key(file.tenant, file.id), msgspec.json.encode(file))

    def file(self, tenant: str, id: str) -> StoredFile | None:  # noqa: A002 - it is the file's id
        """The file of `tenant` with this id."""
        raw = self.store.read(_file_key(tenant, id))
        return None if raw is None else _FILES.decode(raw)

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
        """Bytes of a tenant's files and results."""
        return self.store.sizes(f"contents/{tenant}") + self.store.sizes(f"results/{tenant}")

    # jobs

    def add_job(self, job: Job) -> None:
        """Begin `job`; its input is there."""
        # a mark without a job does no harm, a job without a mark would never begin
        self.store.write(_open_key(job.tenant, job.id), b"")
        self.save_job(job)

    def lend_input(self, job: Job, file: StoredFile) -> None:
        """Have the content of `file` as the input of `job`. Raises FileNotFoundError."""
        self.store.link(_content(file), _input_key(job))

    def give_input(self, job: Job, draft: ContentDraft) -> None:
        """Have `draft` as the input of `job`."""
        draft.commit(_input_key(job))

    def input(self, job: Job) -> Path:
        """The input of `job`. Raises FileNotFoundError."""
        return self.store.local(_input_key(job))

    def save_job(self, job: Job) -> None:
        """Keep `job` as it is now."""
        self.store.write(_job_key(job.tenant, job.id), msgspec.json.encode(job))

    def job(self, tenant: str, id: str) -> Job | None:  # noqa: A002
        """The job of `tenant` with this id, with the time at which it was cancelled if it was."""
        raw = self.store.read(_job_key(tenant, id))
        if raw is None:
            return None
        job = _JOBS.decode(raw)
        if job.has_ended or job.cancelling_at is not None:
            return job
        mark = self.store.read(_cancel_key(tenant, id))
        return job if not mark else msgspec.structs.replace(job, cancelling_at=float(mark))

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
        """Those that have files or jobs."""
        return {*self.store.names("files"), *self.store.names("jobs")}


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
