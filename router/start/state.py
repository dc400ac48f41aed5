"""The state folder: where a router keeps all that its file gives no other place, without being asked to.

`server.state` names it, or refuses it with `off`. Otherwise it is `$STATE_DIRECTORY`, which systemd and our images set,
or a folder for each SLA file below `$XDG_STATE_HOME/pointsman` (XDG Base Directory Specification 0.8).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from policies.errors import ConfigError
from policies.sla.audit import AuditSettings
from policies.sla.batches import BatchSettings
from policies.sla.config import Config
from policies.sla.server import STATE_OFF
from policies.sla.usage import UsageSettings
from router.batches.store.directory import DirectoryStore
from router.private_files import NO_ROOM, private, private_folder
from router.regular_file import read_regular
from router.shared.keys.lines import decode
from router.start.config_file import ConfigFile, Contents

USAGE, KEYS, AUDIT, BATCHES, BUDGETS, OWED = (
    *("usage.sqlite", "keys.jsonl", "audit.log", "batches"),
    *("budgets.sqlite", "owed"),
)
"""Names in the folder."""

PARTS = frozenset({USAGE, KEYS, AUDIT, BATCHES})
"""Those that are sections of the file. What quotas need finds its place in the folder by itself."""


@dataclass(frozen=True, slots=True)
class State:
    """The folder of one router, and the `parts` that are kept there; None: nothing is."""

    folder: Path | None
    parts: frozenset[str] = PARTS

    def fill(self, config: Config) -> Config:
        """`config` with a place for each part that its file gives none."""
        folder, server, store = self.folder, config.server, config.store
        if folder is None:
            return replace(config, server=replace(server, state=server.state or STATE_OFF))
        usage, audit, batches = config.usage, config.audit, config.batches
        if usage is None and USAGE in self.parts:
            usage = UsageSettings(place := str(folder / USAGE), f"{place}.journal")
        if audit is None and AUDIT in self.parts:
            audit = AuditSettings(str(folder / AUDIT))
        if batches is None and BATCHES in self.parts:
            batches = BatchSettings.usual(str(folder / BATCHES), config.classes)
        keys = server.keys_file
        if keys is None and store.redis is None and KEYS in self.parts:
            keys = str(folder / KEYS)
        if store.redis is not None and store.journal is None:
            store = replace(store, journal=str(folder / OWED))
        server = replace(server, keys_file=keys, state=server.state or str(folder))
        return replace(config, usage=usage, audit=audit, batches=batches, server=server, store=store)


def state_of(config: Config, usual: Callable[[], Path | None]) -> State:
    """The state of a router with `config`, as its file has it; `usual` is the folder if that names none."""
    named = config.server.state
    if named == STATE_OFF:
        return State(None)
    return State(usual() if named is None else Path(named))


def usual_folder(environment: Mapping[str, str], name: str) -> Path | None:
    """The folder of the router called `name`, if its file names none; None: this user has no home."""
    if given := environment.get("STATE_DIRECTORY"):
        # several are separated by colons: systemd.exec(5)
        return Path(given.split(":")[0])
    home = Path(environment.get("XDG_STATE_HOME", ""))
    # "All paths ... must be absolute. If an implementation encounters a relative path ... it should ... ignore it."
    if not home.is_absolute():
        try:
            home = Path.home() / ".local" / "state"
        except RuntimeError:
            return None
    return home / "pointsman" / name if home.is_absolute() else None


def kept(contents: Contents, environment: Mapping[str, str], say: Callable[[str], None]) -> Contents:
    """`contents` with a place in the state folder for each part that can be kept, now and when the file is read again.
    Raises ConfigError as `usable` does."""
    file, config = contents.source, contents.config
    assert isinstance(file, ConfigFile)
    state = usable(state_of(config, lambda: usual_folder(environment, name_of(file.path))), config, say)
    return replace(contents, source=replace(file, fill=state.fill), config=state.fill(config))


def name_of(file: Path) -> str:
    """The name of the router with the SLA file at `file`: each file has a folder of its own."""
    return name_for(file.stem, str(file.absolute()))


def name_for(word: str, what: str) -> str:
    """A name that begins with `word`, and is another one for each `what`."""
    return f"{word}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def usable(state: State, config: Config, say: Callable[[str], None]) -> State:
    """`state` with the parts that can be kept; `say` gets a sentence about others. `config` is as its file has it.

    A usual folder keeps no router from serving: no operator has asked for it. Raises ConfigError for a folder that
    the file names. A full disk is none of that: it may get room.
    """
    if state.folder is None:
        if config.server.state is None:
            say(_lost(f"this user has no home; {_HINT}"))
        return state
    if (trouble := _trouble_with(state.folder)) is not None:
        if config.server.state is not None:
            raise ConfigError(f"server.state {state.folder} cannot be used: {trouble}", hint="name another folder")
        say(_lost(f"{state.folder} cannot be used: {trouble}; {_HINT}"))
        return State(None)
    filled, parts = state.fill(config), set(state.parts)
    for part, implied in _implied(config, filled).items():
        try:
            implied()
        except (ConfigError, OSError) as error:
            if config.server.state is not None:
                raise
            reason = error.message if isinstance(error, ConfigError) else error
            say(f"{state.folder / part} is not used, and this router has none of it: {reason}")
            parts.discard(part)
    return State(state.folder, frozenset(parts))


_HINT = "set server.state to a folder, or to off"


def _lost(reason: str) -> str:
    return f"Usage, issued keys, the audit log, batches and budgets end with this router: {reason}."


def _trouble_with(folder: Path) -> str | None:
    """Why nothing can be written in `folder`, which is made; None if something can, once there is room."""
    try:
        private_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".try-"):
            return None
    except OSError as error:
        if error.errno in NO_ROOM and folder.is_dir():
            return None
        return (error.strerror or str(error)).lower()


def _implied(config: Config, filled: Config) -> dict[str, Callable[[], object]]:
    """What opens each part that has its place from the folder, as a trial. Raises ConfigError or OSError."""
    found: dict[str, Callable[[], object]] = {}
    if config.usage is None and filled.usage is not None:
        found[USAGE] = partial(_try_usage, filled.usage)
    if config.server.keys_file is None and (keys := filled.server.keys_file) is not None:
        found[KEYS] = partial(_try_keys, Path(keys))
    if config.audit is None and filled.audit is not None:
        found[AUDIT] = partial(_try_file, Path(filled.audit.file))
    if config.batches is None and filled.batches is not None:
        found[BATCHES] = DirectoryStore(Path(filled.batches.store)).open
    return found


def _try_usage(settings: UsageSettings) -> None:
    from router.operate.usage.database import UsageDatabase

    database = UsageDatabase(settings.store)
    try:
        database.migrate()
    except ConnectionError as error:
        if error.errno not in NO_ROOM:
            raise
    finally:
        database.close()


def _try_keys(file: Path) -> None:
    try:
        decode(read_regular(file), str(file))
    except FileNotFoundError:
        return


def _try_file(file: Path) -> None:
    try:
        os.close(private(str(file), os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
