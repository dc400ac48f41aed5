from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.anthropic.backend import Anthropic
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.anthropic import AnthropicServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(AnthropicServer(cut_bytes=3)) as standin:
        yield StandInStage(Anthropic("b", standin.url, pool="p"), standin)


def an_unreachable() -> Anthropic:
    return Anthropic("b", f"http://{NOWHERE}", pool="p")
