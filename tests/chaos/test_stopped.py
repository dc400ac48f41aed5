"""A backend process that is stopped (SIGSTOP) keeps no request that it has not begun to answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from policies.sla.parse import parse
from router.start.app import Router
from tests.engines.programs import ROOT, Program, free_ports

SLA = """
classes: {{chat: {{}}}}
pools:
  own:
    kind: openai_compatible
    model: m
    at: {at}
    health:
      {{probe_every: 200ms, probe_timeout: 1s, suspect_after: 400ms,
        first_byte: 1h, first_token: 1h, between_tokens: 1h}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
# Probes alone find a stopped process: without them a request would wait there for an hour.


def a_server(name: str, folder: Path) -> tuple[Program, str]:
    """A process that speaks OpenAI's API, not started."""
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "tests.standins.openai_compatible", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    return Program(name, command, folder, f"{url}/v1/models", environment={"PYTHONPATH": str(ROOT)}), url


@asynccontextmanager
async def two_servers(folder: Path) -> AsyncIterator[tuple[Router, list[Program]]]:
    """A router in front of two processes."""
    programs = [a_server(f"server-{at}", folder) for at in range(2)]
    try:
        for program, _ in programs:
            program.start()
        for program, _ in programs:
            await asyncio.to_thread(program.wait_until_ready, 60)
        async with Router(parse(SLA.format(at=[url for _, url in programs]))) as router:
            assert await router.wait_until_reached(20)
            yield router, [program for program, _ in programs]
    finally:
        for program, _ in programs:
            program.kill()


async def test_requests_at_a_stopped_backend_go_to_the_other_one_and_it_is_used_again_when_it_goes_on(
    tmp_path: Path,
) -> None:
    async with two_servers(tmp_path) as (router, (stopped, _)), aiohttp.ClientSession() as http:

        async def ask(number: int) -> str:
            body = {"model": "m", "messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 4}
            async with http.post(f"{router.http_url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
                return answer.headers["x-pointsman-backend"]

        async def in_use() -> set[str]:
            return set(await asyncio.gather(*map(ask, range(8))))

        async with asyncio.timeout(20):
            while len(await in_use()) < 2:
                pass
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            assert set(await asyncio.gather(*map(ask, range(16)))) == {"own-1"}
            assert {await ask(number) for number in range(8)} == {"own-1"}
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while "own-0" not in await in_use():
                pass
        router.check()
