"""An engine that has answered other routers: what these have sent is in its cache, and in its history of events."""

from __future__ import annotations

import struct

import aiohttp
import pytest

from policies.prefix.parity import Trust
from policies.sla.parse import parse
from router.start.app import Router
from tests.golden.event_encoders import Put, vllm_0_26
from tests.router.fleet.feeds.engine import Published
from tests.router.fleet.feeds.publisher import a_publisher, subscribed
from tests.router.fleet.feeds.waiting import until
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

BLOCK, BLOCKS = 16, 12
SLA = """
classes: {chat: {}}
tenants: {acme: {keys: ["sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"]}}
pools: {gpu: {kind: vllm, at: ["URL"], options: {cache_salt: SALTED, events: "EVENTS", replay: "REPLAY"}}}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, drain: 10ms}
"""


def prompt(number: int) -> list[int]:
    """One that no other number begins like."""
    return [number % 256, number // 256] + [at % 256 for at in range(BLOCK * BLOCKS - 1)]


def stored(seq: int, number: int, salt: str | None) -> Published:
    """The engine has computed a prompt, and tells of its blocks."""
    hashes = tuple(struct.pack(">IIB", number, at, bool(salt)) for at in range(BLOCKS))
    put = Put(hashes, None, tuple(prompt(number)[: BLOCK * BLOCKS]), BLOCK, salt=salt)
    return Published(seq, vllm_0_26(1_700_000_000.0 + seq, [put], 0), 0.0, frozenset())


@pytest.mark.parametrize("is_salted", [True, False])
async def test_a_router_that_starts_in_front_of_it_proves_its_events_with_salts_and_without(is_salted: bool) -> None:
    async with a_publisher() as publisher, running(VLLMServer()) as server:
        # the history: the same tenant's prompts, as a router sends them that salts, and as one that does not
        history = [(number, salt) for number in range(20) for salt in ("acme", None)]
        publisher.buffer += [stored(seq, number, salt) for seq, (number, salt) in enumerate(history)]
        words = {"URL": server.url, "EVENTS": publisher.events, "REPLAY": publisher.replay}
        sla = SLA.replace("SALTED", "true" if is_salted else "false")
        for word, value in words.items():
            sla = sla.replace(word, value)
        async with Router(parse(sla)) as router, aiohttp.ClientSession() as http:
            beliefs = router.gateway.beliefs
            await subscribed(publisher)
            await until(lambda: beliefs.is_live("gpu-0"))
            for number in range(100, 108):
                body = {"model": "m", "prompt": prompt(number), "max_tokens": 4}
                headers = {"authorization": "Bearer a"}
                async with http.post(f"{router.http_url}/v1/completions", json=body, headers=headers) as reply:
                    assert reply.status == 200, await reply.text()
                await publisher.send(stored(len(publisher.buffer), number, "acme" if is_salted else None))
            reports_of = beliefs.parity.reports_of
            await until(lambda: any(report.trust is not Trust.UNPROVEN for report in reports_of("gpu-0")))
            assert [report.trust for report in reports_of("gpu-0")] == [Trust.PROVEN]
            beliefs.check()
