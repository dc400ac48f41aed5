from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.triton.backend import TritonOptions, TritonServer
from tests.backends.parts import a_prompt
from tests.contracts.stage import NOWHERE, StandInStage
from tests.standins.standin import running
from tests.standins.triton_server import TritonStandIn


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[StandInStage]:
    async with running(TritonStandIn(cut_bytes=3)) as standin:
        prompt = a_prompt(path="/v1/completions", body={"model": "m", "prompt": "Hello"})
        options = TritonOptions(grpc_port=standin.grpc_port)
        yield StandInStage(TritonServer("b", standin.url, pool="p", options=options), standin, prompt)


def an_unreachable() -> TritonServer:
    return TritonServer("b", f"http://{NOWHERE}", pool="p", options=TritonOptions(grpc_port=1))
