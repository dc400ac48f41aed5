from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.openai.backend import OpenAI
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.openai import OpenAIAPI
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(OpenAIAPI(cut_bytes=3)) as standin:
        yield StandInStage(OpenAI("b", standin.url, pool="p"), standin)


def an_unreachable() -> OpenAI:
    return OpenAI("b", f"http://{NOWHERE}", pool="p")
