"""The end of a job: its answers become files for the client, each line once."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from policies.sla.batches import BatchSettings
from router.batches.answers import Done, How, answers_in
from router.batches.ids import new_id
from router.batches.job import Job, Status
from router.batches.lines import lines_of, read_line
from router.batches.pace import Pace
from router.batches.shelf import BatchShelf, log_key, results_key
from router.batches.shown import not_run
from router.batches.store.base import BatchStore, ContentDraft
from router.batches.stored_file import PREFIX, StoredFile

_BUFFER_BYTES = 1 << 20


def finalizing(job: Job, now: float, rng: random.Random) -> Job:
    """`job` with the names of its results, which are the same however often they are written."""
    files = (new_id(PREFIX, now, rng), new_id(PREFIX, now, rng)) if job.api == "openai" else (None, None)
    return replace(
        job, status="finalizing", finalizing_at=now, seconds_left=0.0, output_file=files[0], error_file=files[1]
    )


def end_job(job: Job, shelf: BatchShelf, pace: Pace, unix_time: Callable[[], float], settings: BatchSettings) -> Job:
    """Write the results of `job`, which is finalizing, and its last state; may be done again after a crash. Blocks."""
    done, how, now = Done(), _how_of_rest(job), unix_time()
    output, errors = _Lines(shelf.store, job), _Lines(shelf.store, job)
    try:
        for answer in answers_in(shelf.store, log_key(job), done, pace):
            (output if answer.how == "succeeded" or job.api == "anthropic" else errors).add(bytes(answer.text))
        counts = done.counts(job.counts.total)
        if counts.left:
            for line, raw in pace.through(lines_of(shelf.input(job), most_bytes=1 << 40)):
                if line.number not in done:
                    call = new_id("", now, random.Random(line.number))
                    to = output if job.api == "anthropic" else errors
                    to.add(not_run(job.api, call, read_line(raw).custom_id, how))
            counts = replace(counts, **{how: counts.left})
        ended = replace(job, status=_status(job, counts.expired), ended_at=now, counts=counts, tokens=done.tokens)
        if job.api == "anthropic":
            output.commit(results_key(job))
        else:
            ended = replace(
                ended,
                output_file=_as_file(output, ended, ended.output_file, "output", shelf, settings),
                error_file=_as_file(errors, ended, ended.error_file, "error", shelf, settings),
            )
    finally:
        output.discard()
        errors.discard()
    ended = shelf.save_job(ended)
    shelf.close_job(ended)
    return ended


def _how_of_rest(job: Job) -> How:
    return "expired" if job.cancelling_at is None else "canceled"


def _status(job: Job, expired: int) -> Status:
    if job.cancelling_at is not None:
        return "cancelled"
    return "expired" if expired else "completed"


def _as_file(
    lines: _Lines,
    job: Job,
    id: str | None,  # noqa: A002
    what: str,
    shelf: BatchShelf,
    settings: BatchSettings,
) -> str | None:
    """The id of the file of these lines; None without any."""
    if not lines.count or id is None:
        return None
    now = job.ended_at or job.created_at
    kept_s = settings.keep_s if job.results_s is None else min(job.results_s, settings.keep_s)
    file = StoredFile(
        id=id,
        tenant=job.tenant,
        purpose="batch_output",
        name=f"{job.id}_{what}.jsonl",
        size=lines.flush(),
        created_at=now,
        expires_at=now + kept_s,
    )
    shelf.add_file(file, lines.draft)
    return id


class _Lines:
    """A content of lines."""

    def __init__(self, store: BatchStore, job: Job) -> None:
        self.draft: ContentDraft = store.draft(job.tenant)
        self._buffer = bytearray()
        self.count = 0

    def add(self, line: bytes) -> None:
        self._buffer += line
        self._buffer += b"\n"
        self.count += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> int:
        """Write what is there; the bytes of all."""
        self.draft.write(bytes(self._buffer))
        self._buffer.clear()
        return self.draft.size

    def commit(self, key: str) -> None:
        self.flush()
        self.draft.commit(key)

    def discard(self) -> None:
        self.draft.discard()
