"""The store of several router processes on one machine that have none in their file: a Redis or Valkey of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from policies.errors import ConfigError
from router.shared.redis.line import RedisLine
from router.shared.store.base import StoreFailed
from router.shared.store.levels_file import LevelsFile, LevelsUnkept
from router.shared.store.levels_keeper import LevelsKeeper
from router.shared.store.redis_levels import RedisLevels

SERVERS = ("valkey-server", "redis-server")
"""Programs that will do, the first that is found. Of 6.2 or newer: older ones lack commands of our scripts."""

_LEAST = (6, 2)

_START_S = 15.0
_GRACE_S = 5.0
_PAUSE_S = (0.1, 5.0)

_UNTIL_ORPHANED = 'exec 3<&0; (read -r _ <&3; kill "$$") & exec "$0" "$@" </dev/null 3<&-'
"""Runs a command that gets SIGTERM when the standard input of this shell closes: when its parent is gone."""

_MISSING = """\
several processes without `store:` share limits, keys and the prefix index through a Redis or Valkey of their own, and \
there is none on this machine"""
_INSTALL = "install one: `apt-get install valkey-server` or `apt-get install redis-server` (6.2 or newer)"

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger("pointsman.store")


def find_server(environment: Mapping[str, str]) -> Path:
    """The first usable server on the PATH, or beside this Python. Raises ConfigError."""
    old = []
    for found in _servers(environment):
        version = _version(found)
        if version is None or version >= _LEAST:
            return found
        old.append(f"{found} is {'.'.join(map(str, version))}")
    raise ConfigError(f"{_MISSING}{''.join(f'; {each}' for each in old)}", hint=_INSTALL)


def _servers(environment: Mapping[str, str]) -> Iterator[Path]:
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))
    for name in SERVERS:
        if (found := shutil.which(name, path=path)) is not None:
            yield Path(found)


def _version(server: Path) -> tuple[int, int] | None:
    """Of a Redis; None for a Valkey, of which every version will do."""
    try:
        # a program that an operator has installed, without input of others
        answer = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    found = re.search(r"Redis server v=(\d+)\.(\d+)", answer)
    return None if found is None else (int(found[1]), int(found[2]))


class OwnStore:
    """A running `server` on a unix socket in a folder of its own, as an async context manager.

    It ends with this process, however that ends. A server that ends by itself is started again with everything that it
    had. With `budgets` it begins with the levels of that file, which has those of the last second.
    """

    def __init__(self, server: Path, namespace: str, budgets: Path | None) -> None:
        self._server, self._namespace, self._budgets = server, namespace, budgets
        self._folder = Path()
        self._process: Process | None = None
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<OwnStore {self._server.name} {self._folder}>"

    @property
    def url(self) -> str:
        """Address for the routers."""
        return f"unix://{self._folder}/redis.sock"

    @property
    def pid(self) -> int | None:
        """Process id of the server."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> OwnStore:
        async with AsyncExitStack() as stack:
            # the path of a socket has 107 bytes at most (unix(7)), so that it is not in the state folder
            try:
                self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-", dir=_short())))
            except OSError as error:
                hint = "set TMPDIR to a folder that can be written, or write store: {redis: ...}"
                raise ConfigError(f"there is no room for a store of these processes: {error}", hint=hint) from error
            stack.push_async_callback(self._stop)
            await self._start()
            keeper = asyncio.create_task(self._keep_alive())
            stack.push_async_callback(_end, keeper)
            if self._budgets is not None:
                levels = RedisLevels(self.url, namespace=self._namespace, clock=time.time)
                stack.push_async_callback(levels.close)
                kept = LevelsKeeper(
                    LevelsFile(self._budgets), resume=_kept_by(levels.resume), reads=_kept_by(levels.read)
                )
                stack.push_async_callback(kept.close)
                await kept.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        """Return when it answers. Raises ConfigError."""
        log = self._folder / "log"
        options = {
            "port": "0",
            "unixsocket": f"{self._folder}/redis.sock",
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(log),
            "save": "",
            # what was written survives the server, if not the machine
            "appendonly": "yes",
            "appendfsync": "no",
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        # a session of its own: Ctrl-C is for the routers, which need it until they have ended
        self._process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _UNTIL_ORPHANED, str(self._server), *words),
            stdin=PIPE,
            stdout=DEVNULL,
            start_new_session=True,
        )
        line = RedisLine(self.url, timeout_s=1.0)
        try:
            async with asyncio.timeout(_START_S):
                while self._process.returncode is None:
                    with suppress(StoreFailed):
                        async with line.calls() as redis:
                            await redis.ping()
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        finally:
            await line.close()
        last = log.read_text(errors="replace").strip().rpartition("\n")[2] if log.exists() else "it said nothing"
        raise ConfigError(f"{self._server} does not start: {last[:300]}", hint="or name a Redis with store.redis")

    async def _keep_alive(self) -> None:
        pause_s = _PAUSE_S[0]
        while True:
            assert self._process is not None
            began = time.monotonic()
            code = await self._process.wait()
            self._end_group()
            pause_s = _PAUSE_S[0] if time.monotonic() - began > _START_S else min(2 * pause_s, _PAUSE_S[1])
            _log.warning("the store of these processes ended with code %d and is restarted", code)
            try:
                await self._start()
            except ConfigError as error:
                _log.warning("%s; retrying", error.message)
                await asyncio.sleep(pause_s)

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
        self._end_group()
        await process.wait()

    def _end_group(self) -> None:
        """End what is left of the server's session: the shell that waits for the end of this process."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _short() -> str | None:
    """The folder for temporary files; /tmp if its path is too long for a socket in it."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None  # noqa: S108  # nosec B108 - a private folder is made there


def _kept_by(call: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T]]:
    """`call` with the errors of a LevelsKeeper."""

    async def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return await call(*arguments, **named)
        except StoreFailed as failure:
            raise LevelsUnkept(f"the store is away: {failure}") from failure

    return called


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
