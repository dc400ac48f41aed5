"""Thousands of long streams for a long time: memory, descriptors and tasks of a router must stay level.

    python benchmarks/streams_soak.py [--streams 2000] [--minutes 30]

The engine sends an event a second to each stream. An answer has 20 to 400 events; as one ends another begins, and one
in 20 clients leaves early. Engine, router and clients are processes of their own. A row for each 30th of the time:
resident memory, descriptors and asyncio tasks of the router, streams under way, streams ended. Exits with 1 if a stream
lost an event, if a gauge is not zero at the end, or if memory grew by more than 5 % from the second third to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import uvloop
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policies.sla.parse import parse
from router.start.app import Router
from tests.engines.programs import free_ports

SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{anonymous: true}}}}
pools:
  engines: {{kind: openai_compatible, at: "http://127.0.0.1:{engine}", model: demo, options: {{max_requests: 5000}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:{http}", grpc: off, metrics: open, strangers: off, max_concurrent: 10000}}
"""
EVENT_S = 1.0


async def engine(port: int) -> None:
    """Answers with as many events as `max_tokens` says, one each second."""

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for at in range(asked["max_tokens"]):
            piece = {"index": 0, "delta": {"content": f"{at} "}, "finish_reason": None}
            await reply.write(b"data: %s\n\n" % json.dumps({"id": "a", "model": "demo", "choices": [piece]}).encode())
            await asyncio.sleep(EVENT_S)
        end = {"id": "a", "model": "demo", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        await reply.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(end).encode())
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def well(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models), web.get("/health", well)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


async def router(sla: str) -> None:
    """Runs a router, and prints how many tasks it has whenever a line comes in."""
    async with Router(parse(sla)):
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            print(len(asyncio.all_tasks()), flush=True)


class Clients:
    """As many streams at once as wanted; counts those that ended whole, those that left, and events that were lost."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.open = self.whole = self.left = 0
        self.wrong: list[str] = []

    async def stream(self, is_over: Callable[[], bool]) -> None:
        """One stream after the other."""
        await asyncio.sleep(self.rng.uniform(0, 30))
        while not is_over():
            events, leaves = self.rng.randrange(20, 400), self.rng.random() < 0.05
            self.open += 1
            try:
                await self._ask(events, self.rng.randrange(events) if leaves else None)
            finally:
                self.open -= 1

    async def _ask(self, events: int, leaves_after: int | None) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": events}
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
        seen, ended = 0, False
        try:
            while line := await reader.readline():
                seen += b'"content":"' in line or b'"content": "' in line
                ended = ended or b"[DONE]" in line
                if ended or (leaves_after is not None and seen > leaves_after):
                    break
        except OSError as error:
            self.wrong.append(str(error))
        finally:
            writer.transport.abort()
        if not ended:
            self.left += 1
            if leaves_after is None:
                self.wrong.append(f"a stream of {events} events ended after {seen}")
        elif leaves_after is None:
            self.whole += 1
            if seen != events:
                self.wrong.append(f"a stream of {events} events had {seen}")


async def metrics(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    page = await reader.read()
    writer.close()
    return page.decode()


class Held(NamedTuple):
    """What the router's process has."""

    mib: float
    descriptors: int
    tasks: int


class Routing:
    """The process of the router."""

    def __init__(self, sla: Path) -> None:
        command = [sys.executable, __file__, "--as-router", str(sla)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def held(self) -> Held:
        """Asks it, and the system."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        tasks = int(self.process.stdout.readline())
        folder = Path(f"/proc/{self.process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return Held(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list((folder / "fd").iterdir())), tasks)


async def soak(streams: int, minutes: float, port: int, routing: Routing) -> list[str]:
    """Runs it, prints the rows, and returns what was wrong."""
    for _ in range(300):
        with suppress(OSError):
            if "pointsman_backend" in await metrics(port):
                break
        await asyncio.sleep(0.1)
    clients, until, sizes = Clients(port, 1), time.monotonic() + 60 * minutes, []
    running = [asyncio.create_task(clients.stream(lambda: time.monotonic() > until)) for _ in range(streams)]
    print("| minute | MiB | descriptors | tasks | streams | ended | left early | wrong |\n" + "|---" * 8 + "|")
    for row in range(1, 31):
        await asyncio.sleep(2 * minutes)
        held = await asyncio.to_thread(routing.held)
        sizes.append(held.mib)
        counts = (held.descriptors, held.tasks, clients.open, clients.whole, clients.left, len(clients.wrong))
        print(f"| {row * minutes / 30:.1f} | {held.mib:.1f} | {' | '.join(map(str, counts))} |", flush=True)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await asyncio.sleep(3)
    found = re.findall(r"^(pointsman_(?:queued|backend_in_flight).*) (\S+)$", await metrics(port), re.MULTILINE)
    wrong = [f"{name} is {value}" for name, value in found if float(value)] + clients.wrong
    print(f"afterwards: {await asyncio.to_thread(routing.held)}, {wrong[:5]}")
    grown = statistics.mean(sizes[20:]) / statistics.mean(sizes[10:20])
    return [*wrong, *([f"memory grew by {grown - 1:.0%}"] if grown > 1.05 else [])]


def measure(streams: int, minutes: float, folder: Path) -> list[str]:
    """Starts the processes, runs the soak, and ends them."""
    engine_port, port = free_ports(2)
    sla = folder / "sla.yaml"
    sla.write_text(SLA.format(engine=engine_port, http=port))
    serving = subprocess.Popen([sys.executable, __file__, "--as-engine", str(engine_port)])
    routing = Routing(sla)
    try:
        return asyncio.run(soak(streams, minutes, port, routing))
    finally:
        for process in (routing.process, serving):
            process.terminate()
            process.wait(20)


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--as-engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--as-router", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_engine:
        asyncio.run(engine(chosen.as_engine))
    elif chosen.as_router:
        uvloop.run(router(chosen.as_router.read_text()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            wrong = measure(chosen.streams, chosen.minutes, Path(folder))
        if wrong:
            raise SystemExit("\n".join(wrong[:10]))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
