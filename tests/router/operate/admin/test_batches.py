"""Operators see the batches of all tenants, and end them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp

from router.operate.dashboard.snapshot import snapshot
from tests.router.batches.parts import OTHER_KEY, a_batch_config, a_line, begun, ended, openai_client, until
from tests.router.parts import ScriptedBackend, a_router, an_answer


async def test_batches_of_all_tenants_are_listed_and_ended(tmp_path: Path) -> None:
    config = a_batch_config(tmp_path)
    config = replace(config, server=replace(config.server, admin="127.0.0.1:0"))
    backend = ScriptedBackend(scripts=[an_answer("first"), [asyncio.Event()], [asyncio.Event()]])
    async with (
        a_router(backend, config=config) as router,
        openai_client(router) as client,
        openai_client(router, OTHER_KEY) as other,
        aiohttp.ClientSession(f"http://{router.admin}") as admin,
    ):
        first = await begun(client, [a_line(0), a_line(1)])
        await until(client, first, lambda now: (now.request_counts and now.request_counts.completed) == 1)
        second = await begun(other, [a_line(0)])
        await until(other, second, lambda now: now.status == "in_progress")
        async with admin.get("/admin/batches") as reply:
            found = (await reply.json())["batches"]
        assert [(each["tenant"], each["id"]) for each in found] == [("other", second.id), ("acme", first.id)]
        shown = {row.tenant: row for row in (await snapshot(router.operations)).batches}
        assert (shown["acme"].succeeded, shown["acme"].total, shown["acme"].status) == (1, 2, "in progress")
        for batch in (first, second):
            async with admin.post(f"/admin/batches/{batch.id}/cancel") as reply:
                assert (await reply.json())["status"] == "cancelling"
        assert (await ended(client, first)).status == "cancelled"
        assert (await ended(other, second)).status == "cancelled"
        async with admin.post(f"/admin/batches/{first.id}/cancel") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "batch_not_found")


async def test_a_router_without_batches_says_so() -> None:
    config = a_batch_config(Path("unused"))
    config = replace(config, batches=None, server=replace(config.server, admin="127.0.0.1:0"))
    async with a_router(config=config) as router, aiohttp.ClientSession(f"http://{router.admin}") as admin:
        async with admin.get("/admin/batches") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "batches_off")
        assert (await snapshot(router.operations)).batches == ()
