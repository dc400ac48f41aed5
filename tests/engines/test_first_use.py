"""What a new user types first, with real engines: they are recognized, and a chat and a benchmark go through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from policies.sla.parse import parse
from router.start.app import Router
from router.start.cli import app
from router.start.commands.engines import file_for, find_engine
from shards.bundled import NAME

if TYPE_CHECKING:
    from tests.engines.conftest import Engines


@asynccontextmanager
async def in_front_of(urls: Iterable[str]) -> AsyncIterator[Router]:
    """The router of `serve --to`, at a free port."""
    found = [await asyncio.to_thread(find_engine, url) for url in urls]
    config = parse(file_for(found, has_key=False))
    config = replace(config, server=replace(config.server, http="127.0.0.1:0", grpc=None, admin=None))
    async with Router(config) as router:
        assert await router.wait_until_reached(30)
        yield router


async def run(*words: str) -> Result:
    done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done


async def test_a_real_vllm_is_recognized_by_its_models(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    engine = await asyncio.to_thread(find_engine, vllm.url)
    assert (engine.kind, engine.sign, engine.models) == ("vllm", "/v1/models", (NAME,))


async def test_a_real_llama_server_is_recognized(engines: Engines) -> None:
    engine = await asyncio.to_thread(find_engine, engines.llama_server().url)
    assert engine.kind == "llama_cpp"


@pytest.mark.parametrize("which", ["vllm", "llama_cpp"])
async def test_a_chat_and_a_benchmark_go_through(engines: Engines, which: str) -> None:
    url = engines.vllm("a")[0].url if which == "vllm" else engines.llama_server().url
    async with in_front_of([url]) as router:
        said = await run("chat", "Who are you?", "--at", router.http_url)
        assert "Pointsman" in said.output
        assert f"{which}-0" in said.output
        measured = await run("bench", "--at", router.http_url, "--requests", "8", "--words", "60", "--max-tokens", "8")
        assert "8 answered and 0 failed" in measured.output
        assert f"Backends: {which}-0 8" in measured.output
