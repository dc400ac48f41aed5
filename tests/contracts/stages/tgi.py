from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.tgi.backend import TGI
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.standin import running
from tests.standins.tgi import TGIServer


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(TGIServer(cut_bytes=3)) as standin:
        yield StandInStage(TGI("b", standin.url, pool="p"), standin)


def an_unreachable() -> TGI:
    return TGI("b", f"http://{NOWHERE}", pool="p")
