from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.mlc import MLC
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.mlc import MLCServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(MLCServer(cut_bytes=3)) as standin:
        yield StandInStage(MLC("b", standin.url, pool="p"), standin)


def an_unreachable() -> MLC:
    return MLC("b", f"http://{NOWHERE}", pool="p")
