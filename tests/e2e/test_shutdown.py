"""SIGTERM under load, on real processes: admitted calls are answered, others get an error in their dialect."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policies.sla.parse import parse
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from router.start.app import Router
from tests.e2e.cluster import MODEL
from tests.engines.programs import free_ports
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

CHAT, MESSAGES, GRPC = "chat", "messages", "grpc"
STARTS_WITHIN_S = 90
CHART_SPARES_S = 10
"""Seconds that the chart allows a router beyond `server.drain` before it is killed."""

ROUTER = """
tenants: {{t: {{anonymous: true}}}}
pools: {{own: {{kind: openai_compatible, at: ["{backend}"], model: m}}}}
server: {{http: "127.0.0.1:{http}", grpc: "127.0.0.1:{grpc}", drain: {drain}}}
"""
SHARDS = """
tenants: {{t: {{anonymous: true}}}}
pools: {{own: {{kind: shard, at: ["127.0.0.1:{0}", "127.0.0.1:{1}"], model: bundled}}}}
rules: [{{class: standard, policy: round_robin}}]
queue: {{outage: 1s}}
server: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
"""


@dataclass(eq=False)
class Held(OpenAIServer):
    """Says the first piece of an answer at once and the others when it is let go."""

    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def pieces(self, most: int | None) -> AsyncIterator[str]:
        yield self.text[0]
        await self.let_go.wait()
        yield self.text[1:most]


@dataclass
class Call:
    """One streamed answer as its client saw it. `is_refused`: the port was closed."""

    dialect: str
    began: asyncio.Event = field(default_factory=asyncio.Event)
    status: int | grpc.StatusCode = 0
    finish: str | None = None
    is_closed_well: bool = False
    error: str = ""
    retry_after: str | None = None
    backend: str = ""
    is_refused: bool = False

    @property
    def is_whole(self) -> bool:
        return self.finish is not None and self.is_closed_well and not self.error

    @property
    def is_turned_away(self) -> bool:
        """Whether it got a retryable error before anything else."""
        asked_again = self.status in (503, 529, grpc.StatusCode.UNAVAILABLE) and bool(self.retry_after)
        return not self.began.is_set() and (self.is_refused or asked_again)

    @property
    def is_cut_with_error(self) -> bool:
        return self.began.is_set() and not self.is_whole and "before this answer ended" in self.error


@dataclass(frozen=True)
class Clients:
    """Clients of each dialect; every call has a connection of its own."""

    http_url: str
    grpc_address: str
    model: str = "m"
    most: int = 16

    async def call(self, dialect: str, record: Call | None = None) -> Call:
        record = record or Call(dialect)
        await {CHAT: self._chat, MESSAGES: self._messages, GRPC: self._generate}[dialect](record)
        return record

    @asynccontextmanager
    async def under_way(self, count: int) -> AsyncIterator[list[asyncio.Task[Call]]]:
        """So many calls, the dialects in turn, each with its first piece here."""
        calls = [Call((CHAT, MESSAGES, GRPC)[number % 3]) for number in range(count)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.call(call.dialect, call)) for call in calls]
            try:
                async with asyncio.timeout(20):
                    await asyncio.gather(*(call.began.wait() for call in calls))
            except TimeoutError as error:
                raise AssertionError(f"not all of them begin: {calls}") from error
            yield tasks

    async def keep_calling(self, until: Callable[[], bool]) -> list[Call]:
        """Start one call after the other until `until`, without waiting for answers; the ends of all of them."""
        tasks: list[asyncio.Task[Call]] = []
        while not until():
            tasks.append(asyncio.create_task(self.call((CHAT, MESSAGES, GRPC)[len(tasks) % 3])))
            await asyncio.sleep(0.03)
        return await asyncio.gather(*tasks)

    async def _chat(self, record: Call) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "max_tokens": self.most}
        async for line in self._lines("/v1/chat/completions", body, record):
            if line == "[DONE]":
                record.is_closed_well = True
                continue
            event = json.loads(line)
            record.error = record.error or event.get("error", {}).get("message", "")
            for choice in event.get("choices", ()):
                record.finish = record.finish or choice["finish_reason"]
                if choice["delta"].get("content"):
                    record.began.set()

    async def _messages(self, record: Call) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "max_tokens": self.most}
        async for line in self._lines("/v1/messages", body, record):
            event = json.loads(line)
            record.error = record.error or event.get("error", {}).get("message", "")
            record.finish = record.finish or event.get("delta", {}).get("stop_reason")
            record.is_closed_well |= event["type"] == "message_stop"
            if event["type"] == "content_block_delta":
                record.began.set()

    async def _lines(self, path: str, body: dict[str, Any], record: Call) -> AsyncIterator[str]:
        sent = {"model": self.model, "stream": True, **body}
        try:
            async with aiohttp.ClientSession() as http, http.post(self.http_url + path, json=sent) as reply:
                record.status, record.retry_after = reply.status, reply.headers.get("Retry-After")
                record.backend = reply.headers.get("X-Pointsman-Backend", "")
                if reply.status != 200:
                    record.error = (await reply.json())["error"]["message"]
                    return
                async for line in reply.content:
                    if line.startswith(b"data: "):
                        yield line[6:].decode().strip()
        except aiohttp.ClientConnectionError:
            # also if the listener closes with a connection that was not read yet
            record.is_refused = record.status == 0

    async def _generate(self, record: Call) -> None:
        messages = pb.Messages(messages=[pb.Message(role="user", content="Hello")])
        asked = pb.GenerateRequest(model=self.model, chat=messages)
        asked.sampling.max_tokens, asked.sampling.ignore_eos = self.most, True
        async with grpc.aio.insecure_channel(self.grpc_address) as channel:
            stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
            try:
                async for reply in stub.Generate(asked):
                    record.backend = reply.placement.backend or record.backend
                    record.finish = reply.finish_reason or record.finish
                    if reply.text:
                        record.began.set()
                record.is_closed_well = True
            except grpc.aio.AioRpcError as error:
                record.status, record.error = error.code(), error.details() or ""
                trailing = dict(error.trailing_metadata() or ())
                record.retry_after = trailing.get("retry-after")
                record.is_refused = "pointsman-code" not in trailing


@contextmanager
def processes(*lines: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`python -m ...` for each line, started side by side and gone in the end."""
    root = Path(__file__).parents[2]
    some = [subprocess.Popen([sys.executable, "-m", *line], stderr=subprocess.PIPE, cwd=root) for line in lines]
    try:
        yield some
    finally:
        for process in some:
            process.kill()
            process.communicate()


async def ended(process: subprocess.Popen[bytes], within_s: float) -> int:
    """The exit code, which must come in time."""
    return await asyncio.to_thread(process.wait, timeout=within_s)


@dataclass
class Served:
    """Routers as processes, in front of one backend that holds its answers."""

    process: subprocess.Popen[bytes]
    backend: Held
    clients: Clients

    async def readiness(self) -> int | None:
        """The status of /readyz; None if the port is closed."""
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{self.clients.http_url}/readyz") as reply:
                return reply.status
        except aiohttp.ClientConnectionError:
            return None

    async def until_ready(self) -> None:
        async with asyncio.timeout(STARTS_WITHIN_S):
            while await self.readiness() != 200:
                assert self.process.poll() is None, "it does not start"
                await asyncio.sleep(0.05)


@asynccontextmanager
async def served(folder: Path, drain: str, *options: str) -> AsyncIterator[Served]:
    http, grpc_port = free_ports(2)
    async with running(Held()) as backend:
        file = folder / "sla.yaml"
        text = ROUTER.format(backend=backend.url, http=http, grpc=grpc_port, drain=drain)
        await asyncio.to_thread(file.write_text, text)
        with processes(["router", "serve", str(file), *options]) as (process,):
            running_router = Served(process, backend, Clients(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc_port}"))
            await running_router.until_ready()
            yield running_router
            backend.let_go.set()


async def test_a_router_answers_whom_it_let_in_and_sends_the_others_away_in_their_dialect(tmp_path: Path) -> None:
    async with served(tmp_path, "20s") as router:
        clients = router.clients
        async with clients.under_way(6) as calls, grpc.aio.insecure_channel(clients.grpc_address) as channel:
            arriving = asyncio.create_task(clients.keep_calling(lambda: router.process.poll() is not None))
            await asyncio.sleep(0.2)  # some of them are let in before the signal
            router.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (status := await router.readiness()) == 200:
                    pass
            assert status == 503, "it stopped listening before /readyz reported that it is not ready"
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
            late = [await clients.call(dialect) for dialect in (CHAT, MESSAGES, GRPC)]
            assert [call.status for call in late] == [503, 529, grpc.StatusCode.UNAVAILABLE]
            assert all(call.is_turned_away and "shutting down" in call.error for call in late), late
            assert not any(call.done() for call in calls)
            router.backend.let_go.set()
        assert all(call.result().is_whole for call in calls), calls
        assert await ended(router.process, 10) == 0
        others = await arriving
        assert [call for call in others if not (call.is_whole or call.is_turned_away)] == []
        assert any(call.is_whole for call in others)
        assert await router.readiness() is None


async def test_a_call_that_outlasts_the_grace_of_several_processes_ends_with_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, "500ms", "--processes", "2") as router, router.clients.under_way(6) as calls:
        router.process.send_signal(signal.SIGTERM)
        records = await asyncio.gather(*calls)
        assert [call for call in records if not call.is_cut_with_error] == []
        assert {call.status for call in records} == {200, grpc.StatusCode.UNAVAILABLE}
        assert await ended(router.process, 0.5 + CHART_SPARES_S) == 0
        assert router.backend.open_requests == 0


async def test_a_shard_that_ends_loses_nothing_and_one_in_a_hurry_reports_cut_requests() -> None:
    ports = free_ports(2)
    patient, hurried = [
        ["shards", "--listen", f"127.0.0.1:{port}", "--name", f"own-{number}", "--threads", "1", "--grace-s", grace]
        for number, (port, grace) in enumerate(zip(ports, ("20", "0.2"), strict=True))
    ]
    with processes(patient, hurried) as (first, second):
        await asyncio.gather(*map(until_listening, ports))
        async with Router(parse(SHARDS.format(*ports))) as router:
            # ready is a pool with one backend, and each of both is to have some of the calls
            async with asyncio.timeout(20):
                while router.gateway.cluster.unreached():
                    await router.gateway.cluster.health_changed()
            clients = Clients(router.http_url, str(router.grpc_address), MODEL, most=80)
            async with clients.under_way(18) as calls:
                first.send_signal(signal.SIGTERM)
                others = await clients.keep_calling(lambda: first.poll() is not None)
            records = [call.result() for call in calls]
            assert {call.backend for call in records} == {"own-0", "own-1"}
            assert [call for call in (*records, *others) if not call.is_whole] == []
            assert await ended(first, 20) == 0
            clients = Clients(router.http_url, str(router.grpc_address), MODEL, most=800)
            async with clients.under_way(6) as calls:
                second.send_signal(signal.SIGTERM)
                assert await ended(second, 10) == 0
            cut = [call.result() for call in calls]
            # an answer of Anthropic's API ends where the model ends it, which may be in time
            assert [
                call for call in cut if not (call.is_whole or "the backend that had the request failed" in call.error)
            ] == []
            assert {call.dialect for call in cut if call.error} >= {CHAT, GRPC}
            late = [await clients.call(dialect) for dialect in (CHAT, MESSAGES, GRPC)]
            assert all(call.error for call in late), late


async def until_listening(port: int) -> None:
    async with asyncio.timeout(STARTS_WITHIN_S):
        while True:
            with suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)
