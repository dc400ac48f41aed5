from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.ollama.backend import Ollama
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.ollama import OllamaServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(OllamaServer(cut_bytes=3)) as standin:
        yield StandInStage(Ollama("b", standin.url, pool="p"), standin)


def an_unreachable() -> Ollama:
    return Ollama("b", f"http://{NOWHERE}", pool="p")
