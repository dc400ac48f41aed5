"""Several router processes on one machine that listen at the same addresses: the kernel distributes connections."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.redis_address import read_address
from policies.sla.server import OPEN
from router.operate.telemetry.decision_log import STANDARD_OUTPUT

SETTLED_S = 3.0
"""If a process ends by itself this soon after its first start, it will fail each time: all processes end."""

PAUSE_S = 1.0
"""Time from the end of a process that did not run for SETTLED_S to its restart. Others are restarted at once."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Processes:
    """Runs `count` processes of `command`, each with `--process NUMBER/COUNT`, and restarts those that end early.

    Their standard input is a pipe from this process: it closes when this process dies, by whatever cause, and then they
    drain and end. `say` gets messages for people.
    """

    def __init__(self, command: Sequence[str], count: int, say: Callable[[str], None]) -> None:
        self._command, self._count, self._say = tuple(command), count, say
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopped = asyncio.Event()
        self.failed = False
        """Whether a process ended right after its start."""

    def __repr__(self) -> str:
        return f"<Processes {len(self._running)} of {self._count} running>"

    async def run(self) -> None:
        """Run until `pass_on` stops them, or until one fails at once; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep(number))

    def pass_on(self, number: signal.Signals) -> None:
        """Send a signal to all; SIGINT and SIGTERM let them drain and end for good."""
        if number != signal.SIGHUP:
            self._stopped.set()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        loop, is_first = asyncio.get_running_loop(), True
        while not self._stopped.is_set():
            began = loop.time()
            code = await self._once(number)
            if self._stopped.is_set():
                return
            is_settled = loop.time() - began >= SETTLED_S
            # a negative code is a signal: a process that was killed did not fail
            if is_first and not is_settled and code >= 0:
                self._say(f"process {number} ended with {code} right after its start")
                self.failed = True
                self.pass_on(signal.SIGTERM)
                return
            is_first = False
            self._say(f"process {number} ended with {code} and is restarted")
            if not is_settled:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await self._stopped.wait()

    async def _once(self, number: int) -> int:
        command = (*self._command, "--process", f"{number}/{self._count}")
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        self._running[number] = process
        try:
            if self._stopped.is_set():  # while the process was being made
                process.send_signal(signal.SIGTERM)
            return await process.wait()
        finally:
            del self._running[number]


async def run_processes(arguments: Sequence[str], count: int, say: Callable[[str], None]) -> bool:
    """Run `count` processes of `pointsman` with `arguments` until a signal; returns whether all ended well."""
    processes = Processes((sys.executable, "-P", "-m", "router", *arguments), count, say)
    loop = asyncio.get_running_loop()
    for number in PASSED_ON:
        loop.add_signal_handler(number, processes.pass_on, number)
    await processes.run()
    return not processes.failed


def place_of(process: str) -> tuple[int, int]:
    """Number and count in `NUMBER/COUNT`. Raises ConfigError."""
    number, slash, count = process.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return int(number), int(count)
    raise ConfigError(f"'{process}' is not NUMBER/COUNT", hint="only `pointsman serve --processes` sets it")


def require_shareable(config: Config) -> None:
    """Check that every port is fixed, and that processes write no file together. Raises ConfigError."""
    server = config.server
    listeners = {"http": server.http, "grpc": server.grpc, "admin": server.admin, "picker": server.picker}
    for name, address in listeners.items():
        if address is not None and address.endswith(":0"):
            raise ConfigError(f"server.{name} is {address}", hint="several processes need a fixed port to share")
    if server.decision_log == STANDARD_OUTPUT:
        # a pipe keeps writes whole up to 4 KiB only (POSIX, PIPE_BUF), and a decision may be longer
        hint = "name a file: each process then has its own"
        raise ConfigError("several processes would mix their decisions on standard output", hint=hint)


def as_process(config: Config, number: int, count: int, own_store: str | None = None) -> Config:
    """`config` for process `number` of `count`: ports for operators and metrics and a decision log of its own, and its
    share of each limit. `own_store` is the URL of what they share if the file names no store."""
    server, store = config.server, config.store
    if own_store is not None:
        # it ends with these processes, so that what it is owed then is owed to none
        store = replace(store, redis=own_store, journal=str(Path(read_address(own_store).url[7:]).parent / "owed"))
    if server.admin is not None:
        server = replace(server, admin=_next(server.admin, number))
    if server.metrics not in (None, OPEN):
        server = replace(server, metrics=_next(server.metrics, number))
    if server.decision_log is not None:
        log = Path(server.decision_log)
        # not as a suffix: the log numbers full files there
        server = replace(server, decision_log=str(log.with_stem(f"{log.stem}-{number}")))
    return replace(config, server=server, store=replace(store, replicas=store.replicas * count))


def _next(address: str, number: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"
