"""The SLA file on disk: read, validated, and watched for changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from backends.kinds import KINDS, kind_of
from policies.catalogue import Catalogue, builtin_catalogue
from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.parse import examine
from policies.sla.secrets import Outside
from router.regular_file import read_regular
from router.start.pool_options import check_option
from router.text.checkpoint import check_template, doubt_about

Stamp = tuple[int, int, int]
"""Time of the last change in ns, size in bytes, and inode, which changes if the file is replaced."""


class SlaSource(Protocol):
    """Where an SLA file comes from."""

    def read(self) -> Contents:
        """The present contents. Raises ConfigError with every mistake, or if it cannot be read."""
        ...

    def stamp(self) -> Stamp | None:
        """A value that differs after the file has changed; None without a file."""
        ...


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of `source` at one moment: text, the valid Config in it, and the stamp from before reading.

    `doubts` are legal settings that are probably not intended, `unchecked` values that are not there and need not be,
    as `file:line: path: sentence` each.
    """

    source: SlaSource
    text: str
    config: Config
    stamp: Stamp | None
    doubts: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


def _as_it_is(config: Config) -> Config:
    return config


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The SLA file at `path`; `environment` has the values for `${env:NAME}`, `catalogue` the policies' parts and the
    kinds of backends; without it Pointsman's own.

    `fill` completes each Config that is read. `may_be_absent`: the values of `${env:NAME}` and `${file:path}` need not
    be there; others take their place, so that the Config is good for checks only.
    """

    path: Path
    environment: Mapping[str, str]
    catalogue: Catalogue | None = None
    may_be_absent: bool = False
    fill: Callable[[Config], Config] = _as_it_is

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> Contents:
        """The present contents. Raises ConfigError with every mistake, or if it cannot be read."""
        stamp = self.stamp()
        try:
            text = read_regular(self.path).decode()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read {self.path}: {error}", hint="the file must be text in UTF-8") from error
        return self.contents_of(text, stamp)

    def contents_of(self, text: str, stamp: Stamp | None = None) -> Contents:
        """The contents that `text` would have in this file's place. Raises ConfigError with every mistake."""
        outside = Outside(
            self.environment,
            lambda name: read_regular(Path(name)).decode(),
            doubt_tokenizer=doubt_about,
            doubt_keys=_doubt_about_keys,
            check_template=check_template,
            check_option=check_option,
            may_be_absent=self.may_be_absent,
        )
        catalogue = self.catalogue or replace(builtin_catalogue(), kinds=tuple(KINDS))
        parsed = examine(text, source=str(self.path), outside=outside, catalogue=catalogue)
        for pool in parsed.config.pools.values():
            # a kind of another distribution may turn out to be unusable, which no request should find out
            kind_of(pool.kind)
        return Contents(self, text, self.fill(parsed.config), stamp, parsed.doubts, parsed.unchecked)

    def stamp(self) -> Stamp | None:
        """A value that differs after the file has changed; None without a file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _doubt_about_keys(place: str) -> str | None:
    """Why no signature can be verified with the keys in the file at `place`; None if some can."""
    # a file without issuers imports nothing that verifies tokens
    from router.identity.key_source import read_file
    from router.identity.signing_keys import read_keys

    try:
        read_keys(read_file(place))
    except ValueError as error:
        return str(error)
    return None
