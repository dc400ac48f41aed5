"""Which tokenizer prompts are read with: the configured one, a shard's, or that of the engine's checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policies.sla.pools import PoolSpec
from router.ask import Chat
from router.text.checkpoint import NoCheckpointError
from router.text.sources import DOWNLOAD_EVERY_S, LOOK_EVERY_S, Sources
from router.text.tokenize import ModelText, Tokenizers
from tests.router.parts import MODEL, some_assets
from tests.router.text.test_checkpoint import a_checkpoint
from tests.virtual_time import run_virtually

USER = Chat([{"role": "user", "content": "hello"}])


@dataclass(frozen=True)
class AModel:
    name: str = MODEL
    pools: frozenset[str] = frozenset({"lm"})
    assets: Mapping[str, bytes] = field(default_factory=dict)
    root: str | None = None


@asynccontextmanager
async def sources_of(
    tokenizer: str | None = None,
    chat_template: str | None = None,
    **more: Any,
) -> AsyncIterator[Sources]:
    pools = {"lm": PoolSpec("lm", kind="vllm", tokenizer=tokenizer, chat_template=chat_template)}
    tokenizers = Tokenizers()
    sources = Sources(tokenizers, pools, **more)
    yield sources
    await sources.close()
    await tokenizers.close()


def marked(directory: Path, mark: str) -> Path:
    """A checkpoint with a template that begins with `mark`."""
    a_checkpoint(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": f"{mark}{{{{ messages }}}}"}))
    return directory


def mark_of(text: ModelText | None) -> str:
    assert text is not None
    return text.template.render(USER).partition("[")[0]


async def test_what_is_configured_goes_before_a_shard_and_that_before_the_engines_checkpoint(tmp_path: Path) -> None:
    configured, root = marked(tmp_path / "a", "configured"), marked(tmp_path / "b", "root")
    shard = {**some_assets(), "chat_template.jinja": b"shard{{ messages }}"}
    async with sources_of(str(configured)) as sources:
        model = AModel(assets=shard, root=str(root))
        assert mark_of(await sources.text_of(model)) == "configured"
        assert sources.origins() == {MODEL: f"`tokenizer: {configured}`"}
    async with sources_of() as sources:
        assert mark_of(await sources.text_of(model)) == "shard"
        assert mark_of(await sources.text_of(AModel(root=str(root)))) == "root"
        assert await sources.text_of(AModel()) is None
        assert await sources.text_of(AModel(pools=frozenset({"another"}))) is None


async def test_none_leaves_the_engines_checkpoint_alone_and_a_shard_as_it_is(tmp_path: Path) -> None:
    shard, root = {**some_assets(), "chat_template.jinja": b"shard{{ messages }}"}, marked(tmp_path, "root")
    async with sources_of("none") as sources:
        assert await sources.text_of(AModel(root=str(root))) is None
        assert mark_of(await sources.text_of(AModel(assets=shard, root=str(root)))) == "shard"
        assert not sources.asks_engine(AModel(root=str(root)))
    async with sources_of() as sources:
        assert sources.asks_engine(AModel(root=str(root)))


@pytest.mark.parametrize("root", ["/nowhere/at/all", "relative/to/what/the/engine/knows", "acme/never-cached", "."])
async def test_a_root_that_cannot_be_read_here_is_no_source_and_nothing_to_warn_of(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    def never(_: str) -> Path:
        raise AssertionError("what an engine says is not downloaded")

    async with sources_of(download=never) as sources:
        assert await sources.text_of(AModel(root=root)) is None
        await sources.refresh()
    assert not caplog.records


async def test_a_configured_template_stands_in_for_that_of_any_source(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("mine{{ messages }}")
    async with sources_of(chat_template=str(template)) as sources:
        assert mark_of(await sources.text_of(AModel(assets=some_assets()))) == "mine"
        assert await sources.text_of(AModel()) is None


async def test_a_tokenizer_is_read_once_and_again_when_its_files_change(tmp_path: Path) -> None:
    directory = marked(tmp_path, "old")
    async with sources_of(str(directory)) as sources:
        first, second = await asyncio.gather(*(sources.text_of(AModel()) for _ in range(2)))
        assert first is second
        await sources.refresh()
        assert await sources.text_of(AModel()) is first
        marked(directory, "newer")
        assert await sources.text_of(AModel()) is first
        await sources.refresh()
        assert mark_of(await sources.text_of(AModel())) == "newer"


async def test_a_later_directory_is_found_and_missing_files_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sources_of(str(tmp_path / "later")) as sources:
        for _ in range(3):
            assert await sources.text_of(AModel()) is None
            await sources.refresh()
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "there is no directory" in caplog.text
        marked(tmp_path / "later", "found")
        await sources.refresh()
        assert mark_of(await sources.text_of(AModel())) == "found"


async def test_a_broken_tokenizer_is_logged_and_the_next_source_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    async with sources_of(str(tmp_path)) as sources:
        for _ in range(2):
            assert mark_of(await sources.text_of(AModel(assets=some_assets()))).startswith("<|user|>")
        assert "cannot be read" in caplog.text
        a_checkpoint(tmp_path)
        await sources.refresh()
        await sources.text_of(AModel(assets=some_assets()))
        assert sources.origins()[MODEL] == f"`tokenizer: {tmp_path}`"


async def test_a_name_of_the_hub_is_downloaded_beside_the_requests(tmp_path: Path) -> None:
    may_end, asked = threading.Event(), []

    def download(name: str) -> Path:
        asked.append(name)
        may_end.wait(10)
        return marked(tmp_path, "downloaded")

    async with sources_of("acme/never-cached", download=download) as sources:
        assert await sources.text_of(AModel()) is None
        await sources.refresh()
        assert await sources.text_of(AModel()) is None
        may_end.set()
        await sources.downloads_ended()
        assert mark_of(await sources.text_of(AModel())) == "downloaded"
    assert asked == ["acme/never-cached"]


async def test_a_failed_download_is_logged_with_the_remedy_and_tried_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, asked = [0.0], []

    def download(name: str) -> Path:
        asked.append(name)
        raise NoCheckpointError(f"{name} cannot be downloaded: no network (fill the cache)")

    async with sources_of("acme/never-cached", download=download, clock=lambda: now[0]) as sources:
        for seconds, downloads in ((0, 1), (DOWNLOAD_EVERY_S - 1, 1), (DOWNLOAD_EVERY_S, 2)):
            now[0] = seconds
            assert await sources.text_of(AModel()) is None
            await sources.refresh()
            await sources.downloads_ended()
            assert len(asked) == downloads
        assert "fill the cache" in caplog.text


async def test_closing_does_not_wait_for_a_download() -> None:
    may_end = threading.Event()

    def download(name: str) -> Path:
        may_end.wait(60)
        raise NoCheckpointError(name)

    async with sources_of("acme/never-cached", download=download) as sources:
        await sources.text_of(AModel())
    may_end.set()


def test_changed_files_are_looked_for_in_time_while_the_health_of_backends_changes_all_the_time() -> None:
    looks: list[float] = []

    class Noted(Sources):
        async def refresh(self) -> None:
            looks.append(asyncio.get_running_loop().time())

    async def run() -> None:
        tokenizers = Tokenizers()
        sources = Noted(tokenizers, {})
        looking = asyncio.create_task(sources.look_after(list, lambda: asyncio.sleep(0.3)))
        await asyncio.sleep(10 * LOOK_EVERY_S)
        looking.cancel()
        await tokenizers.close()
        assert len(looks) == 9
        assert max(later - look for look, later in pairwise(looks)) <= LOOK_EVERY_S + 0.3

    run_virtually(run())
