"""`pointsman drain` at a running router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from typer.testing import CliRunner

from policies.errors import ExpectedError
from router.operate.admin_port import AdminPort
from router.start.cli import app
from router.start.commands.drain import wait
from tests.router.operate.dashboard.scene import PacedBackend
from tests.router.operate.dashboard.test_routes import an_operator


async def drain(*arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["drain", *arguments])
    if isinstance(done.exception, ExpectedError):
        return 1, str(done.exception)
    return done.exit_code, done.output


async def test_a_backend_is_drained_and_used_again() -> None:
    async with an_operator(PacedBackend("own-0"), PacedBackend("own-1")) as operator:
        at = ("--admin", str(operator.router.admin))
        drained = "own-0 gets no new requests\nno request is running there\n"
        assert await drain("own-0", "--wait", *at) == (0, drained)
        for _ in range(3):
            await operator.ask()
        assert {row.chosen for row in (await operator.snapshot()).decisions} == {"own-1"}
        assert await drain("own-0", "--undo", *at) == (0, "own-0 is in use again\n")
        assert [row.draining for row in (await operator.snapshot()).backends] == [False, False]


async def test_mistakes_are_told() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        at = ("--admin", str(operator.router.admin))
        code, told = await drain("own-7", *at)
        assert (code, "own-0" in told) == (1, True)
        code, told = await drain("own-0", "--undo", "--wait", *at)
        assert (code, "leave out --undo" in told) == (2, True)
        assert not (await operator.snapshot()).backends[0].draining


class Emptying(AdminPort):
    """A port at which the requests of a server with two ranks end one after the other."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", None)
        self.running: Iterator[int] = iter((2, 2, 1, 0))

    def call(self, *_: object, **__: object) -> bytes:
        rows = [
            {"name": "own-0", "server": "own", "in_flight": 0},
            {"name": "own-0@1", "server": "own", "in_flight": next(self.running)},
            {"name": "spot-0", "server": "spot-0", "in_flight": 9},
        ]
        return json.dumps({"backends": rows}).encode()


def test_requests_at_all_ranks_of_a_server_are_awaited() -> None:
    naps: list[float] = []
    wait(Emptying(), ["own-0"], naps.append)
    assert len(naps) == 3
