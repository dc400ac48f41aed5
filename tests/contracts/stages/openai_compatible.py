from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.openai.compatible import OpenAICompatible
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    # cut so that no character and no event comes whole
    async with running(OpenAIServer(cut_bytes=3)) as standin:
        yield StandInStage(OpenAICompatible("o", standin.url, pool="p"), standin)


def an_unreachable() -> OpenAICompatible:
    return OpenAICompatible("o", f"http://{NOWHERE}", pool="p")
