from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.tensorrt_llm import TensorRTLLM
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.standin import running
from tests.standins.tensorrt_llm import TensorRTLLMServer


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(TensorRTLLMServer(cut_bytes=3)) as standin:
        yield StandInStage(TensorRTLLM("b", standin.url, pool="p"), standin)


def an_unreachable() -> TensorRTLLM:
    return TensorRTLLM("b", f"http://{NOWHERE}", pool="p")
