from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.deepspeed_mii import DeepSpeedMII
from backends.openai.compatible import OpenAIOptions
from policies.nouns import Request
from tests.backends.parts import a_request
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.deepspeed_mii import MIIServer
from tests.standins.standin import running


class MIIStage(StandInStage):
    def refuse(self) -> Request:
        # the server would break off
        return a_request(prompt_tokens=self.standin.context_tokens)


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(MIIServer(cut_bytes=3)) as standin:
        options = OpenAIOptions(context_tokens=standin.context_tokens)
        yield MIIStage(DeepSpeedMII("b", standin.url, pool="p", options=options), standin)


def an_unreachable() -> DeepSpeedMII:
    return DeepSpeedMII("b", f"http://{NOWHERE}", pool="p")
