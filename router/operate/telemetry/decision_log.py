"""The decision log: one JSON line per prompt, from a thread. If the disk is slow, lines are dropped and counted."""

from __future__ import annotations

import logging
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from policies.errors import ConfigError
from policies.nouns import ClusterView, Decision, Request
from router.call.bid import Placed
from router.call.outcome import code_of, outcome_of, why_of
from router.call.tracing import NO_SPAN, AttemptTrace, PromptTrace, Target
from router.operate.audit.files import set_aside
from router.operate.telemetry.decision_record import Ended, Made, packed_shared_keys, record_of
from router.private_files import make_private, private

STANDARD_OUTPUT = "-"

MOST_WAITING = 1024
"""Most prompts that wait to be written; each may hold tens of kilobytes (its views, its keys)."""

ROTATE_EVERY_S = 60.0
"""Time between two tries to set a file aside that has its size."""

_BATCH = 128
_PATIENCE_S = 5.0

_log = logging.getLogger("pointsman.decisions")


class DecisionLog:
    """Appends to the file at `path` (`-`: standard output), from a thread of its own.

    A file larger than `file_bytes` becomes `path.1`, which becomes `path.2`, and so on up to `keep`. Lines that cannot
    be written are dropped, and `on_dropped` gets their number, from either thread. Call `open` before the first `put`,
    and `close` at the end.
    """

    def __init__(
        self,
        path: str,
        *,
        on_dropped: Callable[[int], None] = lambda _: None,
        file_bytes: int = 256 * 2**20,
        keep: int = 4,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.path, self._on_dropped = path, on_dropped
        self._file_bytes, self._keep = file_bytes, keep
        self._waiting: queue.Queue[Ended | None] = queue.Queue(most_waiting)
        self._file: BinaryIO | None = None
        self._is_torn, self._rotate_at = False, 0.0
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)

    def __repr__(self) -> str:
        return f"<DecisionLog {self.path}: {self._waiting.qsize()} wait>"

    def put(self, ended: Ended) -> None:
        """Have `ended` written soon; never waits."""
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            self._on_dropped(1)

    def open(self) -> None:
        """Open the file and start the thread. Raises ConfigError."""
        try:
            self._file = self._opened()
        except OSError as error:
            hint = "choose another file with server.decision_log or --decisions"
            raise ConfigError(f"the decision log {self.path} cannot be written: {error}", hint=hint) from error
        self._thread.start()

    def close(self) -> None:
        """Write the waiting lines, within five seconds. Blocks."""
        try:
            self._waiting.put(None, timeout=_PATIENCE_S)
        except queue.Full:
            return
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        goes_on = True
        while goes_on:
            batch = self._next_batch()
            goes_on = batch[-1] is not None
            records = (self._encoded(encoder, ended) for ended in batch if ended is not None)
            if lines := [line for line in records if line]:
                self._write(lines)
        if self._file is not None and self.path != STANDARD_OUTPUT:
            self._file.close()

    def _encoded(self, encoder: msgspec.json.Encoder, ended: Ended) -> bytes:
        """The line of `ended`; empty if it has something that no line can hold, and then it alone is dropped."""
        try:
            return encoder.encode(record_of(ended))
        except Exception:  # noqa: BLE001 - whatever it was, the others are written
            _log.exception("a decision cannot be written to %s", self.path)
            self._on_dropped(1)
            return b""

    def _next_batch(self) -> list[Ended | None]:
        """The waiting prompts, at least one; None is the end of the log."""
        batch = [self._waiting.get()]
        while batch[-1] is not None and len(batch) < _BATCH:
            try:
                batch.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return batch

    def _write(self, lines: list[bytes]) -> None:
        try:
            file = self._file = self._kept() or self._opened()
            # end a line that broke off, so that the next one is not lost with it
            whole = b"\n" * self._is_torn + b"\n".join(lines) + b"\n"
            self._is_torn = True
            left = memoryview(whole)
            while left:
                left = left[file.write(left) :]
            file.flush()
            self._is_torn = False
        except OSError:
            self._on_dropped(len(lines))
            return
        if self.path != STANDARD_OUTPUT:
            self._rotate_if_large(file)

    def _kept(self) -> BinaryIO | None:
        """The file that is open, unless another program has set it aside."""
        if self._file is None or self.path == STANDARD_OUTPUT:
            return self._file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), Path(self.path).stat()):
                return self._file
        self._file.close()
        self._file = None
        return None

    def _opened(self) -> BinaryIO:
        if self.path == STANDARD_OUTPUT:
            return sys.stdout.buffer
        file: BinaryIO = open(self.path, "ab", buffering=0, opener=private)  # noqa: SIM115 - it stays open
        make_private(Path(self.path))
        return file

    def _rotate_if_large(self, file: BinaryIO) -> None:
        """Set the file aside if it has its size. It grows where that fails, and no line is lost by it."""
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size < self._file_bytes or time.monotonic() < self._rotate_at:
            return
        try:
            set_aside(Path(self.path), self._keep + 1)
        except OSError as error:
            _log.warning("the decision log %s has its size and cannot be set aside, so it grows: %s", self.path, error)
            self._rotate_at = time.monotonic() + ROTATE_EVERY_S


class LoggedPrompt:
    """Passes what it gets on to `trace`, if there is one, and gives the prompt to each of `keep` when it ends.

    Keys that are shared between domains are computed only `with_keys`.
    """

    def __init__(
        self,
        trace: PromptTrace | None,
        keep: Sequence[Callable[[Ended], object]],
        *,
        with_keys: bool,
        clock: Callable[[], float],
        unix_time: Callable[[], float] = time.time,
        arrived_at: float,
        rule: int,
        config: str,
        trace_id: str | None,
    ) -> None:
        self._trace, self._keep, self._clock = trace, keep, clock
        self._with_keys = with_keys
        self._arrived_at, self._rule, self._config, self._trace_id = arrived_at, rule, config, trace_id
        self._arrived_unix_s = unix_time() - (clock() - arrived_at)
        self._made: list[Made] = []
        self._last: tuple[Request, Made] | None = None
        self._shared_keys = ""

    def __repr__(self) -> str:
        return f"<LoggedPrompt {len(self._made)} tries>"

    def queue(self) -> AbstractContextManager[object]:
        """Only the trace needs the queue's span."""
        return NO_SPAN if self._trace is None else self._trace.queue()

    def decided(self, request: Request, view: ClusterView, decision: Decision, *, began_at: float) -> None:
        """Keep the newest decision."""
        if self._trace is not None:
            self._trace.decided(request, view, decision, began_at=began_at)
        self._last = request, Made(began_at, decision, view)

    def sent(self, placed: Placed, target: Target) -> AttemptTrace | None:
        """Keep the backend that it went to, and the keys of the prompt: its tokens are not kept."""
        if self._with_keys and not self._made:
            self._shared_keys = packed_shared_keys(placed.bid.prompt.token_ids, placed.bid.request.model)
        self._made.append(Made.of(placed))
        return None if self._trace is None else self._trace.sent(placed, target)

    def __enter__(self) -> Self:
        if self._trace is not None:
            self._trace.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trace is not None:
            self._trace.__exit__(kind, error, trace)
        if self._last is not None:
            ended = self._ended(*self._last, error)
            for keep in self._keep:
                keep(ended)

    def _ended(self, request: Request, last: Made, error: BaseException | None) -> Ended:
        made: Iterable[Made] = self._made
        if last.decision.chosen is None:
            made = (*self._made, last)
        return Ended(
            request,
            self._rule,
            self._config,
            arrived_at=self._arrived_at,
            arrived_unix_s=self._arrived_unix_s,
            ended_at=self._clock(),
            outcome=outcome_of(error).value,
            code=code_of(error),
            trace_id=self._trace_id,
            error=why_of(error),
            made=tuple(made),
            shared_keys=self._shared_keys,
        )
