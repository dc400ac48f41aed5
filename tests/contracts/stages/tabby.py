from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.tabby import Tabby
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.standin import running
from tests.standins.tabby import TabbyServer


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(TabbyServer(cut_bytes=3)) as standin:
        yield StandInStage(Tabby("b", standin.url, pool="p"), standin)


def an_unreachable() -> Tabby:
    return Tabby("b", f"http://{NOWHERE}", pool="p")
