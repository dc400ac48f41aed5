"""Runs the router, and with `pointsman up` its local shards too, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from policies.quantities import digits
from policies.sla.config import Config
from policies.sla.server import OPEN, STATE_OFF
from router.fleet.cluster.names import backend_name
from router.operate.telemetry.export import begin_metrics, begin_tracing
from router.operate.telemetry.logs import Notices
from router.start.allocator import keep_freed_memory
from router.start.app import Router
from router.start.build import Parts
from router.start.commands.greeting import greet
from router.start.commands.lending import lending_flags, secret_of_a_run
from router.start.commands.local_shards import LocalShards, ShardCommand
from router.start.commands.processes import as_process, place_of, require_shareable, run_processes
from router.start.commands.shard_options import link_options, shard_flags
from router.start.config_file import Contents
from router.start.descriptors import raise_descriptor_limit
from router.start.preflight import require_startable
from router.start.state import BUDGETS
from router.start.threads import switch_often
from router.start.tls import ports_in_clear

if TYPE_CHECKING:
    from router.start.commands.own_store import OwnStore
from shards.collector import spare_what_stays

_log = logging.getLogger("pointsman.start")


class Files(NamedTuple):
    """The files of a router: the SLA file, and the shadow file."""

    sla: Contents | None = None
    shadow: Contents | None = None


def run(
    config: Config,
    files: Files,
    notices: Notices,
    *,
    local: bool,
    process: str | None = None,
    store: str | None = None,
) -> None:
    """Serve `config` until SIGINT or SIGTERM; start its local shards first if `local`.

    `files` are watched: their changes take effect while running, at once after SIGHUP.
    `process` is `NUMBER/COUNT` if other processes listen at the same addresses; it then also ends when its standard
    input closes, and `store` is the URL of what they share if the file names nothing. Raises ConfigError, if possible
    before anything is started.
    """
    raise_descriptor_limit()
    switch_often()
    if process is not None:
        config = as_process(config, *place_of(process), store)
    require_startable(config, shares_ports=process is not None)
    if (in_clear := ports_in_clear(config)) and (process is None or place_of(process)[0] == 0):
        places = " and ".join(in_clear)
        _log.warning("Keys reach %s in clear text: write server.tls, or let a proxy or mesh do TLS.", places)
    uvloop.run(serve_until_signal(config, files, notices, local=local, is_one_of_many=process is not None))


def run_many(config: Config, count: int, arguments: Sequence[str]) -> bool:
    """Serve `config` by `count` processes of `pointsman` with `arguments`; returns whether all ended well.

    Without a store in the file they share one of their own. Raises ConfigError if there is no program for that.
    """
    require_shareable(config)
    if config.server.admin is None and config.server.metrics in (None, OPEN):
        _log.warning("Without `server.admin` or an address in `server.metrics`, /metrics shows one of the processes.")
    if config.store.redis is not None:
        return uvloop.run(run_processes(arguments, count, _log.warning))
    state = config.server.state
    budgets = None if state in {None, STATE_OFF} else Path(state) / BUDGETS
    # redis takes 0.2 s to import, and imports OpenTelemetry with it
    from router.start.commands.own_store import OwnStore, find_server

    store = OwnStore(find_server(os.environ), config.store.namespace, budgets)
    return uvloop.run(_run_sharing(store, arguments, count))


async def _run_sharing(store: OwnStore, arguments: Sequence[str], count: int) -> bool:
    async with store:
        return await run_processes((*arguments, "--process-store", store.url), count, _log.warning)


async def serve_until_signal(
    config: Config, files: Files, notices: Notices, *, local: bool, is_one_of_many: bool = False
) -> None:
    """Start everything, print the addresses, wait for a signal, drain."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if any(files):
        # there is nothing to reload yet, and SIGHUP must not end the process
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
    if is_one_of_many:
        # nothing is ever written to stdin: it becomes readable when the parent process is gone
        loop.add_reader(sys.stdin.fileno(), _orphaned, stopped)
    async with AsyncExitStack() as stack:
        tracing = begin_tracing(stack)
        if local:
            with LoadingBars(notices.console, is_shown=not notices.as_json) as bars:
                secret = stack.enter_context(secret_of_a_run())
                shards = LocalShards(list(commands(config, secret, json_logs=notices.as_json)), bars.update)
                if not await started_unless(stopped, shards, stack):
                    return
            config = with_addresses(config, shards.addresses)
        parts: Parts = {"shares_ports": is_one_of_many}
        if files.sla is not None:
            parts["file"] = files.sla
        if files.shadow is not None:
            parts["shadow"] = files.shadow
        if tracing is not None:
            parts["tracing"] = tracing
        router = Router(config, **parts)
        begin_metrics(stack, router.telemetry.registry)
        await stack.enter_async_context(router)
        spare_what_stays()
        keep_freed_memory()
        if any(files):
            loop.add_signal_handler(signal.SIGHUP, router.reload_soon)
        # handle signals while no backend is reached yet, too
        greeting = asyncio.create_task(greet(notices, config, router))
        await stopped.wait()
        greeting.cancel()
        await asyncio.gather(greeting, return_exceptions=True)
        notices.show("draining ...")


async def started_unless(stopped: asyncio.Event, shards: LocalShards, stack: AsyncExitStack) -> bool:
    """Whether all `shards` listen, and end with `stack`; False: `stopped` was set first, and they have ended.

    Loading a model takes minutes. Raises ConfigError if a shard ends by itself.
    """
    starting = asyncio.create_task(stack.enter_async_context(shards))
    signalled = asyncio.create_task(stopped.wait())
    await asyncio.wait((starting, signalled), return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():
        # Ctrl-C ends shards too, which would be an error otherwise
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    signalled.cancel()
    await starting
    return True


def _orphaned(stopped: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    stopped.set()


def commands(config: Config, secret: Path, *, json_logs: bool = False) -> Iterator[ShardCommand]:
    """One command per local shard. They lend KV to each other by the secret in the file `secret`. The machine's cores
    are divided among their processes, one left to the router if there are enough, except where a pool has the option
    `threads`. If there is a GPU, those that may use it divide its memory.
    """
    count = sum(pool.local * _processes(pool.options) for pool in config.pools.values())
    on_gpu = max(1, sum(pool.local for pool in config.pools.values() if pool.options.get("device") != "cpu"))
    threads = max(1, ((os.cpu_count() or 1) - 1) // max(1, count))
    for pool in config.pools.values():
        for number in range(pool.local):
            flags = ("--threads", str(threads), "--gpu-shards", str(on_gpu), *lending_flags(pool, secret))
            flags += (*shard_flags(pool.options), *(("--json-logs",) if json_logs else ()))
            yield ShardCommand(backend_name(pool.name, number), pool.model or "bundled", flags)


def _processes(options: Mapping[str, object]) -> int:
    """The processes of a shard with these options, which were checked."""
    asked = str(options.get("tensor-parallel", 1))
    return digits(asked, most=1024) or 1


def with_addresses(config: Config, addresses: dict[str, str]) -> Config:
    """`config` with the addresses of local shards in place of their number, and only the router's own options."""
    pools = {
        name: replace(
            pool,
            at=tuple(addresses[backend_name(pool.name, number)] for number in range(pool.local)),
            options=link_options(pool.options),
        )
        if pool.local
        else pool
        for name, pool in config.pools.items()
    }
    return replace(config, pools=pools)


class LoadingBars:
    """Progress bars, one per shard, on a terminal; one line per shard elsewhere."""

    def __init__(self, console: Console, *, is_shown: bool = True) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            console=console,
            disable=not is_shown,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, shard: str, share: float, what: str) -> None:
        """Show that `shard` has done `share` of its start; `what` is its current step."""
        if shard not in self._tasks:
            self._tasks[shard] = self._bars.add_task(f"shard {shard}", total=1.0, what=what)
        self._bars.update(self._tasks[shard], completed=share, what=what)
