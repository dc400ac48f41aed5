"""Which lines are let in, and where they may not go."""

from __future__ import annotations

from pathlib import Path

from tests.router.batches.parts import a_batch_router
from tests.router.parts import MODEL, ScriptedBackend

MANY = 100
"""Lines that are more than a window has after some seconds."""


async def test_lines_do_not_go_where_the_window_is_full_though_their_prefix_is_there(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path, ScriptedBackend("b0"), ScriptedBackend("b1")) as router:
        assert router.operations.batches is not None
        room = router.operations.batches.room
        for number in range(MANY):
            await room.enter(f"line-{number}", "acme", MODEL)
            room.placed(f"line-{number}", "b0")
        assert await room.enter("another", "acme", MODEL) == {"b0"}
        room.leave("another")
        for number in range(MANY):
            room.leave(f"line-{number}")
        assert await room.enter("the last", "acme", MODEL) == frozenset()
        room.leave("the last")
