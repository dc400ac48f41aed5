from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.sglang import SGLang
from tests.backends.parts import a_prompt
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.sglang import SGLangServer
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(SGLangServer(cut_bytes=3)) as standin:
        yield StandInStage(SGLang("b", standin.url, pool="p"), standin, a_prompt(body=None))


def an_unreachable() -> SGLang:
    return SGLang("b", f"http://{NOWHERE}", pool="p")
