"""A split of 95:5 over HTTP: its shares, its sessions, and how long a bad canary keeps its share.

    python benchmarks/canary.py [--requests 20000] [--rate 20] [--picture dashboard.png]

`pointsman serve` in front of two engines, in processes of their own. First requests without a session: the canary's
share of them. Then requests of 400 sessions: how many sessions had both pools. Then one request in 20 goes to a canary
that breaks off every answer, or with --late begins it 2.5 s late with a target of 2 s: when it loses its share, and
what log, metrics, GET /admin/splits and, in a picture by Chromium, the dashboard show. Exits with 1 if the share is off
by more than 0.5 %, if a session had both pools, if the canary keeps its share for a minute, or if a request was not
answered.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engines.programs import Program, free_ports
from tests.router.operate.dashboard.browser import a_browser, a_page

SLA = """
classes: {{chat: {{ttft_p95: 2s}}}}
tenants: {{acme: {{anonymous: true}}}}
pools:
  stable: {{kind: openai_compatible, at: "http://127.0.0.1:{stable}", model: m, options: {{max_requests: 512}}}}
  canary: {{kind: openai_compatible, at: "http://127.0.0.1:{canary}", model: m, options: {{max_requests: 512}}}}
rules: [{{class: chat, pools: {{stable: 95, canary: 5}}}}]
server: {{http: "127.0.0.1:{http}", grpc: off, admin: "127.0.0.1:{admin}", strangers: off, state: off}}
"""


async def engine(port: int) -> None:
    """An engine that does as the last line on stdin says: well, broken or late."""
    manner = ["well"]

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if manner[0] == "late":
            await asyncio.sleep(2.5)
        await reply.prepare(request)
        for text in ("a ", "b ", "c "):
            if manner[0] == "broken" and request.transport is not None:
                request.transport.abort()
                return reply
            piece = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            await reply.write(b"data: %s\n\n" % json.dumps({"id": "a", "model": "m", "choices": [piece]}).encode())
        end = {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await reply.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(end).encode())
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        manner[0] = line.decode().strip()


class Clients:
    """Ask the router at `url`; `placed` counts the pools that answered, `lost` has what was not answered."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http
        self.lost: list[str] = []

    async def ask(self, session: str | None = None) -> str:
        """The pool that answered."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        headers = {} if session is None else {"x-pointsman-session": session}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status != 200 or "[DONE]" not in text:
                self.lost.append(f"{reply.status} {text[-200:]}")
            return reply.headers.get("x-pointsman-backend", "none").rpartition("-")[0]

    async def all(self, sessions: list[str | None], at_once: int) -> list[str]:
        """The pools that answered requests of these `sessions`, so many at once."""
        turns = iter(enumerate(sessions))
        placed = [""] * len(sessions)

        async def some() -> None:
            for number, session in turns:
                placed[number] = await self.ask(session)

        await asyncio.gather(*(some() for _ in range(at_once)))
        return placed


async def measure(url: str, admin: str, chosen: argparse.Namespace, canary: Callable[[str], None]) -> list[str]:
    """Prints what is found, and returns what was wrong."""
    wrong: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(url, http)
        placed = Counter(await clients.all([None] * chosen.requests, 32))
        share = placed["canary"] / chosen.requests
        print(f"{chosen.requests} requests: {dict(placed)}, the canary had {share:.2%}")
        if abs(share - 0.05) > 0.005:
            wrong.append("the share is off by more than 0.5 %")
        sessions: list[str | None] = [f"s{number % 400}" for number in range(4000)]
        random.Random(1).shuffle(sessions)
        by_session: dict[str | None, set[str]] = {}
        for session, pool in zip(sessions, await clients.all(sessions, 32), strict=True):
            by_session.setdefault(session, set()).add(pool)
        both = [session for session, pools in by_session.items() if len(pools) > 1]
        print(f"4000 requests of {len(by_session)} sessions: {len(both)} sessions had both pools")
        wrong += [f"sessions had both pools: {both[:3]}"] if both else []
        canary("late" if chosen.late else "broken")
        after_s, asked = await _until_lost(clients, admin, chosen.rate)
        print(f"the canary lost its share after {after_s:.1f} s and {asked} requests at {chosen.rate} a second")
        wrong += ["the canary kept its share for a minute"] if after_s >= 60 else []
        for line in (await _shown(http, admin)).splitlines():
            print(f"  {line}")
        print(f"requests that were not answered: {len(clients.lost)}")
        wrong += clients.lost[:3]
        if chosen.picture:
            await _draw(f"{admin}/dashboard", chosen.picture)
    return wrong


async def _until_lost(clients: Clients, admin: str, rate: float) -> tuple[float, int]:
    """After how many seconds and requests the canary has no share; a minute at most."""
    began_at, running = time.monotonic(), set()
    for number in itertools.count(1):
        running.add(task := asyncio.create_task(clients.ask()))
        task.add_done_callback(running.discard)
        await asyncio.sleep(1 / rate)
        async with clients.http.get(f"{admin}/admin/splits") as reply:
            standings = (await reply.json())["splits"]
        after_s = time.monotonic() - began_at
        if any(each.get("lost_because") for each in standings) or after_s > 60:
            await asyncio.gather(*running)
            return after_s, number
    raise AssertionError("it ends before")


async def _shown(http: aiohttp.ClientSession, admin: str) -> str:
    """What GET /admin/splits and the metrics show."""
    async with http.get(f"{admin}/admin/splits") as reply:
        splits = "\n".join(map(json.dumps, (await reply.json())["splits"]))
    async with http.get(f"{admin}/metrics") as reply:
        page = await reply.text()
    named = ('pointsman_events_total{event="rolled_back"}', "pointsman_split_requests_total{")
    return "\n".join([splits, *(line for line in page.splitlines() if line.startswith(named))])


async def _draw(url: str, picture: Path) -> None:
    with a_browser() as browser:
        async with a_page(browser, width=1280, height=900) as page:
            await page.go(url)
            await page.until("document.body.innerText.includes('canary')")
            await page.picture(picture)


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--as-engine", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_engine:
        asyncio.run(engine(chosen.as_engine))
        return
    stable, canary, http, admin = free_ports(4)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sla = Path(folder) / "sla.yaml"
        sla.write_text(SLA.format(stable=stable, canary=canary, http=http, admin=admin))
        engines = []
        for port in (stable, canary):
            command = [sys.executable, __file__, "--as-engine", str(port)]
            engines.append(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(engines[-1].wait, 20)
            stack.callback(engines[-1].terminate)
        serve = (sys.executable, "-c", "from router.start.cli import main; main()", "serve", str(sla))
        url = f"http://127.0.0.1:{http}"
        router = Program("router", serve, Path(folder), f"{url}/readyz", {"PYTHONPATH": str(ROOT)})
        stack.callback(router.stop)
        router.start()
        router.wait_until_ready(60)

        def tell_canary(manner: str) -> None:
            pipe = engines[1].stdin
            assert pipe is not None
            pipe.write(f"{manner}\n".encode())
            pipe.flush()

        wrong = asyncio.run(measure(url, f"http://127.0.0.1:{admin}", chosen, tell_canary))
        for line in router.log.read_text().splitlines():
            if "loses its share" in line:
                print(f"  log: {line}")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
