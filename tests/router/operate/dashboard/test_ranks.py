"""Data-parallel ranks as operators see them, and change them."""

from __future__ import annotations

import asyncio
import urllib.parse

import aiohttp

from policies.sla.parse import parse
from router.start.app import Router
from tests.router.operate.dashboard.test_routes import Operator
from tests.router.operate.dashboard.test_top import one_frame
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

SLA = """
classes: {chat: {}}
pools: {gpu: {kind: vllm, at: ["ONE", "TWO"], health: {probe_every: 50ms}}}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", admin: "127.0.0.1:0", grpc: off, drain: 1s}
"""


async def test_ranks_stand_behind_their_server_and_are_drained_with_it() -> None:
    async with running(VLLMServer(ranks=2)) as double, running(VLLMServer(ranks=1)) as single:
        config = parse(SLA.replace("ONE", double.url).replace("TWO", single.url))
        async with Router(config) as router, aiohttp.ClientSession() as http:
            while len(router.gateway.cluster.names()) < 3:
                await router.gateway.cluster.health_changed()
            operator = Operator(router, http)
            path = f"/admin/backends/{urllib.parse.quote('gpu-0/1', safe='')}"
            status, body = await operator.call("PATCH", path, {"draining": True})
            assert (status, body) == (200, {"backend": "gpu-0/1", "draining": True, "weight": 1.0})
            backends = (await operator.snapshot()).backends
            assert [(row.name, row.server, row.rank, row.ranks, row.draining) for row in backends] == [
                ("gpu-0", "gpu-0", 0, 2, True),
                ("gpu-0/1", "gpu-0", 1, 2, True),
                ("gpu-1", "gpu-1", 0, 1, False),
            ]
            frame = (await asyncio.to_thread(one_frame, router.admin)).output
    lines = [line for line in frame.splitlines() if line.startswith("gpu-")]
    assert [line.split("  ")[0] for line in lines] == ["gpu-0 rank 0", "gpu-0 rank 1", "gpu-1"]
