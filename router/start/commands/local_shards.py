"""Shard processes on this machine, started and kept alive by `pointsman up`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from policies.errors import ConfigError

GRACE_S = 10.0
"""How long a shard may take to drain before it is killed."""

_LONGEST_BACKOFF_S = 30.0

_log = logging.getLogger("pointsman.shards")


@dataclass(frozen=True, slots=True)
class ShardCommand:
    """How to start one shard: its name in the cluster, the model (a directory or `bundled`), and more flags."""

    name: str
    model: str
    flags: tuple[str, ...] = ()

    def line(self, listen: str) -> list[str]:
        """The command line of a shard that listens on `listen`."""
        chosen = ["--name", self.name, "--model", self.model, "--listen", listen]
        return [sys.executable, "-P", "-m", "shards", *chosen, "--supervised", *self.flags]


def shard_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the variables that must be set before torch is imported.

    By default OpenMP's threads spin while they wait, and take the cores from router and other shards: a
    matrix product beside another busy process took 8 ms with spinning and 2 ms without (2 cores).
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **environment}


class LocalShard:
    """One child process, restarted on the same port when it dies.

    `on_progress(name, share, what)` is called with the progress of loading, from 0 to 1. The child ends itself when
    this process dies, because its standard input closes then.
    """

    def __init__(self, command: ShardCommand, on_progress: Callable[[str, float, str], None]) -> None:
        self.command, self.address = command, ""
        self._on_progress = on_progress
        self._process: Process | None = None
        self._restarts = 0

    def __repr__(self) -> str:
        state = "running" if self._process and self._process.returncode is None else "stopped"
        return f"<LocalShard {self.command.name} {self.address or '-'} {state}, {self._restarts} restarts>"

    @property
    def pid(self) -> int | None:
        """Process id; None before the first start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Return when the shard listens and `address` is set. Raises ConfigError if it ends before that."""
        listen = self.address or "127.0.0.1:0"
        # stdout carries events for this process, stderr is for people
        self._process = await asyncio.create_subprocess_exec(
            *self.command.line(listen), stdin=PIPE, stdout=PIPE, env=shard_environment(os.environ)
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if "listening" in event:
                self.address = event["listening"]
                self._on_progress(self.command.name, 1.0, "ready")
                return
            self._on_progress(self.command.name, event["share"], event["loading"])
        code = await self._process.wait()
        raise ConfigError(
            f"shard {self.command.name} ended with code {code} while it loaded", hint="see its message above"
        )

    async def keep_alive(self) -> None:
        """Restart the shard whenever it ends; returns only when cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self._restarts += 1
            _log.warning("shard %s ended with code %d and is restarted", self.command.name, code)
            await asyncio.sleep(min(0.5 * 2**self._restarts, _LONGEST_BACKOFF_S))
            try:
                await self.start()
            except ConfigError as error:
                _log.warning("%s; retrying", error.message)

    async def stop(self) -> None:
        """Let the shard drain, then end the process."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class LocalShards:
    """All shards of one `pointsman up`. An async context manager; `addresses` are in the order of `commands`."""

    def __init__(
        self, commands: Sequence[ShardCommand], on_progress: Callable[[str, float, str], None] = lambda *_: None
    ) -> None:
        self.shards = [LocalShard(command, on_progress) for command in commands]
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> dict[str, str]:
        """Shard name -> host:port."""
        return {shard.command.name: shard.address for shard in self.shards}

    async def __aenter__(self) -> LocalShards:
        try:
            async with asyncio.TaskGroup() as group:
                for shard in self.shards:
                    group.create_task(shard.start())
        except BaseExceptionGroup as failures:
            await self.__aexit__()
            raise failures.exceptions[0] from failures
        except asyncio.CancelledError:
            await self.__aexit__()
            raise
        self._keepers = [asyncio.create_task(shard.keep_alive()) for shard in self.shards]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(shard.stop() for shard in self.shards))
