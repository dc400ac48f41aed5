"""Usage of real routers that are killed: its rows equal the decision logs, and no call is lost or counted twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from router.operate.usage.database import UsageDatabase
from router.operate.usage.recorder import JOURNAL_S
from tests.engines.programs import free_ports
from tests.router.operate.usage.parts import HAS_POSTGRES, a_postgres
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

FILE = """
tenants: {{a: {{keys: ["${{env:A}}"]}}, b: {{keys: ["${{env:B}}"], limits: {{budget_per_day: 100 USD}}}}}}
cost: {{currency: USD, uncached: 2.5, cached: 0.3, output: 10.01, image: 0.002, second: 0.000694}}
pools: {{own: {{kind: openai_compatible, at: ["{backend}"], model: m}}}}
usage: {{store: "{store}", journal: "{folder}/journal"}}
server: {{http: "127.0.0.1:{http}", grpc: off, decision_log: "{folder}/decisions-{number}.jsonl"}}
"""
NAMES = ("finished", "cached_tokens", "completion_tokens", "images", "backend_ms", "cost")
ROUTERS, KILLS = 2, 3


class RouterProcess:
    """One router, which may be killed and started again."""

    def __init__(self, number: int, port: int, file: Path) -> None:
        self.number, self.url, self._file = number, f"http://127.0.0.1:{port}", file
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        command = [sys.executable, "-P", "-m", "router", "serve", str(self._file)]
        self._process = subprocess.Popen(
            command, env={**os.environ, "A": "key-a", "B": "key-b"}, stdout=subprocess.DEVNULL
        )

    async def start(self, http: aiohttp.ClientSession) -> None:
        self.begin()
        deadline = time.monotonic() + 60
        while True:
            try:
                async with http.get(f"{self.url}/v1/models", headers={"authorization": "Bearer key-a"}) as reply:
                    if (await reply.json())["data"]:
                        return
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, "the router does not start"
            await asyncio.sleep(0.05)

    def end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


@contextmanager
def a_store(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield str(folder / "usage.sqlite")
    else:
        with a_postgres() as server:
            yield server.url


@pytest.mark.parametrize(
    "kind",
    ["sqlite", pytest.param("postgresql", marks=pytest.mark.skipif(not HAS_POSTGRES, reason="there is no PostgreSQL"))],
)
async def test_rows_equal_the_decision_logs_of_routers_that_are_killed(kind: str, tmp_path: Path) -> None:
    dice, ports = random.Random(3), free_ports(ROUTERS)
    engine = OpenAIServer(cached_tokens=16)
    with a_store(kind, tmp_path) as store:
        async with running(engine), aiohttp.ClientSession() as http:
            routers = []
            for number, port in enumerate(ports):
                file = tmp_path / f"sla-{number}.yaml"
                text = FILE.format(backend=engine.url, store=store, folder=tmp_path, http=port, number=number)
                file.write_text(text)
                routers.append(RouterProcess(number, port, file))
            try:
                await asyncio.gather(*(router.start(http) for router in routers))
                answered: Counter[str] = Counter()
                for kill in range(KILLS):
                    calls = [(dice.choice(routers), dice.choice("ab"), dice.randrange(5, 30)) for _ in range(60)]
                    answered.update(await asyncio.gather(*(call(http, *each) for each in calls)))
                    # then each call has ended in its router, and is in its files
                    await asyncio.sleep(4 * JOURNAL_S)
                    victim = routers[kill % ROUTERS]
                    # the calls that are under way when it dies are in no log, and in no row
                    engine.delay_s = 0.5
                    cut = [asyncio.create_task(call(http, victim, "a", 20)) for _ in range(5)]
                    await asyncio.sleep(0.1)
                    victim.end(signal.SIGKILL)
                    await asyncio.gather(*cut, return_exceptions=True)
                    engine.delay_s = 0.0
                    await victim.start(http)
            finally:
                for router in routers:
                    router.end(signal.SIGTERM)
        assert rows_of(store) == log_of(tmp_path)
        assert {tenant: row[0] for tenant, row in rows_of(store).items()} == answered
        assert not list((tmp_path / "journal").iterdir())


async def call(http: aiohttp.ClientSession, router: RouterProcess, tenant: str, words: int) -> str:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = [{"type": "text", "text": "word " * words}, *([image] if words % 2 else [])]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": words, "user": "u"}
    headers = {"authorization": f"Bearer key-{tenant}"}
    async with http.post(f"{router.url}/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        assert (await reply.json())["usage"]["completion_tokens"]
    return tenant


def rows_of(store: str) -> dict[str, tuple[int, ...]]:
    database = UsageDatabase(store)
    found = {row["tenant"]: tuple(row[name] for name in NAMES) for row in database.sums(["tenant"])}
    database.close()
    return found


def log_of(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for log in folder.glob("decisions-*.jsonl"):
        for record in map(json.loads, log.read_text().splitlines()):
            row = found.setdefault(record["tenant"], [0] * len(NAMES))
            amounts = {**record, "finished": record["outcome"] == "finished"}
            for at, name in enumerate(NAMES):
                row[at] += amounts.get(name, 0)
    return {tenant: tuple(row) for tenant, row in found.items()}
