"""A source that says what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from router.fleet.discovery.source import Addresses, SourceFailed
from tests.virtual_time import run_virtually


class Scripted:
    """Answers with what `say` was given, and fails when `fail` was called."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self.patience_s = patience_s
        self.asked_at: list[float] = []
        self._answers: asyncio.Queue[Addresses | None] = asyncio.Queue()

    def say(self, *addresses: str) -> None:
        self._answers.put_nowait(frozenset(addresses))

    def fail(self) -> None:
        self._answers.put_nowait(None)

    async def addresses(self) -> AsyncGenerator[Addresses]:
        self.asked_at.append(asyncio.get_running_loop().time())
        while True:
            answer = await self._answers.get()
            if answer is None:
                raise SourceFailed("no answer")
            yield answer


def virtually(test: Callable[[], Awaitable[Any]]) -> None:
    """Run `test` in virtual time; no task may be left."""

    async def run() -> None:
        await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    run_virtually(run())
