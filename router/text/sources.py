"""Finds the tokenizer and the chat template of each model: from the configuration, from a shard, or from the engine's
own checkpoint, in this order.

The files are read in threads and kept; those of a directory are read again when they change. A source that cannot be
read is logged once, and the next source is used.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

from policies.sla.pools import NO_TOKENIZER, PoolSpec
from router.text.checkpoint import (
    TEMPLATE,
    TOKENIZER,
    NoCheckpointError,
    Stamp,
    directory_of,
    downloaded,
    is_hub_name,
    read_file,
    read_files,
    stamp_of,
)
from router.text.tokenize import ModelText, Tokenizers, UnreadableTokenizerError

_log = logging.getLogger("pointsman.tokenizers")

LOOK_EVERY_S = 10.0
"""Interval of looking for changed files."""

DOWNLOAD_EVERY_S = 60.0
"""Pause after a failed download."""

_Result = TypeVar("_Result")


class Served(Protocol):
    """The part of a model that concerns its text."""

    @property
    def name(self) -> str:
        """Its name for clients."""
        ...

    @property
    def pools(self) -> frozenset[str]:
        """The pools that serve it."""
        ...

    @property
    def assets(self) -> Mapping[str, bytes]:
        """Files that its shard sent; empty without one."""
        ...

    @property
    def root(self) -> str | None:
        """Path of its checkpoint by the engine's report."""
        ...


class Location(NamedTuple):
    """Files to read: the checkpoint called `name`, or with `is_template` that one file.

    A location that is not `asked_for` in the configuration may be missing, is not logged then, and is never downloaded.
    """

    name: str
    is_template: bool = False
    asked_for: bool = True


@dataclass(slots=True)
class _Read:
    """The result of reading one Location. `paths` were read; `assets` is None if they could not be."""

    assets: Mapping[str, bytes] | None
    paths: tuple[Path, ...] = ()
    stamp: Stamp = field(default=())


class Sources:
    """Finds the text files of each model. `pools` name the configured sources."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        pools: Mapping[str, PoolSpec],
        *,
        download: Callable[[str], Path] = downloaded,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizers, self._download, self._clock = tokenizers, download, clock
        self.follow(pools)
        self._read: dict[Location, _Read] = {}
        self._reading: dict[Location, asyncio.Task[_Read]] = {}
        self._downloads: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._states: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Sources {self._states}>"

    def follow(self, pools: Mapping[str, PoolSpec]) -> None:
        """Look for tokenizers where `pools` say, from now on."""
        self._pools = pools
        self._with_source = {name for name, spec in pools.items() if spec.tokenizer not in (None, NO_TOKENIZER)}

    def origins(self) -> Mapping[str, str]:
        """Model -> where its tokenizer comes from, in words; models without a tokenizer are left out."""
        return dict(self._states)

    def may_have(self, model: Served) -> bool:
        """Whether there is any source for `model`, readable or not."""
        return bool(model.assets or model.root) or not model.pools.isdisjoint(self._with_source)

    async def text_of(self, model: Served) -> ModelText | None:
        """The tokenizer and template of `model`, from the first source that has them; None if none has."""
        if not self.may_have(model):
            return None
        for source, assets in await self._candidates(model):
            try:
                text = await self._tokenizers.model(model.name, assets)
            except UnreadableTokenizerError as error:
                self._say(model.name, f"the tokenizer of {source} cannot be read: {error}", logging.ERROR)
                continue
            self._say(model.name, source, logging.INFO)
            return text
        return None

    def count_at_engine(self, model: str) -> None:
        """Note that `model` has no source here: its engine gives the tokens."""
        self._say(model, "its engine, which is asked for each prompt", logging.INFO)

    def asks_engine(self, model: Served) -> bool:
        """Whether the engines of `model` may be asked to tokenize: not with `tokenizer: none` in one of its pools."""
        for name in model.pools:
            spec = self._pools.get(name)
            if spec is not None and spec.tokenizer == NO_TOKENIZER:
                return False
        return True

    async def refresh(self) -> None:
        """Read changed files again, and those that could not be read before."""
        for place, read in list(self._read.items()):
            if read.assets is None or await asyncio.to_thread(stamp_of, *read.paths) != read.stamp:
                self._read[place] = await self._fresh(place)

    async def look_after(self, models: Callable[[], Iterable[Served]], changed: Callable[[], Awaitable[None]]) -> None:
        """Load the tokenizer of each model as soon as it is served, so that no request waits for it, and look for
        changed files every LOOK_EVERY_S seconds, however often `changed` returns meanwhile. Until cancelled.
        """
        now = asyncio.get_running_loop().time
        look_at = now() + LOOK_EVERY_S
        while True:
            for model in tuple(models()):
                await self.text_of(model)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await changed()
            if now() >= look_at:
                await self.refresh()
                look_at = now() + LOOK_EVERY_S

    async def downloads_ended(self) -> None:
        """Wait for the running downloads."""
        await asyncio.gather(*self._downloads.values())

    async def close(self) -> None:
        """Cancel reading and downloads."""
        tasks = [*self._reading.values(), *self._downloads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _candidates(self, model: Served) -> list[tuple[str, Mapping[str, bytes]]]:
        """The sources of `model` with a tokenizer, best first, each with its files."""
        names: list[str] = []
        template: str | None = None
        for pool in sorted(model.pools):
            if (spec := self._pools.get(pool)) is not None:
                if spec.tokenizer is not None and spec.tokenizer not in (NO_TOKENIZER, *names):
                    names.append(spec.tokenizer)
                template = template or spec.chat_template
        found = [(f"`tokenizer: {name}`", assets) for name in names if (assets := await self._assets(Location(name)))]
        if TOKENIZER in model.assets:
            found.append(("its shard", model.assets))
        root = model.root
        if (
            root
            and not found
            and self.asks_engine(model)
            and (assets := await self._assets(Location(root, asked_for=False)))
        ):
            found.append((f"its engine's checkpoint {root}", assets))
        if template and (own := await self._assets(Location(template, is_template=True))):
            found = [(f"{source} with `chat_template: {template}`", {**assets, **own}) for source, assets in found]
        return found

    async def _assets(self, place: Location) -> Mapping[str, bytes] | None:
        read = self._read.get(place)
        if read is not None:
            return read.assets
        task = self._reading.get(place)
        if task is None:
            task = self._reading[place] = asyncio.create_task(self._keep(place), name=f"reading {place.name}")
        return (await asyncio.shield(task)).assets

    async def _keep(self, place: Location) -> _Read:
        try:
            read = self._read[place] = await self._fresh(place)
            return read
        finally:
            del self._reading[place]

    async def _fresh(self, place: Location) -> _Read:
        """The files in `place` now. Missing files are logged, and downloaded in the background if allowed."""
        try:
            read = await asyncio.to_thread(_read_now, place)
        except NoCheckpointError as error:
            if place.asked_for:
                self._say(place.name, f"no tokenizer or template from there: {error}", logging.ERROR)
            return _Read(None)
        is_due = place.name not in self._downloads and self._clock() >= self._not_before.get(place.name, 0.0)
        if read.assets is None and place.asked_for and is_due:
            self._say(place.name, "is not in the cache of Hugging Face and is downloaded now", logging.INFO)
            task = asyncio.create_task(self._fetch(place), name=f"downloading {place.name}")
            self._downloads[place.name] = task
        return read

    async def _fetch(self, place: Location) -> None:
        """Download the files of `place`; the next refresh reads them."""
        try:
            directory = await _in_daemon(lambda: self._download(place.name))
            self._read[place] = await asyncio.to_thread(_read_directory, directory)
        except NoCheckpointError as error:
            self._say(place.name, f"its prompts are only estimated: {error}", logging.ERROR)
            self._not_before[place.name] = self._clock() + DOWNLOAD_EVERY_S
        finally:
            self._downloads.pop(place.name, None)

    def _say(self, about: str, what: str, level: int) -> None:
        """Log `what`, once until it changes."""
        if self._states.get(about) != what:
            self._states[about] = what
            text = "prompts of '%s' are tokenized with the tokenizer from %s" if level == logging.INFO else "'%s': %s"
            _log.log(level, text, about, what)


def _read_now(place: Location) -> _Read:
    """The files in `place`; without assets for a Hub name that is not cached. Raises NoCheckpointError."""
    path = Path(place.name).expanduser()
    if place.is_template:
        return _Read({TEMPLATE: read_file(path)}, (path,), stamp_of(path))
    if not place.asked_for and not (path.is_absolute() or is_hub_name(place.name)):
        return _Read(None)
    directory = directory_of(place.name)
    return _Read(None) if directory is None else _read_directory(directory)


def _read_directory(directory: Path) -> _Read:
    """The files in `directory`. Raises NoCheckpointError."""
    stamp = stamp_of(directory)
    return _Read(read_files(directory), (directory,), stamp)


async def _in_daemon(work: Callable[[], _Result]) -> _Result:
    """The result of `work`, from a daemon thread: a download may take any time and must not delay the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, failure: Exception | None) -> None:
        if done.done():
            return
        if failure is None:
            done.set_result(cast("_Result", result))
        else:
            done.set_exception(failure)

    def run() -> None:
        result: _Result | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            failure = error
        # the loop may be closed: then no task waits any more
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="download", daemon=True).start()
    return await done
