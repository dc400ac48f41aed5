from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.llama_cpp.backend import LlamaCpp
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.llama_cpp import LlamaCppServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(LlamaCppServer(cut_bytes=3)) as standin:
        yield StandInStage(LlamaCpp("b", standin.url, pool="p"), standin)


def an_unreachable() -> LlamaCpp:
    return LlamaCpp("b", f"http://{NOWHERE}", pool="p")
