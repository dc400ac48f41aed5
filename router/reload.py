"""Hot reload: a changed SLA file takes effect whole, or is refused whole and the old one stays."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from policies.changes import carried_over, fixed_changes
from policies.errors import ConfigError
from router.config_file import Contents
from router.gateway import Gateway

_log = logging.getLogger("pointsman.config")


class Reloader:
    """Gives the gateway the Config of a file that changed, by one assignment; `started` is what the file said at first.

    A call keeps the Config that it began with. Pools and servers stay as they were started: a file that changes those
    is refused. A file that differs from one look to the next is left to settle, so that nothing half written is read.
    """

    def __init__(self, gateway: Gateway, started: Contents, *, every_s: float = 1.0) -> None:
        self._gateway, self._every_s = gateway, every_s
        self._written = started
        self._read_stamp = self._last_stamp = started.stamp
        self._asked = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Reloader of {self._written.source}, version {self._written.config.version} decides>"

    def ask(self) -> None:
        """Have the file read at once, changed or not: what it refers to may have changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Look at the file every `every_s` seconds, and when asked, until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._every_s)
            if self._asked.is_set():
                self._asked.clear()
                await self.reload()
            else:
                await self.look()

    async def look(self) -> None:
        """Reload if the file has changed and come to rest."""
        stamp = await asyncio.to_thread(self._written.source.stamp)
        settled, self._last_stamp = stamp == self._last_stamp, stamp
        if settled and stamp != self._read_stamp:
            # noted before the file is read: if it changes meanwhile, the next look differs again
            self._read_stamp = stamp
            await self.reload()

    async def reload(self) -> bool:
        """Read the file and let it decide from now on; is it so? If it is refused, its problems are logged."""
        telemetry = self._gateway.telemetry
        try:
            contents = await asyncio.to_thread(self._written.source.read)
            self._require_startable(contents)
        except ConfigError as error:
            telemetry.reloaded(accepted=False)
            _log.warning("SLA file refused, version %s goes on: %s", self._written.config.version, error)
            return False
        before, self._written = self._written, contents
        self._gateway.config = carried_over(self._gateway.config, contents.config)
        telemetry.config(contents.config.version)
        telemetry.reloaded(accepted=True)
        _log.info("SLA file taken: version %s decides, %s before", contents.config.version, before.config.version)
        return True

    def _require_startable(self, contents: Contents) -> None:
        """Raise ConfigError if `contents` cannot take effect without a restart."""
        source = str(contents.source)
        if self._written.text.strip() and not contents.text.strip():
            # as a file it would be sound, and let in everybody
            raise ConfigError(f"{source} is empty", hint="restart to run without rules")
        if problems := fixed_changes(self._written.config, contents.config, text=contents.text, source=source):
            raise ConfigError(f"{source} has changes that need a restart:", problems=problems)
