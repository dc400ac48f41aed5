from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.fastchat.backend import FastChat
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.fastchat import FastChatWorker
from tests.standins.standin import running


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(FastChatWorker(cut_bytes=3)) as standin:
        yield StandInStage(FastChat("b", standin.url, pool="p"), standin)


def an_unreachable() -> FastChat:
    return FastChat("b", f"http://{NOWHERE}", pool="p")
