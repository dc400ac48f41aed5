"""Drafts of the SLA file: checked, compared with the file in effect, applied and taken back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from policies.errors import ConfigError, Conflict
from policies.sla.changes import carried_over, fixed_changes
from policies.sla.config import Config
from policies.sla.difference import FileChange, difference
from router.fleet.pools import effects
from router.operate.config_desk import Applied, DraftReport, Listed, Resampled
from router.operate.operations import Operations
from router.operate.resampled import resampled
from router.start.config_file import ConfigFile, Contents
from router.start.config_writer import ConfigWriter, version_of
from router.start.reload import Reloader, prepared

MOST_DRAFTS = 16
"""Drafts kept; the oldest is dropped first."""

_log = logging.getLogger("pointsman.config")


def _commands(config: Config) -> set[tuple[str, ...]]:
    """The programs that this router runs by `config`."""
    return {pool.wake.command for pool in config.pools.values() if pool.wake is not None and pool.wake.command}


@dataclass(frozen=True, slots=True)
class Draft:
    """A text for the file. `base` is the version of the file when it came, at the Unix time `at`."""

    text: str
    base: str
    at: float

    @property
    def version(self) -> str:
        """Its name; the file's version once it is applied."""
        return version_of(self.text)


class Drafts:
    """The drafts that this router has, and the versions that `file` had. See ConfigDesk."""

    def __init__(
        self,
        operations: Operations,
        reloader: Reloader,
        file: ConfigFile,
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._operations, self._reloader, self._file, self._unix_time = operations, reloader, file, unix_time
        self._writer = ConfigWriter(file.path, unix_time)
        self._drafts: dict[str, Draft] = {}
        self._is_applying = False

    def __repr__(self) -> str:
        return f"<Drafts of {self._file}: {len(self._drafts)}>"

    async def text(self) -> str:
        return await asyncio.to_thread(self._writer.text)

    async def put(self, text: str) -> DraftReport:
        draft = Draft(text, version_of(await self.text()), self._unix_time())
        # one that comes again is the newest
        self._drafts.pop(draft.version, None)
        self._drafts[draft.version] = draft
        while len(self._drafts) > MOST_DRAFTS:
            del self._drafts[next(iter(self._drafts))]
        return await self.report(draft.version)

    def drafts(self) -> list[Listed]:
        return [Listed(draft.version, draft.at) for draft in reversed(self._drafts.values())]

    def draft_text(self, version: str) -> str:
        return self._draft(version).text

    def drop(self, version: str) -> None:
        del self._drafts[self._draft(version).version]

    async def report(self, version: str) -> DraftReport:
        draft = self._draft(version)
        return await self._compared(draft.text, draft.base)

    async def apply(self, version: str, *, expected: str | None, for_restart: bool) -> Applied:
        draft = self._draft(version)
        applied = await self._write(draft.text, expected or draft.base, for_restart=for_restart)
        self._drafts.pop(draft.version, None)
        return applied

    async def history(self) -> list[Listed]:
        kept = await asyncio.to_thread(self._writer.kept)
        return [Listed(version, until) for version, until in kept]

    async def kept_text(self, version: str) -> str:
        return await asyncio.to_thread(self._writer.kept_text, version)

    async def roll_back(self, version: str | None, *, expected: str | None, for_restart: bool) -> Applied:
        present = version_of(await self.text())
        if version is None:
            version = next((kept.version for kept in await self.history() if kept.version != present), None)
            if version is None:
                raise Conflict("no earlier version is kept", hint="versions are kept when a draft is applied")
        return await self._write(await self.kept_text(version), expected or present, for_restart=for_restart)

    def _draft(self, version: str) -> Draft:
        draft = self._drafts.get(version)
        if draft is None:
            known = ", ".join(list(self._drafts)[-5:]) or "there is none"
            raise Conflict(f"there is no draft '{version[:40]}' at this router", hint=f"known: {known}")
        return draft

    async def _write(self, text: str, expected: str, *, for_restart: bool) -> Applied:
        """Have `text` in the file, and in effect unless it is `for_restart`."""
        if self._is_applying:
            raise Conflict("another change is being applied", hint="try again")
        self._is_applying = True
        try:
            contents = await self._examined(text)
            self._require_applicable(contents, for_restart=for_restart)
            before = await self.text()
            await asyncio.to_thread(self._writer.replace, text, expected=expected)
            version = contents.config.version
            _log.info("an operator changed %s: version %s, %s before", self._file, version, expected)
            refusal = await self._reloader.reload()
            if refusal is not None and not for_restart:
                # what was sound a moment ago is not any more, such as a certificate that the file names
                await asyncio.to_thread(self._writer.replace, before, expected=version)
                raise ConfigError(refusal, hint=f"version {expected} is in the file again")
            return Applied(version, expected, in_effect=self._operations.gateway.config.version == version)
        finally:
            self._is_applying = False

    def _require_applicable(self, contents: Contents, *, for_restart: bool) -> None:
        if new := _commands(contents.config) - _commands(self._reloader.contents.config):
            # a key of the port must not run programs on this machine
            hint = "write it into the file by hand"
            raise Conflict(f"the draft has a new command to wake a pool: {' '.join(next(iter(new)))}", hint=hint)
        if for_restart:
            return
        running = self._reloader.contents
        restarts = fixed_changes(running.config, contents.config, text=contents.text, source=str(self._file))
        if restarts:
            listed = "\n".join(("the draft has changes that need a restart:", *restarts))
            raise Conflict(listed, hint="apply it for the next restart, or leave them out")
        prepared(self._operations, running, contents)

    async def _examined(self, text: str) -> Contents:
        return await asyncio.to_thread(self._file.contents_of, text)

    async def _compared(self, text: str, base: str) -> DraftReport:
        """The check of `text`, and how it differs from the file in effect."""
        running, version = self._reloader.contents, version_of(text)
        changes: tuple[FileChange, ...] = await asyncio.to_thread(difference, running.text, text)
        report = DraftReport(version, base, running.config.version, changes=tuple(map(str, changes)))
        try:
            contents = await self._examined(text)
            restarts = fixed_changes(running.config, contents.config, text=text, source=str(self._file))
            if not restarts:
                prepared(self._operations, running, contents)
        except ConfigError as error:
            report.problems = error.problems or (error.message,)
            return report
        report.warnings, report.restart = contents.doubts, restarts
        in_force = self._operations.gateway.config
        after = carried_over(in_force, contents.config)
        report.backends = effects(in_force.pools, after.pools)
        report.decisions = await self._sampled(contents)
        return report

    async def _sampled(self, contents: Contents) -> Resampled:
        gateway = self._operations.gateway
        # the board has the latest requests
        gateway.later.flush()
        view, rows = gateway.cluster.view(gateway.clock()), tuple(self._operations.board.rows())
        # up to 256 decisions by two files
        return await asyncio.to_thread(resampled, rows, gateway.config, contents.config, view)
