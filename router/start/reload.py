"""Hot reload: a changed SLA file takes effect whole, or is rejected whole and the old one stays. So is its shadow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from policies.errors import ConfigError
from policies.sla.changes import carried_over, fixed_changes
from policies.sla.config import Config
from router.call.gateway import Gateway
from router.operate.operations import Operations
from router.start.config_file import Contents
from router.start.identity import trust_issuers
from router.start.tls import pool_certificates

_MOST_REASON = 1000

_log = logging.getLogger("pointsman.config")


Take = Callable[[Operations, Contents, Contents], None]
"""Puts the file's new contents (the last argument) into effect in place of the old ones. Raises ConfigError."""


class Reloader:
    """Puts a changed file into effect, by one assignment; `started` has its first contents.

    By default the file decides (`as_config`); with `take=as_shadow` it decides without effect. A file that changed
    between two looks is left until it stops changing, so that no half-written file is read.
    """

    def __init__(
        self, operations: Operations, started: Contents, *, take: Take | None = None, every_s: float = 1.0
    ) -> None:
        self._operations, self._take, self._every_s = operations, take or as_config, every_s
        self._written = started
        self._read_stamp = self._last_stamp = started.stamp
        self._asked = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Reloader of {self._written.source}, version {self._written.config.version} decides>"

    @property
    def contents(self) -> Contents:
        """The contents that are in effect."""
        return self._written

    def ask(self) -> None:
        """Read the file at once, changed or not: a file that it refers to may have changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Look at the file every `every_s` seconds, and when asked, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._asked.wait()
            if self._asked.is_set():
                self._asked.clear()
                await self.reload()
            else:
                await self.look()

    async def look(self) -> None:
        """Reload if the file has changed and stopped changing."""
        stamp = await asyncio.to_thread(self._written.source.stamp)
        settled, self._last_stamp = stamp == self._last_stamp, stamp
        if settled and stamp != self._read_stamp:
            # noted before the file is read: if it changes meanwhile, the next look differs again
            self._read_stamp = stamp
            await self.reload()

    async def reload(self) -> str | None:
        """Read the file and put it into effect. Returns the reason of a rejection, with every mistake, or None."""
        telemetry = self._operations.telemetry
        try:
            contents = await asyncio.to_thread(self._written.source.read)
            self._take(self._operations, self._written, contents)
        except ConfigError as error:
            telemetry.reloaded(accepted=False)
            self._record(accepted=False, reason=str(error)[:_MOST_REASON])
            _log.warning("SLA file rejected, version %s stays in effect: %s", self._written.config.version, error)
            return str(error)
        before, self._written, self._read_stamp = self._written, contents, contents.stamp
        telemetry.reloaded(accepted=True)
        self._record(accepted=True, version=contents.config.version)
        _log.info(
            "%s was reloaded: version %s is in effect, %s before",
            contents.source,
            contents.config.version,
            before.config.version,
        )
        for doubt in contents.doubts:
            _log.warning("warning: %s", doubt)
        return None

    def _record(self, *, accepted: bool, **details: str) -> None:
        if (audit := self._operations.audit) is not None:
            what = "shadow" if self._take is as_shadow else "config"
            audit.put(what, file=str(self._written.source), accepted=accepted, **details)


def as_config(operations: Operations, before: Contents, after: Contents) -> None:
    """Put the file into effect. A call keeps the Config that it began with.

    Pools change while requests run (`PoolsInForce.change`). Servers and local shards cannot change: raises ConfigError
    for a file that changes those.
    """
    prepared(operations, before, after)()


def prepared(operations: Operations, before: Contents, after: Contents) -> Callable[[], None]:
    """A function that puts the file into effect, if called at once. Raises ConfigError; nothing has changed yet."""
    source = str(after.source)
    if before.text.strip() and not after.text.strip():
        # an empty file would be valid, and would let every client in
        raise ConfigError(f"{source} is empty", hint="restart to run without rules")
    if problems := fixed_changes(before.config, after.config, text=after.text, source=source):
        raise ConfigError(f"{source} has changes that need a restart:", problems=problems)
    gateway = operations.gateway
    config = carried_over(gateway.config, after.config)
    trust = trust_issuers(config, gateway, operations.telemetry)
    change_pools = _changed_pools(gateway, config) if config.pools != gateway.config.pools else None

    def put_into_effect() -> None:
        if change_pools is not None:
            change_pools()
        gateway.config = config
        trust()
        gateway.splits.follow(config.rules)
        gateway.mirrors.follow(config.rules)
        gateway.bodies.resize(gateway.config.server.memory_bytes)
        operations.telemetry.config(after.config.version)
        gateway.dispatcher.follow(config)

    return put_into_effect


def _changed_pools(gateway: Gateway, config: Config) -> Callable[[], None]:
    """A function that puts the pools of `config` into effect. Raises ConfigError; nothing has changed yet."""
    hear_them = gateway.feeds.change(config.pools.values())
    have_them = gateway.fleet.change(config.pools, pool_certificates(config))

    def put_into_effect() -> None:
        hear_them()
        have_them()
        gateway.sources.follow(config.pools)

    return put_into_effect


def as_shadow(operations: Operations, before: Contents, after: Contents) -> None:  # noqa: ARG001
    """Put the file into effect as the shadow: any valid file may be."""
    operations.gateway.decider.shadow = after.config
