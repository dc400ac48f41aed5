from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.shard.backend import ShardBackend
from backends.shard.link import LinkOptions
from policies.nouns import Request
from shards.nouns import Submission
from shards.scripted import ScriptedEngine, ScriptedModel, ScriptedOptions
from shards.server import ShardServer
from tests.backends.parts import END, a_model_folder, a_prompt, a_request, ids_of
from tests.contracts.stage import NOWHERE
from tests.shards.attached import a_shard
from tests.standins.standin import TEXT


class ShardStage:
    def __init__(self, backend: ShardBackend, engine: ScriptedEngine, server: ShardServer) -> None:
        self.prompt = a_prompt()
        self.backend, self._engine, self._server = backend, engine, server

    def hang(self) -> None:
        self._engine.is_held = True

    def refuse(self) -> Request:
        return a_request(max_new_tokens=10**6)

    @property
    def open_behind(self) -> int:
        return len(self._engine.sequences) + self._server.service.open_requests


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[ShardStage]:
    def answer(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
        return ids_of(TEXT + END)

    model, options = ScriptedModel(path=a_model_folder(folder)), ScriptedOptions(prefill_tokens=2)
    engine = ScriptedEngine(answer, model=model, options=options)
    async with a_shard(engine) as server:
        backend = ShardBackend("s", server.address, pool="p")
        yield ShardStage(backend, engine, server)
        backend.check()


def an_unreachable() -> ShardBackend:
    return ShardBackend("s", NOWHERE, pool="p", options=LinkOptions(first_backoff_s=0.01))
