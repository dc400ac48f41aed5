"""The engine on a thread of its own: takes commands, and delivers one report per step to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol, TypeVar

from shards.nouns import CacheEvent, Pinned, Report, Submission

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STALLED_S = 0.001
"""Wait for a command after a step that had work but did nothing: part of a prompt has not arrived yet."""

_REPORTS_AHEAD = 256
"""Steps that the event loop may lag behind before the engine waits for it."""


class AnyEngine(Protocol):
    """The engine as the loop uses it. All calls come from one thread; unknown keys are ignored.

    It calls `wake`, from any thread, when there is work for it without a call.
    """

    wake: Callable[[], None]

    def submit(self, submission: Submission) -> None:
        """Open a request."""
        ...

    def extend(self, key: Hashable, token_ids: bytes) -> None:
        """Append to a request's prompt (little-endian uint32)."""
        ...

    def pace(
        self,
        key: Hashable,
        *,
        rank: int | None = None,
        prefill_slice: int | None = None,
        paused: bool | None = None,
    ) -> None:
        """Change a request's rank, prefill slice or pause; None keeps a setting."""
        ...

    def cancel(self, key: Hashable) -> None:
        """End a request; its choices finish as cancelled in the next report."""
        ...

    def pin(self, name: str, keys: Collection[int], *, domain: str, for_s: float) -> Pinned:
        """Pin the cached blocks of `keys` for `for_s` seconds, as far as there is room for pins."""
        ...

    def unpin(self, name: str) -> int:
        """End a pin; returns the number of blocks that no pin holds any more."""
        ...

    def clear_cache(self, domain: str | None = None) -> int:
        """Forget all cached blocks, or those of `domain`; returns their number."""
        ...

    def hand_over(self, heirs: Sequence[str], *, within_s: float) -> None:
        """Begin to offer all cached blocks to the shards at `heirs` (host:port)."""
        ...

    @property
    def is_handing_over(self) -> bool:
        """Whether blocks are offered to other shards; from any thread."""
        ...

    def step(self) -> Report:
        """Do one step's work and return its changes; harmless when there is none."""
        ...

    @property
    def has_work(self) -> bool:
        """Would a step do or report anything? False stays False until a call or a deadline."""
        ...

    @property
    def next_deadline_s(self) -> float | None:
        """When it needs a step even without a call, on its clock; None if never."""
        ...

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """The present cache, as events that rebuild it."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        ...


Command = Callable[[AnyEngine], None]


class EngineError(Exception):
    """The engine raised an exception; its state cannot be trusted any more."""


class EngineLoop:
    """Runs `engine` on its own thread, asleep while it has no work.

    `died` completes with the cause once the engine has raised; no report follows. At most `capacity` commands wait:
    `put` waits for room. `post` does not, and is for commands that are bounded by the number of requests. `clock` is
    the engine's clock.
    """

    def __init__(self, engine: AnyEngine, *, capacity: int = 256, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._capacity = capacity
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._subscribers: list[Callable[[Report], None]] = []
        self._ahead = threading.BoundedSemaphore(_REPORTS_AHEAD)
        self._thread: threading.Thread | None = None
        self._steps = 0
        engine.wake = self._wake

    def __repr__(self) -> str:
        state = "stopping" if self._stopping else "running" if self._thread else "new"
        return f"<EngineLoop {state}: {self._steps} steps, {len(self._commands)} commands wait>"

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def subscribe(self, hear: Callable[[Report], None]) -> None:
        """Call `hear` on the event loop with every later report."""
        self._subscribers.append(hear)

    def start(self) -> None:
        """Start the thread; reports go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self.died: asyncio.Future[EngineError] = self._loop.create_future()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Finish the running step, drop the waiting commands, and end the thread."""
        with self._changed:
            self._stopping = True
            self._commands.clear()
            self._changed.notify()
        self._room.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def put(self, command: Command) -> None:
        """Queue `command`, waiting for room. A stopped loop drops it."""
        while len(self._commands) >= self._capacity and not self._is_over:
            self._room.clear()
            await self._room.wait()
        self.post(command)

    def post(self, command: Command) -> None:
        """Queue `command` at once. A stopped loop drops it."""
        with self._changed:
            if not self._is_over:
                self._commands.append(command)
                self._changed.notify()

    def ask(self, question: Callable[[AnyEngine], T], answer: Callable[[T], None]) -> None:
        """Run `question` on the engine between two steps; `answer` gets the result between their reports."""
        self.post(self._asking(question, answer))

    async def ask_in_turn(self, question: Callable[[AnyEngine], T], answer: Callable[[T], None]) -> None:
        """Like `ask`, for questions that nothing else bounds: waits for room among the commands, not for the answer."""
        await self.put(self._asking(question, answer))

    async def check(self) -> None:
        """Raise AssertionError if an invariant of the engine is broken, or EngineError if the engine has failed."""
        answered: asyncio.Future[AssertionError | None] = self._loop.create_future()
        self.ask(_find_broken, answered.set_result)
        await asyncio.wait((answered, self.died, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            raise self.died.result()
        # without its thread the engine may be inspected from here
        broken = answered.result() if answered.done() else _find_broken(self._engine)
        if broken is not None:
            raise broken

    def _asking(self, question: Callable[[AnyEngine], T], answer: Callable[[T], None]) -> Command:
        return lambda engine: self._call_soon(answer, question(engine))

    @property
    def is_handing_over(self) -> bool:
        """Whether the engine offers blocks to other shards."""
        return self._engine.is_handing_over

    @property
    def _is_over(self) -> bool:
        return self._stopping or self.died.done()

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command(self._engine)
                self._publish(self._engine.step())
        except Exception as error:  # noqa: BLE001 - the supervisor: any exception of the engine ends the shard
            self._report_death(error)

    def _next_commands(self) -> list[Command] | None:
        """Commands to run before the next step, as soon as a step is needed; None to stop."""
        with self._changed:
            while not (self._commands or self._stopping or self._engine.has_work):
                self._changed.wait(self._until_deadline_s())
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
        if len(commands) >= self._capacity:
            self._call_soon(self._room.set)
        return commands

    def _until_deadline_s(self) -> float | None:
        deadline_s = self._engine.next_deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def _publish(self, report: Report) -> None:
        self._steps += 1
        while not self._ahead.acquire(timeout=0.1):
            if self._stopping:
                return
        self._call_soon(self._deliver, report)
        if not (report.drawn or report.progress or report.finished):
            with self._changed:
                if self._engine.has_work and not self._commands:
                    self._changed.wait(_STALLED_S)

    def _deliver(self, report: Report) -> None:
        self._ahead.release()
        for hear in self._subscribers:
            try:
                hear(report)
            except Exception:  # noqa: BLE001 - the supervisor: one subscriber's bug must not cost the others their tokens
                _log.exception("a subscriber failed on step %d", report.step)

    def _report_death(self, error: Exception) -> None:
        _log.critical("the engine failed and this shard is dead", exc_info=error)
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._call_soon(self._die, failure)

    def _die(self, failure: EngineError) -> None:
        if not self.died.done():
            self.died.set_result(failure)
        self._room.set()

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        # A closed event loop cannot receive the report; the thread is a daemon and ends with the process.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _find_broken(engine: AnyEngine) -> AssertionError | None:
    try:
        engine.check()
    except AssertionError as broken:
        return broken
    return None
