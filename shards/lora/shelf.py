"""The adapters that a shard knows, and those that it has in memory."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from shards.lora.adapter import LoadedAdapter
from shards.lora.options import MOST_ADAPTERS, AdapterOptions, name_objection
from shards.network.errors import CheckpointError
from shards.nouns import AdapterUse

_log = logging.getLogger(__name__)

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class ReadsAdapters(Protocol):
    """Reads adapters; all calls come from a thread of the shelf."""

    def size(self, folder: Path) -> int:
        """The bytes that the adapter in `folder` takes in memory. Raises CheckpointError."""
        ...

    def read(self, folder: Path, name: str) -> LoadedAdapter:
        """The adapter in `folder`. Raises CheckpointError."""
        ...


class CannotLoad(Exception):
    """An adapter cannot be loaded; the message is for the client that named it."""


class Found(NamedTuple):
    """An adapter on disk. `stamp` changes with its files; `trouble` is the reason why it cannot be read, if any."""

    folder: Path
    stamp: tuple[object, ...]
    nbytes: int = 0
    trouble: str = ""


@dataclass(slots=True, eq=False)
class _Entry:
    """A known adapter: on its way into memory, in memory, or neither. `users` are the requests that it computes."""

    found: Found
    adapter: LoadedAdapter | None = None
    coming: Future[LoadedAdapter] | None = None
    users: set[Hashable] = field(default_factory=set)

    @property
    def takes(self) -> int:
        """Memory that it has, or will have, in bytes."""
        return self.found.nbytes if self.adapter is not None or self.coming is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether it is in memory and unused."""
        return self.adapter is not None and not self.users


class AdapterShelf:
    """Loads adapters when requests ask for them, and drops the least recently used ones when there is no room.

    Files are read on a thread of its own; all calls come from the engine's thread, and none but the first look waits.
    An adapter with files that changed is loaded again; requests that run with the old one keep it. Raises
    CheckpointError if one of the named adapters cannot be read, ValueError if it has no room or no proper name, OSError
    if there is no such folder.
    """

    def __init__(self, options: AdapterOptions, form: ReadsAdapters, *, thread: Executor | None = None) -> None:
        self.options, self._form = options, form
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._entries: dict[str, _Entry] = {}
        self._leaving: list[_Entry] = []
        self._awaited: dict[Hashable, str] = {}
        self._look: Future[dict[str, Found]] | None = None
        self._looked_s = float("-inf")
        self._replaced: list[str] = []
        self._use: AdapterUse | None = None
        self._is_told = False
        for name in options.named:
            if objection := name_objection(name):
                raise ValueError(f"--lora names '{name}'; {objection}")
        if options.folder is not None and not options.folder.is_dir():
            raise NotADirectoryError(f"{options.folder} is no folder of adapters")
        found = _look(options, form)
        for name in options.named:
            if found[name].trouble:
                raise CheckpointError(found[name].trouble)
            if found[name].nbytes > options.most_bytes:
                raise ValueError(_too_large(name, found[name].nbytes, options))
        self._take_over(found)

    def __repr__(self) -> str:
        return (
            f"AdapterShelf({len(self._entries)} known, {self.nbytes} bytes loaded, {len(self._awaited)} requests wait)"
        )

    @property
    def use(self) -> AdapterUse:
        """Its adapters, as routers see them."""
        if self._use is None:
            self._use = self._counted()
        return self._use

    def take_change(self) -> AdapterUse | None:
        """Its adapters, if they may have changed since the last call."""
        is_told, self._is_told = self._is_told, True
        return None if is_told else self.use

    def _counted(self) -> AdapterUse:
        awaited = set(self._awaited.values())
        return AdapterUse(
            known=tuple(sorted(name for name, entry in self._entries.items() if not entry.found.trouble)),
            loaded=tuple(sorted(name for name, entry in self._entries.items() if entry.adapter is not None)),
            active=tuple(sorted(name for name, entry in self._entries.items() if entry.users or name in awaited)),
            slots=self.options.most,
        )

    @property
    def nbytes(self) -> int:
        """Memory of all adapters that are loaded or being loaded."""
        return sum(entry.takes for entry in (*self._entries.values(), *self._leaving))

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for its adapter."""
        return bool(self._awaited)

    @property
    def next_look_s(self) -> float | None:
        """When the folder is to be looked through again, or its contents are; None without a folder."""
        return None if self.options.folder is None else self._looked_s + self.options.look_s

    def objection(self, name: str) -> str | None:
        """The reason why no request can name the adapter `name`; None if one can."""
        if name in self._entries:
            return None
        known = ", ".join(self.use.known[:8]) or "none"
        return f"this shard has no adapter '{name}'; it has {known}"

    def ask(self, key: Hashable, name: str) -> None:
        """Load the adapter `name` for the request `key`, unless it is in memory."""
        self._awaited[key] = name
        self._note_change()

    def answers(self, now_s: float) -> list[tuple[Hashable, LoadedAdapter | CannotLoad]]:
        """The requests that can begin since the last call, each with its adapter, or that cannot, with the reason."""
        self._see(now_s)
        for entry in self._entries.values():
            if entry.coming is not None and entry.coming.done():
                self._land(entry, entry.coming)
        self._leaving = [entry for entry in self._leaving if entry.users]
        return [(key, outcome) for key in list(self._awaited) if (outcome := self._answer(key)) is not None]

    def leave(self, key: Hashable) -> None:
        """The request `key` has ended."""
        if self._awaited.pop(key, None) is not None:
            self._note_change()
            return
        for name, entry in self._entries.items():
            if key in entry.users:
                entry.users.discard(key)
                # the last one is the most recently used
                self._entries[name] = self._entries.pop(name)
                self._note_change()
                return
        for entry in self._leaving:
            entry.users.discard(key)

    def take_replaced(self) -> list[str]:
        """The digests of weights that were replaced or removed since the last call."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def close(self) -> None:
        """Load nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Assert that the bounds are kept, and that a request waits or uses one adapter."""
        entries = [*self._entries.values(), *self._leaving]
        assert sum(entry.takes > 0 for entry in entries) <= self.options.most, "too many adapters are loaded"
        assert self.nbytes <= self.options.most_bytes, "adapters take too much memory"
        users = [key for entry in entries for key in entry.users]
        assert len(users) == len(set(users)), "a request uses two adapters"
        assert not set(users) & self._awaited.keys(), "a request waits for the adapter that it uses"
        assert all(entry.adapter is not None for entry in entries if entry.users), "an adapter in use was dropped"

    def _answer(self, key: Hashable) -> LoadedAdapter | CannotLoad | None:
        """The adapter of the waiting request `key`, which uses it from now on; None if it must wait."""
        name = self._awaited[key]
        entry = self._entries.get(name)
        if entry is None:
            outcome: LoadedAdapter | CannotLoad = CannotLoad(f"the adapter '{name}' was removed")
        elif entry.found.trouble:
            outcome = CannotLoad(f"the adapter '{name}' cannot be loaded: {entry.found.trouble}")
        elif entry.adapter is not None:
            entry.users.add(key)
            outcome = entry.adapter
        else:
            if entry.coming is None and self._make_room(entry):
                entry.coming = self._thread.submit(self._form.read, entry.found.folder, name)
            return None
        del self._awaited[key]
        self._note_change()
        return outcome

    def _land(self, entry: _Entry, coming: Future[LoadedAdapter]) -> None:
        entry.coming = None
        error = coming.exception()
        if error is None:
            entry.adapter = coming.result()
        else:
            _log.warning("an adapter cannot be loaded: %s", error)
            entry.found = entry.found._replace(trouble=str(error))
        self._note_change()

    def _note_change(self) -> None:
        self._use, self._is_told = None, False

    def _make_room(self, entry: _Entry) -> bool:
        """Drop idle adapters, the least recently used first, until `entry` fits; False if too many are in use."""
        wanted = entry.found.nbytes
        for other in list(self._entries.values()):
            if self._has_room(wanted):
                break
            if other.is_idle:
                other.adapter = None
                self._note_change()
        return self._has_room(wanted)

    def _has_room(self, nbytes: int) -> bool:
        entries = (*self._entries.values(), *self._leaving)
        count = sum(each.takes > 0 for each in entries)
        return count < self.options.most and self.nbytes + nbytes <= self.options.most_bytes

    def _see(self, now_s: float) -> None:
        """Look through the folder on the thread when it is time, and take over what was found."""
        if self.options.folder is None:
            return
        if self._look is not None and self._look.done():
            look, self._look = self._look, None
            try:
                self._take_over(look.result())
            except OSError as error:
                _log.warning("the adapters in %s cannot be listed: %s", self.options.folder, error)
        if self._look is None and now_s - self._looked_s >= self.options.look_s:
            self._looked_s = now_s
            self._look = self._thread.submit(_look, self.options, self._form)

    def _take_over(self, found: dict[str, Found]) -> None:
        for name, entry in list(self._entries.items()):
            if found.get(name) is not None and found[name].stamp == entry.found.stamp:
                continue
            del self._entries[name]
            if entry.adapter is not None:
                self._replaced.append(entry.adapter.digest)
            if entry.users:
                self._leaving.append(entry)
            self._note_change()
        for name, each in found.items():
            if name not in self._entries:
                too_large = _too_large(name, each.nbytes, self.options) if each.nbytes > self.options.most_bytes else ""
                trouble = each.trouble or too_large
                if trouble:
                    _log.warning("the adapter %s cannot be loaded: %s", name, trouble)
                self._entries[name] = _Entry(each._replace(trouble=trouble))
                self._note_change()


def _look(options: AdapterOptions, form: ReadsAdapters) -> dict[str, Found]:
    """The adapters on disk by name. Raises OSError if the folder cannot be listed."""
    found = {name: _found(folder, form) for name, folder in options.named.items()}
    for name, folder in _folders(options.folder) if options.folder is not None else ():
        if name not in found and len(found) < MOST_ADAPTERS and name_objection(name) is None:
            found[name] = _found(folder, form)
    return found


def _folders(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if (path / _FILES[0]).is_file():
            yield path.name, path


def _found(folder: Path, form: ReadsAdapters) -> Found:
    stamp: tuple[object, ...] = ()
    try:
        stats = [(folder / name).stat() for name in _FILES]
        stamp = tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)
        return Found(folder, stamp, form.size(folder))
    except FileNotFoundError as error:
        return Found(folder, (str(error),), trouble=f"{error.filename} is missing")
    except (OSError, CheckpointError) as error:
        return Found(folder, (*stamp, str(error)), trouble=str(error))


def _too_large(name: str, nbytes: int, options: AdapterOptions) -> str:
    return f"{name} takes {nbytes} bytes, and adapters have {options.most_bytes}; raise --lora-memory"
