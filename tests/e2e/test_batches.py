"""Batches of real routers that share a folder or a bucket and are killed: each line is answered exactly once in the
results, and progress never steps back."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import anthropic
import openai

from tests.engines.programs import free_ports
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.s3 import an_s3_service
from tests.standins.standin import running

FILE = """
classes: {{chat: {{}}, batch: {{deadline: 24h}}}}
tenants: {{a: {{keys: ["${{env:A}}"]}}, b: {{keys: ["${{env:B}}"]}}}}
pools: {{own: {{kind: openai_compatible, at: ["{backend}"], model: m}}}}
batches: {batches}
server: {{http: "127.0.0.1:{http}", grpc: off}}
"""
SECRETS = {"A": "key-a", "B": "key-b", "ACCESS": "an-access-key", "SECRET": "a-secret-key"}
LINES = 300
SERVE = """
from router.batches.store import s3, s3_claims
from router.start.cli import main
s3_claims.LEASE_S, s3.S3BatchStore.look_s = 6.0, 1.0
main()
"""
"""Routers of which a lease in a bucket, for the end of which a test waits, is a fifth of the usual 30 s and is renewed
five times as often."""


class RouterProcess:
    def __init__(self, port: int, folder: Path, backend: str, *, batches: str | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._file = folder / f"sla-{port}.yaml"
        batches = batches or f'{{store: "{folder}/batches"}}'
        self._file.write_text(FILE.format(backend=backend, batches=batches, http=port))
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: dict[str, openai.AsyncOpenAI] = {}

    def begin(self) -> None:
        command = [sys.executable, "-P", "-c", SERVE, "serve", str(self._file)]
        self._process = subprocess.Popen(command, env={**os.environ, **SECRETS})

    async def start(self) -> None:
        self.begin()
        deadline = time.monotonic() + 60
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/readyz") as reply:
                        if reply.status == 200:
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

    def client(self, key: str = "key-a") -> openai.AsyncOpenAI:
        if key not in self._clients:
            self._clients[key] = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=5)
        return self._clients[key]

    async def stop(self) -> None:
        self.end(signal.SIGTERM)
        for client in self._clients.values():
            await client.close()


def lines(count: int = LINES) -> bytes:
    def line(number: int) -> dict[str, object]:
        body = {"model": "m", "messages": [{"role": "user", "content": f"{number % 5} say {number}"}], "max_tokens": 4}
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    return "\n".join(json.dumps(line(number)) for number in range(count)).encode()


async def begun(client: openai.AsyncOpenAI, content: bytes) -> str:
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


Test = Callable[[openai.types.Batch], bool]


class Progress:
    """Of one batch, as clients of any of its routers see it."""

    def __init__(self, made: str, key: str = "key-a") -> None:
        self._made, self._key, self._completed = made, key, 0

    async def until(self, is_so: Test, *routers: RouterProcess) -> openai.types.Batch:
        """Ask `routers` in turn until one shows that it `is_so`; what they show never steps back."""
        deadline = time.monotonic() + 120
        for router in itertools.cycle(routers):
            batch = await router.client(self._key).batches.retrieve(self._made)
            assert batch.request_counts is not None
            assert batch.request_counts.completed >= self._completed, "progress stepped back"
            self._completed = batch.request_counts.completed
            if is_so(batch):
                return batch
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.05)
        raise AssertionError("no router was named")


def is_completed(batch: openai.types.Batch) -> bool:
    return batch.status == "completed"


def has_passed(share: float) -> Test:
    return lambda batch: batch.request_counts is not None and batch.request_counts.completed > share * LINES


async def answers(client: openai.AsyncOpenAI, batch: openai.types.Batch) -> Counter[str]:
    assert batch.output_file_id is not None
    content = await client.files.content(batch.output_file_id)
    return Counter(json.loads(line)["custom_id"] for line in content.text.splitlines())


ALL = Counter(f"line-{number}" for number in range(LINES))


async def test_a_router_that_is_killed_twice_goes_on_where_it_was(tmp_path: Path) -> None:
    async with running(OpenAIServer(model="m", delay_s=0.02)) as engine:
        router = RouterProcess(free_ports(1)[0], tmp_path, engine.url)
        try:
            await router.start()
            progress = Progress(await begun(router.client(), lines()))
            for share in (0.1, 0.5):
                await progress.until(has_passed(share), router)
                router.end(signal.SIGKILL)
                await router.start()
            batch = await progress.until(is_completed, router)
            assert await answers(router.client(), batch) == ALL
            assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
            # what had been answered before was not asked again, but for what was on its way
            assert len(engine.received) < LINES + 2 * 60
        finally:
            await router.stop()


async def test_another_router_takes_over_the_batch_of_one_that_is_killed(tmp_path: Path) -> None:
    async with running(OpenAIServer(model="m", delay_s=0.02)) as engine:
        first, second = (RouterProcess(port, tmp_path, engine.url) for port in free_ports(2))
        try:
            await asyncio.gather(first.start(), second.start())
            progress = Progress(await begun(first.client(), lines()))
            await progress.until(has_passed(0.25), second, first)
            first.end(signal.SIGKILL)
            batch = await progress.until(is_completed, second)
            assert await answers(second.client(), batch) == ALL
        finally:
            await first.stop()
            await second.stop()


async def test_another_router_takes_over_a_batch_in_a_bucket_when_the_lease_of_one_that_is_killed_has_ended(
    tmp_path: Path,
) -> None:
    with an_s3_service() as service:
        keys = 'access_key: "${env:ACCESS}", secret_key: "${env:SECRET}"'
        s3 = f'{{endpoint: "{service.url}", region: us-east-1, {keys}}}'
        in_bucket = f'{{store: "s3://batches/of/routers", s3: {s3}}}'
        async with running(OpenAIServer(model="m", delay_s=0.02)) as engine:
            first, second = (RouterProcess(port, tmp_path, engine.url, batches=in_bucket) for port in free_ports(2))
            try:
                await asyncio.gather(first.start(), second.start())
                progress = Progress(await begun(first.client(), lines()))
                await progress.until(has_passed(0.25), second, first)
                first.end(signal.SIGKILL)
                # the one that was killed is no longer the owner either
                await first.start()
                batch = await progress.until(is_completed, second, first)
                assert await answers(second.client(), batch) == ALL
                assert len(engine.received) < LINES + 60
            finally:
                await first.stop()
                await second.stop()


async def test_two_routers_never_run_one_batch_at_a_time(tmp_path: Path) -> None:
    async with running(OpenAIServer(model="m")) as engine:
        routers = [RouterProcess(port, tmp_path, engine.url) for port in free_ports(2)]
        try:
            await asyncio.gather(*(router.start() for router in routers))
            made = await begun(routers[0].client(), lines())
            other = await begun(routers[1].client("key-b"), lines())
            batch = await Progress(made).until(is_completed, *routers)
            theirs = await Progress(other, "key-b").until(is_completed, *routers)
            assert await answers(routers[1].client(), batch) == ALL
            assert await answers(routers[0].client("key-b"), theirs) == ALL
            assert len(engine.received) == 2 * LINES
        finally:
            for router in routers:
                await router.stop()


async def test_a_router_that_stops_leaves_its_message_batch_to_the_next(tmp_path: Path) -> None:
    async with running(OpenAIServer(model="m", delay_s=0.05)) as engine, AsyncExitStack() as clients:
        router = RouterProcess(free_ports(1)[0], tmp_path, engine.url)
        try:
            await router.start()
            params = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            asked = [{"custom_id": f"m{number}", "params": params} for number in range(100)]
            client = await clients.enter_async_context(anthropic.AsyncAnthropic(base_url=router.url, api_key="key-a"))
            batch = await client.messages.batches.create(requests=asked)  # type: ignore[arg-type]
            await asyncio.sleep(0.5)
            router.end(signal.SIGTERM)
            await router.start()
            deadline = time.monotonic() + 60
            while (batch := await client.messages.batches.retrieve(batch.id)).processing_status != "ended":
                assert time.monotonic() < deadline, batch
                await asyncio.sleep(0.05)
            found = Counter([each.custom_id async for each in await client.messages.batches.results(batch.id)])
            assert found == Counter(each["custom_id"] for each in asked)
            assert batch.request_counts.succeeded == 100
        finally:
            await router.stop()
