"""The answers of a job's lines: appended to its log as they come, and read from it after a crash and at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Literal

import msgspec

from router.batches.job import Counts, JobTokens
from router.batches.pace import Pace
from router.batches.store.base import AnswerFile, BatchStore

How = Literal["succeeded", "errored", "expired", "canceled"]


class LineAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How line `number` ended, and `text`: its line for the client, a JSON object in the format of the job's API. It
    has no line break, whatever a backend wrote: a line of the log is one answer."""

    number: int
    how: How
    tokens: JobTokens
    text: msgspec.Raw


_ANSWERS = msgspec.json.Decoder(LineAnswer)

_log = logging.getLogger("pointsman.batches")


class Done:
    """The numbers of lines that have ended, with the counts and tokens of all of them; a bit for each line."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.by_how: dict[How, int] = {"succeeded": 0, "errored": 0, "expired": 0, "canceled": 0}
        self.tokens = JobTokens()

    def __repr__(self) -> str:
        return f"<Done {self.by_how}>"

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (number & 7))

    def add(self, answer: LineAnswer) -> bool:
        """Count `answer`, unless its line has ended before; whether it was counted."""
        if answer.number in self:
            return False
        at = answer.number >> 3
        if at >= len(self._bits):
            self._bits += bytes(at + 1024 - len(self._bits))
        self._bits[at] |= 1 << (answer.number & 7)
        self.by_how[answer.how] += 1
        self.tokens += answer.tokens
        return True

    def counts(self, total: int) -> Counts:
        """The counts of a job with so many lines in total."""
        return Counts(total, **self.by_how)


def answers_in(store: BatchStore, key: str, done: Done, pace: Pace) -> Iterator[LineAnswer]:
    """Those in the log `key`, each line once; they are `done` then. What cannot be read is no answer, and its line is
    asked again. Works in a thread, at this `pace`."""
    unreadable = 0
    for raw in pace.through(store.logged(key)):
        try:
            answer = _ANSWERS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            unreadable += 1
            continue
        if done.add(answer):
            yield answer
    if unreadable:
        _log.warning("%s: %d records cannot be read, and count as not answered", key, unreadable)


class AnswerLog:
    """Appends answers to a job's log, all that came while the last ones were written at once."""

    def __init__(self, log: AnswerFile, pace: Pace) -> None:
        self._log, self._pace = log, pace
        self._pending: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<AnswerLog {len(self._pending)} pending>"

    async def append(self, answer: LineAnswer) -> None:
        """Return once `answer` outlives a crash. Raises BatchStoreFailed."""
        written = asyncio.get_running_loop().create_future()
        self._pending.append((msgspec.json.encode(answer) + b"\n", written))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="answers of a batch")
        # a caller that is cancelled meanwhile has its answer written all the same
        await written

    async def close(self) -> None:
        """Write what is pending, then close the log."""
        if self._writer is not None:
            await self._writer
        await self._pace.run(self._log.close)

    async def _write(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await self._pace.run(self._log.append, b"".join(data for data, _ in batch))
            except Exception as error:  # noqa: BLE001 - each waiting line raises it
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
            else:
                for _, written in batch:
                    if not written.done():
                        written.set_result(None)
