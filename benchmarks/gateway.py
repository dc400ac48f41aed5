"""Cost of a request in the router against a bare aiohttp proxy: CPU and rate.

A cheap engine with OpenAI's API answers both, each gateway in a process of its own, in turns:

    short     answers in one piece, 16 at once
    streams   answers of 33 events, one every 10 ms, 64 at once

The bare proxy only forwards bytes: no tenants, no policy, no metrics. CPU is the gateway process's time, user and
system; other work on the machine distorts it less than it distorts rates.

    python benchmarks/gateway.py [--requests 2000] [--streams 500] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from policies.sla.parse import parse
from router.start.app import Router
from router.start.collector import spare_what_stays

MODEL, EVENTS, EVERY_S = "m", 33, 0.01
CHAT = "/v1/chat/completions"
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
pools: {{engine: {{kind: openai_compatible, at: "{engine}", model: m}}}}
rules: [{{class: chat}}]
policies: {{default: {{filter: [healthy, serves_model], score: {{balance: 1}}}}}}
server: {{http: "127.0.0.1:0", grpc: off}}
"""


def _body(*, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "What does a pointsman do? " * 8}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": EVENTS, "stream": stream}).encode()


def _event(delta: dict[str, str], **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def engine() -> None:
    """Answer each request with as little parsing as possible."""
    usage = {"prompt_tokens": 50, "completion_tokens": EVENTS, "total_tokens": 50 + EVENTS}
    message = {"role": "assistant", "content": "word " * EVENTS}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
    ).encode()
    piece = _event({"content": "word "})
    last = _event({}, finish_reason="stop") + b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"

    async def chat(request: web.Request) -> web.StreamResponse:
        if not json.loads(await request.read()).get("stream"):
            return web.Response(body=whole, content_type="application/json")
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(EVENTS - 1):
            await reply.write(piece)
            await asyncio.sleep(EVERY_S)
        await reply.write(last + b"data: [DONE]\n\n")
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post(CHAT, chat), web.get("/v1/models", models), web.get("/health", models)])
    await _serve(app)


async def bare(to: str) -> None:
    """Forward bytes."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def chat(request: web.Request) -> web.StreamResponse:
            headers = {"content-type": "application/json"}
            async with http.post(to + request.path, data=await request.read(), headers=headers) as answer:
                reply = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                if answer.content_length is not None:
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                await reply.prepare(request)
                async for data in answer.content.iter_any():
                    await reply.write(data)
                return reply

        app = web.Application()
        app.router.add_post(CHAT, chat)
        await _serve(app)


async def pointsman(to: str) -> None:
    """The router as `pointsman serve` runs it."""
    async with Router(parse(SLA.format(engine=to))) as router:
        assert await router.wait_until_reached(10)
        spare_what_stays()
        print(router.http_url, flush=True)
        await asyncio.Event().wait()


async def _serve(app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


class Gateway:
    """One of the above in a process of its own."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url

    @classmethod
    async def start(cls, *what: str) -> Gateway:
        """Start it; it listens when this returns."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--run", *what, stdout=PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
        )
        assert process.stdout is not None
        return cls(process, (await process.stdout.readline()).decode().strip())

    def cpu_s(self) -> float:
        """User and system time of the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def load(self, http: aiohttp.ClientSession, count: int, at_once: int, *, stream: bool) -> tuple[float, float]:
        """Send `count` requests; gateway CPU and clock seconds per thousand of them."""
        body, left = _body(stream=stream), iter(range(count))

        async def client() -> None:
            for _ in left:
                async with http.post(self.url + CHAT, data=body, headers={"content-type": "application/json"}) as reply:
                    content = await reply.read()
                    assert reply.status == 200, content
                    assert not stream or content.rstrip().endswith(b"[DONE]"), content[-200:]

        before, began = self.cpu_s(), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        return (self.cpu_s() - before) / count * 1000, (time.perf_counter() - began) / count * 1000

    async def stop(self) -> None:
        """Stop it."""
        self.process.kill()
        await self.process.wait()


async def measure(requests: int, streams: int, rounds: int) -> None:
    """Both gateways in turns; medians of the rounds."""
    source = await Gateway.start("engine")
    gateways = {name: await Gateway.start(name, source.url) for name in ("bare", "pointsman")}
    shapes = {"short": (requests, 16, False), "streams": (streams, 64, True)}
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            for _ in range(rounds + 1):
                for shape, (count, at_once, stream) in shapes.items():
                    for name, gateway in gateways.items():
                        found = await gateway.load(http, count, at_once, stream=stream)
                        seen.setdefault((shape, name), []).append(found)
    finally:
        for gateway in (*gateways.values(), source):
            await gateway.stop()
    print(f"{'':10}{'':12}{'CPU s per 1,000':>16}{'requests/s':>12}{'of one core':>13}")
    for shape in shapes:
        cpu: dict[str, float] = {}
        for name in gateways:
            # the first round is for warming up
            taken = seen[shape, name][1:]
            cpu[name], clock = (statistics.median(one[at] for one in taken) for at in (0, 1))
            print(f"{shape:10}{name:12}{cpu[name]:16.2f}{1000 / clock:12.0f}{1000 / cpu[name]:13.0f}")
        print(f"{shape:10}{'ratio':12}{cpu['pointsman'] / cpu['bare']:15.2f}x")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        what, *to = asked.run
        uvloop.run({"engine": engine, "bare": bare, "pointsman": pointsman}[what](*to))
    else:
        uvloop.run(measure(asked.requests, asked.streams, asked.rounds))


if __name__ == "__main__":
    main()
