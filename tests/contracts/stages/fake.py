from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends.fake import Answer, FakeBackend
from policies.errors import ContextExceeded
from policies.nouns import Request
from tests.backends.parts import a_prompt, a_request
from tests.standins.standin import TEXT


class FakeStage:
    def __init__(self) -> None:
        self.prompt = a_prompt()
        self.backend = FakeBackend("f", script=Answer(tuple(TEXT)))

    def hang(self) -> None:
        self.backend.script = Answer(tuple(TEXT), hangs_at=1)

    def refuse(self) -> Request:
        self.backend.script = Answer(error=ContextExceeded("too long"))
        return a_request()

    @property
    def open_behind(self) -> int:
        return self.backend.open_requests


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[FakeStage]:
    stage = FakeStage()
    yield stage
    stage.backend.check()


def an_unreachable() -> FakeBackend:
    return FakeBackend("f", is_well=False)
