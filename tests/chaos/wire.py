"""A TCP line between two programs that can be spoilt while it carries connections."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto

_AT_ONCE = 65536


class State(Enum):
    """What a line does with connections and their bytes."""

    WELL = auto()
    SLOW = auto()
    """Every piece comes `delay_s` late, both ways."""
    MUTE = auto()
    """Connections stay open and nothing passes, as behind a cable that was pulled."""
    ANSWERS_LOST = auto()
    """Questions pass, answers do not."""
    RESET = auto()
    """All connections are reset, new ones at once."""
    REFUSED = auto()
    """Connections are closed as soon as they are accepted."""
    GARBAGE = auto()
    """Each piece of an answer is replaced by random bytes."""
    TRUNCATED = auto()
    """After `most_bytes` of the answer of a connection it is closed in order."""
    HEAD_ONLY = auto()
    """Of all answers of a connection only the head of the first one passes."""
    DRIBBLE = auto()
    """Answers come in pieces of `piece_bytes`, `delay_s` apart."""


@dataclass(eq=False)
class Pair:
    """The two sockets of one connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    answered: int = 0
    """Bytes of answers that passed."""
    has_lost: bool = False
    """Whether bytes are missing, so that nothing sensible can follow."""

    def reset(self) -> None:
        for writer in (self.client, self.server):
            raw = writer.transport.get_extra_info("socket")
            with suppress(OSError):
                # closing sends RST
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@dataclass(eq=False)
class Wire:
    """Listens at `host` and `port` and passes connections on to `target`, a port of this machine."""

    target: int
    state: State = State.WELL
    delay_s: float = 0.2
    most_bytes: int = 300
    piece_bytes: int = 7
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    _pairs: set[Pair] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spoil(self, state: State) -> None:
        """From now on the line is in `state`, for connections that are open too."""
        self.state, self._rng = state, random.Random(self.seed)
        if state in (State.RESET, State.REFUSED):
            self.cut()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    @contextmanager
    def spoilt(self, state: State, seed: int) -> Iterator[None]:
        """The line is in `state` until the context is left."""
        self.seed = seed
        self.spoil(state)
        try:
            yield
        finally:
            self.mend()

    def mend(self) -> None:
        """From now on everything passes; connections that lost bytes are reset."""
        self.state = State.WELL
        self.cut(lost=True)

    def cut(self, *, lost: bool = False) -> None:
        """Reset all connections, or those that `lost` bytes."""
        for pair in [pair for pair in self._pairs if pair.has_lost or not lost]:
            pair.reset()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.state is State.REFUSED:
                writer.close()
                return
            try:
                back, there = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                writer.transport.abort()
                return
            pair = Pair(writer, there)
            if self.state is State.RESET:
                pair.reset()
                return
            self._pairs.add(pair)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._questions(reader, pair))
                    group.create_task(self._answers(back, pair))
            finally:
                self._pairs.discard(pair)
                writer.close()
                there.close()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _questions(self, reader: asyncio.StreamReader, pair: Pair) -> None:
        with suppress(OSError):
            while data := await reader.read(_AT_ONCE):
                if self.state is State.SLOW:
                    await asyncio.sleep(self.delay_s)
                if self.state is State.MUTE:
                    pair.has_lost = True
                    continue
                pair.server.write(data)
                await pair.server.drain()
        with suppress(OSError):
            # the end of a connection is lost like everything else
            if self.state is not State.MUTE and pair.server.can_write_eof():
                pair.server.write_eof()

    async def _answers(self, reader: asyncio.StreamReader, pair: Pair) -> None:
        with suppress(OSError):
            while data := await reader.read(_AT_ONCE):
                for piece in self._pieces(data):
                    if self.state in (State.SLOW, State.DRIBBLE):
                        await asyncio.sleep(self.delay_s)
                    passed = self._passed(piece, pair)
                    if passed:
                        pair.client.write(passed)
                        await pair.client.drain()
                    pair.answered += len(passed)
                    if self.state is State.TRUNCATED and pair.answered >= self.most_bytes:
                        pair.client.close()
                        pair.server.transport.abort()
                        return
        with suppress(OSError):
            if self.state is not State.MUTE:
                pair.client.close()

    def _pieces(self, data: bytes) -> list[bytes]:
        size = self.piece_bytes if self.state is State.DRIBBLE else len(data)
        return [data[at : at + size] for at in range(0, len(data), size)]

    def _passed(self, data: bytes, pair: Pair) -> bytes:
        match self.state:
            case State.MUTE | State.ANSWERS_LOST:
                pair.has_lost = True
                return b""
            case State.GARBAGE:
                pair.has_lost = True
                return self._rng.randbytes(len(data))
            case State.TRUNCATED:
                pair.has_lost = True
                return data[: max(0, self.most_bytes - pair.answered)]
            case State.HEAD_ONLY:
                head, end, _ = data.partition(b"\r\n\r\n")
                first, pair.has_lost = not pair.has_lost, True
                return head + end if first and end else b""
            case _:
                return data

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def a_wire(target: int, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Wire]:
    """A line from `host` and `port` (0: a free one) to `target`, a port of this machine, that is well."""
    wire = Wire(target, host=host)
    listener = await asyncio.start_server(wire.serve, host, port)
    wire.port = listener.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        listener.close()
        await wire.close()
