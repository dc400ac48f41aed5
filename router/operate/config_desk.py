"""What operators may do with the SLA file through the admin port. `router/start/drafts.py` does it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from router.fleet.pools import Effects


class Listed(msgspec.Struct, frozen=True):
    """A draft, and the Unix time at which it came; or an earlier version of the file, and when it was replaced."""

    version: str
    at: float


class Differing(msgspec.Struct, frozen=True):
    """Of the sampled requests `count` have another class, pools, policy or backend (`what`): `now` and `then`."""

    what: str
    now: str
    then: str
    count: int
    request: str
    """One of them."""


class Resampled(msgspec.Struct, frozen=True):
    """How a draft would have decided the router's latest requests: `compared` of them, of which `differ` differ.

    Others are `unknown`: their rules test headers, metadata or a part of the prompt that no backend held.
    """

    compared: int = 0
    differ: int = 0
    unknown: int = 0
    differences: tuple[Differing, ...] = ()


class DraftReport(msgspec.Struct):
    """A draft compared with the version in effect (`running`). `base` is the file's version when the draft came.

    `problems` are mistakes, each as `file:line: path: sentence`; with one, the rest is not known. `changes` are in the
    words of the file; those in `restart` take effect at the next start only. `backends` are those that start, are
    replaced and leave.
    """

    version: str
    base: str
    running: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    backends: Effects = Effects()
    decisions: Resampled = Resampled()


class Applied(msgspec.Struct, frozen=True):
    """The file has `version` now, and had `before`. Not `in_effect`: the router takes it up when it starts again."""

    version: str
    before: str
    in_effect: bool


class ConfigDesk(Protocol):
    """The SLA file in the hands of operators. Methods raise Conflict where something is not as they expect it."""

    async def text(self) -> str:
        """The text of the file now."""
        ...

    async def put(self, text: str) -> DraftReport:
        """Keep `text` as a draft, named by its version, and report on it."""
        ...

    def drafts(self) -> list[Listed]:
        """The drafts that are kept, the newest first."""
        ...

    def draft_text(self, version: str) -> str:
        """The text of a draft."""
        ...

    def drop(self, version: str) -> None:
        """Forget a draft."""
        ...

    async def report(self, version: str) -> DraftReport:
        """Report on a draft again: the file or the router may have changed."""
        ...

    async def apply(self, version: str, *, expected: str | None, for_restart: bool) -> Applied:
        """Write a draft into the file, if that has the version `expected` (None: the draft's base), and have it in
        effect. A draft that needs a restart is only written `for_restart`. Raises ConfigError for mistakes."""
        ...

    async def history(self) -> list[Listed]:
        """Earlier versions of the file that are kept, the newest first."""
        ...

    async def kept_text(self, version: str) -> str:
        """The text of an earlier version."""
        ...

    async def roll_back(self, version: str | None, *, expected: str | None, for_restart: bool) -> Applied:
        """The same as `apply` for an earlier version; None: the last one."""
        ...
