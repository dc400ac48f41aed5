"""Which lines are let in, and where they may not go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policies.nouns import Decision
from policies.rules import Rule
from router.batches.line_places import LinePlaces
from router.batches.room import LOOK_S
from tests.policies.builders import a_request
from tests.router.batches.parts import a_batch_config, a_batch_router, a_line, begun, ended, openai_client
from tests.router.parts import MODEL, ScriptedBackend, a_router, an_answer, series

MANY = 100
"""Lines that are more than a window has after some seconds."""

LINES = 40


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


async def test_room_is_counted_only_where_rules_let_a_line_go(tmp_path: Path) -> None:
    own, other = ScriptedBackend("b0"), ScriptedBackend("b1", pool="other", address="b1.test:8000")
    async with a_router(own, other, config=a_batch_config(tmp_path)) as router:
        assert router.operations.batches is not None
        room, only_own = router.operations.batches.room, LinePlaces(MODEL, ("own",))
        for number in range(2):
            assert await room.enter(f"line-{number}", "acme", MODEL, only_own) == frozenset()
            room.placed(f"line-{number}", "b0")
        waiting = asyncio.create_task(room.enter("another", "acme", MODEL, only_own))
        # a line that may go anywhere is not held up by the one before it
        assert await room.enter("elsewhere", "acme", MODEL) == {"b0"}
        room.placed("elsewhere", "b1")
        assert not waiting.done()
        room.leave("line-0")
        assert await waiting == frozenset()
        for line in ("line-1", "elsewhere", "another"):
            room.leave(line)


async def test_lines_are_not_refused_for_room_that_their_rule_does_not_allow(tmp_path: Path) -> None:
    free = asyncio.Event()
    own = ScriptedBackend("b0", scripts=[[free, *an_answer("yes")] for _ in range(LINES)])
    other = ScriptedBackend("b1", pool="other", address="b1.test:8000")
    config = a_batch_config(tmp_path)
    pools = {**config.pools, "other": replace(config.pools["own"], name="other")}
    config = replace(config, rules=(Rule("chat", pools=("own",)),), pools=pools)
    async with a_router(own, other, config=config) as router, openai_client(router) as client:
        assert router.operations.batches is not None
        room = router.operations.batches.room
        batch = await begun(client, [a_line(number) for number in range(LINES)])
        async with asyncio.timeout(30):
            while room.inside + room.waiting < LINES:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        free.set()
        done = await ended(client, batch)
        assert done.request_counts is not None
        assert done.request_counts.completed == LINES
        assert not other.prompts
        # those that were let in before the first of them was refused
        retries = series(router.telemetry.registry, "batch_retries_total")
        assert sum(retries.values()) <= 4, retries


async def test_beside_other_requests_a_line_waits_until_the_prompt_of_the_one_before_is_computed(
    tmp_path: Path,
) -> None:
    now = 1000.0
    config = a_batch_config(tmp_path, slowdown=0.1)
    async with (
        a_router(ScriptedBackend("b0"), config=config, clock=lambda: now) as router,
        openai_client(router) as client,
    ):
        assert router.operations.batches is not None
        room = router.operations.batches.room
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        router.gateway.later.flush()
        await room.enter("line", "acme", MODEL)
        room.placed("line", "b0")
        room.decided(a_request(id="line"), Decision("b0", "default", predicted_ttft_s=0.05), now)
        waiting = asyncio.create_task(room.enter("another", "acme", MODEL))
        await asyncio.sleep(3 * LOOK_S)
        assert not waiting.done()
        now += 0.06
        async with asyncio.timeout(5):
            await waiting
        room.leave("line")
        room.leave("another")


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"model": "none-has-it"}, (1, 1)),
        ({"model": ["m"]}, (1, 1)),
        # that is the only one that is served
        ({"model": None}, (2, 0)),
        ({"model": ""}, (2, 0)),
    ],
)
async def test_a_line_of_no_model_is_answered_though_backends_of_other_models_are_still_to_come(
    fields: dict[str, Any], counts: tuple[int, int], tmp_path: Path
) -> None:
    config = a_batch_config(tmp_path)
    later = replace(config.pools["own"], name="later", model="later", models={}, register=True)
    config = replace(config, pools={**config.pools, "later": later})
    async with a_router(ScriptedBackend("b0"), config=config) as router, openai_client(router) as client:
        assert router.gateway.models.awaits_backends(router.gateway.config)
        done = await ended(client, await begun(client, [a_line(0, **fields), a_line(1)]))
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == counts


async def test_few_lines_begin_in_one_turn_of_the_event_loop(tmp_path: Path) -> None:
    backends = [ScriptedBackend(f"b{number}", address=f"b{number}.test:8000") for number in range(8)]
    async with a_batch_router(tmp_path, *backends) as router:
        assert router.operations.batches is not None
        room, inside = router.operations.batches.room, [0]
        waiting = [asyncio.create_task(room.enter(f"line-{number}", "acme", MODEL)) for number in range(16)]
        while not all(line.done() for line in waiting):
            await asyncio.sleep(0)
            inside.append(room.inside)
        assert max(after - before for before, after in pairwise(inside)) == 4
        for number in range(16):
            room.leave(f"line-{number}")


async def test_beside_other_requests_lines_begin_one_by_one_in_their_share_of_the_event_loop(tmp_path: Path) -> None:
    backends = [ScriptedBackend(f"b{number}", address=f"b{number}.test:8000") for number in range(8)]
    async with a_batch_router(tmp_path, *backends) as router, openai_client(router) as client:
        assert router.operations.batches is not None
        room, clock = router.operations.batches.room, router.gateway.clock
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        router.gateway.later.flush()
        began_at = list[float]()

        async def line(number: int) -> None:
            await room.enter(f"line-{number}", "acme", MODEL)
            began_at.append(clock())
            assert room.share.wait_s() > 0.0

        await asyncio.gather(*map(line, range(4)))
        # none of them has told yet how long it takes, so all count as the first guess
        assert all(after - before >= 0.007 for before, after in pairwise(began_at))
        for number in range(4):
            room.leave(f"line-{number}")
