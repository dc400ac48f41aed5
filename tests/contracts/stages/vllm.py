from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.vllm import VLLM
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(VLLMServer(cut_bytes=3)) as standin:
        yield StandInStage(VLLM("b", standin.url, pool="p"), standin)


def an_unreachable() -> VLLM:
    return VLLM("b", f"http://{NOWHERE}", pool="p")
