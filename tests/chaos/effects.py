"""What the faults do: each is a context, entered when the fault begins and left when it ends.

The number is that of the broken server, and the seed of anything random: the faults of a pair get different ones.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.chaos.system import System
from tests.chaos.wire import State
from tests.standins.name_server import NameServer

During = Callable[[System, int], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def killed(system: System, number: int) -> AsyncIterator[None]:
    """A server is killed, and started again."""
    system.servers[number].kill()
    try:
        yield
    finally:
        await system.restart(system.servers[number])


@asynccontextmanager
async def all_killed(system: System, _: int) -> AsyncIterator[None]:
    """All servers are killed, and started again."""
    for server in system.servers:
        server.kill()
    try:
        yield
    finally:
        await asyncio.gather(*map(system.restart, system.servers))


@asynccontextmanager
async def ended(system: System, number: int) -> AsyncIterator[None]:
    """A server gets SIGTERM, ends, and is started again."""
    await asyncio.to_thread(system.servers[number].stop)
    try:
        yield
    finally:
        await system.restart(system.servers[number])


@asynccontextmanager
async def stopped(system: System, number: int) -> AsyncIterator[None]:
    """A server is stopped, and goes on."""
    os.killpg(system.servers[number].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(system.servers[number].pid, signal.SIGCONT)


@asynccontextmanager
async def all_stopped(system: System, _: int) -> AsyncIterator[None]:
    """All servers are stopped, and go on."""
    for server in system.servers:
        os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in system.servers:
            os.kill(server.pid, signal.SIGCONT)


def certified(*, days: int = 2, by_stranger: bool = False) -> During:
    """A server starts again with another certificate, and later with a good one."""

    @asynccontextmanager
    async def during(system: System, number: int) -> AsyncIterator[None]:
        async def start_again(**how: Any) -> None:
            system.servers[number].kill()
            await asyncio.to_thread(lambda: system.certify(number, **how))
            await system.restart(system.servers[number])

        await start_again(days=days, by_stranger=by_stranger)
        try:
            yield
        finally:
            await start_again()

    return during


@asynccontextmanager
async def flapping(system: System, number: int) -> AsyncIterator[None]:
    """A server's line is reset and mended five times a second."""
    line = system.lines[number]

    async def flap() -> None:
        while True:
            line.spoil(State.RESET)
            await asyncio.sleep(0.1)
            line.mend()
            await asyncio.sleep(0.1)

    task = asyncio.create_task(flap())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        line.mend()


@asynccontextmanager
async def without_descriptors(system: System, number: int) -> AsyncIterator[None]:
    """A server cannot accept connections any more."""
    pid = system.servers[number].pid
    with system.limited(pid, resource.RLIMIT_NOFILE, system.descriptors(pid)):
        yield


@asynccontextmanager
async def drained(system: System, number: int) -> AsyncIterator[None]:
    """An operator drains a server, and takes that back."""
    await system.drain(number, is_draining=True)
    try:
        yield
    finally:
        await system.drain(number, is_draining=False)


def mode(name: str) -> During:
    """A server does what the mode says."""

    @asynccontextmanager
    async def during(system: System, number: int) -> AsyncIterator[None]:
        await system.change_mode(number, name)
        try:
            yield
        finally:
            await system.change_mode(number, "well")

    return during


def line(state: State) -> During:
    """The line to a server is spoilt."""

    @asynccontextmanager
    async def during(system: System, number: int) -> AsyncIterator[None]:
        with system.lines[number].spoilt(state, number):
            yield

    return during


def all_lines(state: State) -> During:
    """The lines to all servers are spoilt."""

    @asynccontextmanager
    async def during(system: System, number: int) -> AsyncIterator[None]:
        for each in system.lines:
            each.spoil(state)
        try:
            yield
        finally:
            for each in system.lines:
                each.mend()

    return during


def redis_line(state: State) -> During:
    """The line to Redis is spoilt."""

    @asynccontextmanager
    async def during(system: System, number: int) -> AsyncIterator[None]:
        with system.redis_line.spoilt(state, number):
            yield

    return during


@asynccontextmanager
async def redis_killed(system: System, _: int) -> AsyncIterator[None]:
    """Redis is killed and started again, empty."""
    system.redis.kill()
    try:
        yield
    finally:
        await system.restart(system.redis)


@asynccontextmanager
async def redis_stopped(system: System, _: int) -> AsyncIterator[None]:
    """Redis is stopped, and goes on."""
    os.kill(system.redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(system.redis.pid, signal.SIGCONT)


@asynccontextmanager
async def redis_flushed(system: System, _: int) -> AsyncIterator[None]:
    """Redis loses all keys, again and again."""

    async def flush() -> None:
        while True:
            system.operate_redis("FLUSHALL")
            await asyncio.sleep(0.2)

    task = asyncio.create_task(flush())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def redis_set(name: str, broken: str, well: str) -> During:
    """A setting of Redis is changed, and changed back."""

    @asynccontextmanager
    async def during(system: System, _: int) -> AsyncIterator[None]:
        system.operate_redis("CONFIG", "SET", name, broken)
        try:
            yield
        finally:
            system.operate_redis("CONFIG", "SET", name, well)

    return during


@asynccontextmanager
async def redis_read_only(system: System, _: int) -> AsyncIterator[None]:
    """Redis follows a leader that does not exist, and refuses to write."""
    system.operate_redis("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        system.operate_redis("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def router_killed(system: System, number: int) -> AsyncIterator[None]:
    """A router is killed, and started again."""
    system.routers[number].program.kill()
    try:
        yield
    finally:
        await system.restart(system.routers[number].program)


@asynccontextmanager
async def router_ended(system: System, number: int) -> AsyncIterator[None]:
    """A router gets SIGTERM, drains, ends, and is started again."""
    await asyncio.to_thread(system.routers[number].program.stop)
    try:
        yield
    finally:
        await system.restart(system.routers[number].program)


@asynccontextmanager
async def router_stopped(system: System, number: int) -> AsyncIterator[None]:
    """A router is stopped, and goes on."""
    pids = system.pids(system.routers[number].program)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def worker_killed(system: System, number: int) -> AsyncIterator[None]:
    """One of the processes of a router is killed; the router starts another one."""
    router = system.routers[0]
    workers = system.workers(router)
    os.kill(workers[number % len(workers)], signal.SIGKILL)
    yield
    async with asyncio.timeout(20):
        await system.until_workers(router)


@asynccontextmanager
async def router_without_descriptors(system: System, _: int) -> AsyncIterator[None]:
    """A router cannot open connections or files any more."""
    (pid,) = system.workers(system.routers[0])
    with system.limited(pid, resource.RLIMIT_NOFILE, system.descriptors(pid)):
        yield


@asynccontextmanager
async def files_cannot_grow(system: System, _: int) -> AsyncIterator[None]:
    """Every write of a router to a file fails: to its log, and to the log of decisions."""
    (pid,) = system.workers(system.routers[0])
    with system.limited(pid, resource.RLIMIT_FSIZE, 1):
        yield


@asynccontextmanager
async def disk_full(system: System, _: int) -> AsyncIterator[None]:
    """The disk of the log of decisions is full, and is emptied."""
    filler = Path(f"/proc/{system.routers[0].program.pid}/root{system.disk}/filler")

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass

    await asyncio.to_thread(fill)
    try:
        yield
    finally:
        await asyncio.to_thread(filler.unlink)


def clock(ahead_s: int) -> During:
    """The router's time of day jumps, and jumps back."""

    @asynccontextmanager
    async def during(system: System, _: int) -> AsyncIterator[None]:
        system.set_clock(ahead_s)
        try:
            yield
        finally:
            system.set_clock(0)

    return during


def disk(name: str) -> During:
    """A disk of its own is full, and is emptied."""

    @asynccontextmanager
    async def during(system: System, _: int) -> AsyncIterator[None]:
        assert system.disks is not None
        with system.disks.full(name):
            yield

    return during


@asynccontextmanager
async def redis_failed_over(system: System, number: int) -> AsyncIterator[None]:
    """The replica of Redis becomes the primary, and the old one its replica; of three times once, its connections are
    cut."""
    await asyncio.to_thread(system.fail_over)
    if number % 3 == 0:
        system.redis_line.cut()
    yield


def of_last_router(effect: During) -> During:
    """`effect` on the last router."""
    return lambda system, _: effect(system, -1)


def names(change: Callable[[NameServer], None]) -> During:
    """The name server changes, and later is as before."""

    @asynccontextmanager
    async def during(system: System, _: int) -> AsyncIterator[None]:
        server = system.names
        assert server is not None
        before = dict(server.hosts)
        change(server)
        try:
            yield
        finally:
            server.hosts, server.fails, server.is_silent = before, False, False

    return during


def fail(server: NameServer) -> None:
    server.fails = True


def say_nothing(server: NameServer) -> None:
    server.is_silent = True


def forget(server: NameServer) -> None:
    server.hosts = {}


def empty(server: NameServer) -> None:
    server.hosts = {name: [] for name in server.hosts}


def drop_one(server: NameServer) -> None:
    server.hosts = {name: hosts[1:] for name, hosts in server.hosts.items()}


def name_a_dead_one(server: NameServer) -> None:
    # an address of this machine where no program listens
    server.hosts = {name: [*hosts[1:], "127.251.251.251"] for name, hosts in server.hosts.items()}


def file(change: Callable[[Path, str], None]) -> During:
    """The SLA file is changed, and later is as before."""

    @asynccontextmanager
    async def during(system: System, _: int) -> AsyncIterator[None]:
        path = system.sla
        text = await asyncio.to_thread(path.read_text)
        await asyncio.to_thread(change, path, text)
        try:
            yield
        finally:
            await asyncio.to_thread(rewrite, path, text)

    return during


def rewrite(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def make_fifo(path: Path, _: str) -> None:
    path.unlink()
    os.mkfifo(path)
