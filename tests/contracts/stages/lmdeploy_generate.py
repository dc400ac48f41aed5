from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.lmdeploy import LMDeploy
from tests.backends.parts import a_prompt
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.lmdeploy import LMDeployServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(LMDeployServer(cut_bytes=3)) as standin:
        yield StandInStage(LMDeploy("b", standin.url, pool="p"), standin, a_prompt(body=None))


def an_unreachable() -> LMDeploy:
    return LMDeploy("b", f"http://{NOWHERE}", pool="p")
