"""The use of cache events and its reasons, as operators see them: dashboard, metrics and log."""

from __future__ import annotations

import logging

import pytest

from policies.nouns import Usage
from policies.sla.parse import parse
from router.fleet.prompt_keys import PromptKeys
from router.operate.dashboard.snapshot import snapshot
from router.start.app import Router
from shards.kv.keys import block_keys
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

SLA = """
classes: {chat: {}}
pools: {gpu: {kind: vllm, at: ["URL"]}}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, drain: 10ms}
"""
IDS = bytes(4 * 70)


def metrics(router: Router) -> list[str]:
    return router.telemetry.exposition()[0].decode().splitlines()


async def test_the_dashboard_metrics_and_log_say_whether_events_are_used_and_why_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(VLLMServer()) as server, Router(parse(SLA.replace("URL", server.url))) as router:
        beliefs = router.gateway.beliefs

        async def shown() -> str:
            (row,) = (await snapshot(router.operations)).backends
            return row.events

        prompt = PromptKeys(block_keys(IDS, 7), "m", token_ids=IDS)
        assert await shown() == ""
        with caplog.at_level(logging.INFO, "pointsman.parity"):
            for _ in range(6):
                beliefs.parity.answered("gpu-0", prompt, None, Usage(99, 1, 0), counts_cached=False)
        why = "it counts 99 tokens in a prompt with 70 tokens by the router's count"
        assert await shown() == why
        assert why in caplog.text
        beliefs.emptied(beliefs.joined("gpu-0", 0), is_empty=True)
        beliefs.parity.block_tokens("gpu-0", 16)
        beliefs.trust("gpu-0", 0, 1.0)
        assert await shown() == f"cache events not used: {why}"
        assert 'pointsman_feed_trust{backend="gpu-0",model="m"} 0.0' in metrics(router)
        assert 'pointsman_events_total{event="parity_broken"} 1.0' in metrics(router)
        beliefs.stored("gpu-0", prompt.keys)
        with caplog.at_level(logging.INFO, "pointsman.parity"):
            for _ in range(20):
                expected = beliefs.parity.expect("gpu-0", prompt, prompt.keys, None)
                beliefs.parity.answered("gpu-0", prompt, expected, Usage(70, 1, 0), counts_cached=False)
        assert await shown() == "cache events used"
        assert "agree with the router's computation" in caplog.text
        assert 'pointsman_feed_trust{backend="gpu-0",model="m"} 1.0' in metrics(router)
        assert 'pointsman_parity_comparisons_total{backend="gpu-0",result="equal",what="blocks"} 20.0' in metrics(
            router
        )
        beliefs.check()
