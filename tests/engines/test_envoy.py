"""Envoy, which asks a router where requests go, in front of a real vLLM: the file is that of examples/gateway."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled.documents import prompt
from tests.engines.programs import ROOT, an_envoy, free_ports
from tests.engines.routed import KEY, Client, a_document
from tests.router.parts import board_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["{key}"]}}}}
pools:
  engines: {{kind: vllm, at: ["{url}"], model: pointsman-reader}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off, picker: "127.0.0.1:0"}}
"""


async def test_a_conversation_passes_envoy_and_is_counted(engines: Engines, tmp_path: Path) -> None:
    (vllm,) = engines.vllm("a")
    key = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    async with Router(parse(SLA.format(key=key, url=vllm.url))) as router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(timeout_s=20)
        assert router.picker is not None
        (port,) = free_ports(1)
        config = (ROOT / "examples/gateway/envoy.yaml").read_text()
        # both engines of the example are the same one here
        for theirs, ours in {8000: port, 8101: vllm.port, 8102: vllm.port, 9002: router.picker.port}.items():
            config = config.replace(f"port_value: {theirs}", f"port_value: {ours}")
        envoy = an_envoy("envoy", tmp_path, config)
        envoy.start()
        try:
            envoy.wait_until_ready(30)
            client = Client(http, f"http://127.0.0.1:{port}")
            about = a_document(20)
            question = about.questions[0]
            for stream in (False, True):
                answer = await client.chat(prompt(about.text, question.question), stream=stream)
                assert question.needle in answer.text
                assert answer.backend
            assert await router.gateway.doors.emptied(5)
        finally:
            envoy.stop()
        spent = board_of(router).of_tenant("acme", router.gateway.clock())
        assert spent.completion_tokens > 0
        router.check()
