from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.azure import Azure, AzureOptions
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.azure import AzureServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(AzureServer(cut_bytes=3)) as standin:
        yield StandInStage(Azure("b", standin.url, pool="p", options=AzureOptions(models={"m": "m"})), standin)


def an_unreachable() -> Azure:
    return Azure("b", f"http://{NOWHERE}", pool="p")
