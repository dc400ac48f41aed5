"""Cost of a request in the router beside other routers and proxies: CPU, added TTFT, rate.

Each gateway runs alone on one core, and two cheap engines of OpenAI's dialect and the client on another, in turns:

    short     answers in one piece, 16 at once
    burst     answers of 33 events, all at once, 16 at once
    paced     answers of 33 events, one every 10 ms, 32 at once
    1 MB      prompts of 1 MB, answers in one piece, 4 at once
    TTFT      the first event of a stream, one request after the other, less what the engine takes itself

Pointsman runs as `pointsman serve` does, with keys, limits of a tenant, the default policy, the prefix index, metrics
and the dashboard's board. `raw proxy` is the floor: it only forwards bytes on uvloop and httptools; `bare aiohttp` does
that with aiohttp. The others are programs: SMG, vllm-router and Envoy are there after `make engines`, sglang-router and
LiteLLM where `--programs` names a directory with them (`pip install sglang-router 'litellm[proxy]'`). Programs that are
not there are left out. CPU is the user and system time of the gateway's process, in milliseconds per request; other
work on the machine distorts it less than rates.

    python benchmarks/gateway.py [--gateways Pointsman Envoy ...] [--programs DIR ...] [--rounds 3] [--requests 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httptools
import msgspec
import uvloop
from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from policies.sla.parse import parse
from router.start.allocator import keep_freed_memory
from router.start.app import Router
from shards.collector import spare_what_stays
from tests.engines.programs import ENGINES, free_ports

MODEL, EVENTS, EVERY_S = "m", 33, 0.01
SLOWLY = "Slowly"
"""Prompts that begin with it get their events paced: some gateways forward no field for that."""

CHAT = "/v1/chat/completions"
KEY = "a-key-for-measurements-only"
JSON = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
tenants: {{acme: {{keys: ["sha256:{key}"], limits: {{requests_per_minute: 10M, tokens_per_minute: 10000M}}}}}}
pools: {{engines: {{kind: openai_compatible, at: {engines}, model: m, options: {{max_requests: 256}}}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:{port}", grpc: off, max_body: 4MiB}}
"""
ENVOY = """
static_resources:
  listeners:
    - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": {types}.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: gateway
                route_config:
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes: [{{match: {{prefix: /}}, route: {{cluster: engines, timeout: 60s}}}}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {{"@type": {types}.filters.http.router.v3.Router}}
  clusters:
    - name: engines
      connect_timeout: 1s
      lb_policy: ROUND_ROBIN
      load_assignment:
        cluster_name: engines
        endpoints: [{{lb_endpoints: [{endpoints}]}}]
"""


class Shape(NamedTuple):
    """The shape of requests and their number in flight; `of_requests` is the share of `--requests` that is sent."""

    at_once: int
    stream: bool
    is_paced: bool = False
    prompt_bytes: int = 200
    of_requests: float = 1.0


SHAPES = {
    "short": Shape(16, stream=False),
    "burst": Shape(16, stream=True, of_requests=0.5),
    "paced": Shape(32, stream=True, is_paced=True, of_requests=0.25),
    "1 MB": Shape(4, stream=False, prompt_bytes=1 << 20, of_requests=0.05),
}


def body_of(shape: Shape, number: int) -> bytes:
    """A request. Each prompt begins differently, so that prefix indexes have something to keep."""
    sentence = "What does a pointsman do? "
    text = f"{SLOWLY if shape.is_paced else 'At once'} {number}. " + sentence * (shape.prompt_bytes // len(sentence))
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": EVENTS, "stream": shape.stream}).encode()


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Asked(msgspec.Struct):
    """The fields of a request that the engine reads."""

    stream: bool = False


# -- run in processes of their own: engines and our gateways -----------------------------------------------------------


async def engine(port: int) -> None:
    """Answer each request with as little parsing as possible."""
    usage = {"prompt_tokens": 50, "completion_tokens": EVENTS, "total_tokens": 50 + EVENTS}
    message = {"role": "assistant", "content": "word " * EVENTS}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
    ).encode()
    piece = _event({"content": "word "})
    counts = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [], "usage": usage}
    last = _event({}, "stop") + b"data: " + json.dumps(counts).encode() + b"\n\ndata: [DONE]\n\n"

    async def chat(request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if not msgspec.json.decode(content, type=Asked).stream:
            return web.Response(body=whole, content_type="application/json")
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        is_paced = SLOWLY.encode() in content
        for _ in range(EVENTS - 1):
            await reply.write(piece)
            if is_paced:
                await asyncio.sleep(EVERY_S)
        await reply.write(last)
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "us"}]})

    async def well(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=1 << 23)
    app.add_routes([web.post(CHAT, chat), web.get("/v1/models", models)])
    app.add_routes([web.get(path, well) for path in ("/", "/health", "/health_generate", "/readiness")])
    await _serve(app, port)


async def bare(port: int, *engines: str) -> None:
    """Forward bytes with aiohttp."""
    turns = itertools.cycle(engines)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            url = next(turns) + request.path
            headers = {"content-type": "application/json"}
            async with http.request(request.method, url, data=await request.read(), headers=headers) as answer:
                if answer.content_length is not None:
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                reply = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await reply.prepare(request)
                async for data in answer.content.iter_any():
                    await reply.write(data)
                return reply

        app = web.Application(client_max_size=1 << 23)
        app.router.add_route("*", "/{path:.*}", forward)
        await _serve(app, port)


class _Upstream(asyncio.Protocol):
    """A connection to an engine, with at most one answer under way."""

    def __init__(self, idle: list[_Upstream]) -> None:
        self.idle, self.client, self.is_over = idle, None, True
        self.client: _Downstream | None
        self.parser: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def carry(self, client: _Downstream, request: bytes) -> None:
        self.client, self.parser = client, httptools.HttpResponseParser(self)
        self.transport.write(request)

    def on_message_complete(self) -> None:
        self.is_over = True

    def data_received(self, data: bytes) -> None:
        self.is_over = False
        self.parser.feed_data(data)
        client = self.client
        assert client is not None
        client.transport.write(data)
        if self.is_over:
            self.client = None
            self.idle.append(self)

    def connection_lost(self, _: Exception | None) -> None:
        if self in self.idle:
            self.idle.remove(self)


class _Downstream(asyncio.Protocol):
    """A connection of a client, which sends the next request after the answer."""

    def __init__(self, turns: Any) -> None:
        self.turns, self.pieces, self.is_whole = turns, list[bytes](), False

    def connection_made(self, transport: Any) -> None:
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)

    def on_message_complete(self) -> None:
        self.is_whole = True

    def data_received(self, data: bytes) -> None:
        self.is_whole = False
        self.pieces.append(data)
        self.parser.feed_data(data)
        if self.is_whole:
            request, self.pieces = b"".join(self.pieces), []
            self.parser = httptools.HttpRequestParser(self)
            idle, port = next(self.turns)
            if idle:
                idle.pop().carry(self, request)
            else:
                self.opening = asyncio.ensure_future(self._open(idle, port, request))

    async def _open(self, idle: list[_Upstream], port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: _Upstream(idle), "127.0.0.1", port)
        upstream.carry(self, request)


async def raw(port: int, *engines: str) -> None:
    """Forward bytes, parsing only the ends of requests and answers."""
    turns = itertools.cycle([(list[_Upstream](), int(url.rpartition(":")[2])) for url in engines])
    server = await asyncio.get_running_loop().create_server(lambda: _Downstream(turns), "127.0.0.1", port)
    await server.serve_forever()


async def pointsman(port: int, *engines: str) -> None:
    """The router as `pointsman serve` runs it."""
    key = hashlib.sha256(KEY.encode()).hexdigest()
    async with Router(parse(SLA.format(engines=json.dumps(engines), key=key, port=port))) as router:
        assert await router.wait_until_reached(10)
        spare_what_stays()
        keep_freed_memory()
        await asyncio.Event().wait()


async def _serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


OURS: dict[str, Callable[..., Any]] = {"engine": engine, "bare": bare, "raw": raw, "pointsman": pointsman}


# -- gateways ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a gateway is started: `command(folder, port, engines)` gives the command line, beginning with `program`.

    `program` is None for those in this file.
    """

    command: Callable[[Path, int, Sequence[str]], Sequence[str]]
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def _ours(name: str) -> Kind:
    return Kind(lambda _, port, engines: ["--run", name, str(port), *engines])


def _cache_aware(*first: str) -> Callable[[Path, int, Sequence[str]], Sequence[str]]:
    def command(_: Path, port: int, engines: Sequence[str]) -> Sequence[str]:
        (metrics,) = free_ports(1)
        words = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
        return [*first, *words, "--prometheus-port", str(metrics)]

    return command


def _envoy(folder: Path, port: int, engines: Sequence[str]) -> Sequence[str]:
    endpoint = "{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}}}"
    file = folder / "envoy.yaml"
    ports = [url.rpartition(":")[2] for url in engines]
    file.write_text(
        ENVOY.format(
            types="type.googleapis.com/envoy.extensions", port=port, endpoints=", ".join(map(endpoint.format, ports))
        )
    )
    return ["-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warn"]


def _litellm(folder: Path, port: int, engines: Sequence[str]) -> Sequence[str]:
    options = [{"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"} for url in engines]
    file = folder / "litellm.yaml"
    file.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": each} for each in options]}))
    return ["--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


LITELLM = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
KINDS = {
    "raw proxy": _ours("raw"),
    "bare aiohttp": _ours("bare"),
    "Pointsman": _ours("pointsman"),
    "Envoy": Kind(_envoy, "envoy"),
    "SMG cache_aware": Kind(_cache_aware("launch", "--backend", "openai", "--disable-tokenizer-autoload"), "smg"),
    "vllm-router cache_aware": Kind(_cache_aware(), "vllm-router"),
    "sglang-router cache_aware": Kind(_cache_aware("launch"), "sglang-router"),
    "LiteLLM": Kind(_litellm, "litellm", LITELLM),
}


class Gateway:
    """One gateway in a process of its own."""

    def __init__(self, name: str, process: Process, url: str) -> None:
        self.name, self.process, self.url = name, process, url

    @classmethod
    async def start(cls, name: str, kind: Kind, program: str | None, folder: Path, engines: Sequence[str]) -> Gateway:
        """Start it on the first core and wait until it answers requests. Raises TimeoutError."""
        (port,) = free_ports(1)
        words = kind.command(folder, port, engines)
        command = [sys.executable, __file__, *words] if program is None else [program, *words]
        log = (folder / f"{name}.log").open("wb")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT) if program is None else "", **kind.environment},
            preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        )
        return cls(name, process, f"http://127.0.0.1:{port}")

    async def answers(self, http: aiohttp.ClientSession, within_s: float = 60.0) -> None:
        """Wait until it answers requests. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                with suppress(OSError, aiohttp.ClientError, AssertionError):
                    await ask(http, self.url, SHAPES["short"], 0)
                    return
                await asyncio.sleep(0.2)

    def cpu_s(self) -> float:
        """User and system time of the process, in nanoseconds' steps: ticks of 10 ms meet paced events too often."""
        # what clock_getcpuclockid(3) returns on Linux: CPUCLOCK_SCHED of a process
        return time.clock_gettime(~self.process.pid << 3 | 2)

    async def stop(self) -> None:
        """Stop it."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def ask(http: aiohttp.ClientSession, url: str, shape: Shape, number: int) -> float:
    """Send one request; seconds to the first byte of the answer."""
    began = time.perf_counter()
    async with http.post(url + CHAT, data=body_of(shape, number), headers=JSON) as reply:
        content = await reply.content.readany()
        first_s = time.perf_counter() - began
        content += await reply.read()
        assert reply.status == 200, content[:500]
        if shape.stream:
            assert content.count(b'"word "') == EVENTS - 1, content[-300:]
            assert content.rstrip().endswith(b"[DONE]"), content[-200:]
    return first_s


class Cost(NamedTuple):
    """The cost of requests of one shape: milliseconds of CPU for each, and requests per second."""

    cpu_ms: float
    rate: float


async def cost(gateway: Gateway, http: aiohttp.ClientSession, shape: Shape, count: int, numbers: Any) -> Cost:
    """Send `count` requests."""
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await ask(http, gateway.url, shape, next(numbers))

    before, began = gateway.cpu_s(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(shape.at_once)))
    seconds = time.perf_counter() - began
    return Cost(1000 * (gateway.cpu_s() - before) / count, count / seconds)


async def added_ttft(gateway: Gateway, http: aiohttp.ClientSession, engine_url: str, count: int, numbers: Any) -> float:
    """Milliseconds that the first event takes longer than from the engine itself: the median of pairs."""
    shape = SHAPES["paced"]
    more: list[float] = []
    for _ in range(count):
        itself = await ask(http, engine_url, shape, next(numbers))
        more.append(await ask(http, gateway.url, shape, next(numbers)) - itself)
    return 1000 * statistics.median(more)


async def measure(chosen: Mapping[str, str | None], requests: int, rounds: int, folder: Path) -> None:
    """All gateways in turns; medians of the rounds."""
    numbers = itertools.count()
    costs: dict[tuple[str, str], list[Cost]] = {}
    ttft: dict[str, list[float]] = {}
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            (port,) = free_ports(1)
            words = (sys.executable, __file__, "--run", "engine", str(port))
            process = await asyncio.create_subprocess_exec(
                *words,
                stderr=stack.enter_context((folder / "engines.log").open("ab")),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                preexec_fn=lambda: os.sched_setaffinity(0, {cores[-1]}),
            )
            started = Gateway("engine", process, f"http://127.0.0.1:{port}")
            stack.push_async_callback(started.stop)
            engines.append(started)
        os.sched_setaffinity(0, {cores[-1]})
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        for each in engines:
            await each.answers(http)
        urls = [each.url for each in engines]
        gateways = []
        os.sched_setaffinity(0, set(cores))
        for name, program in chosen.items():
            gateway = await Gateway.start(name, KINDS[name], program, folder, urls)
            stack.push_async_callback(gateway.stop)
            gateways.append(gateway)
        os.sched_setaffinity(0, {cores[-1]})
        for gateway in list(gateways):
            try:
                await gateway.answers(http)
            except TimeoutError:
                print(f"{gateway.name} did not answer: {(folder / f'{gateway.name}.log').read_text()[-500:]}")
                gateways.remove(gateway)
        for number in range(rounds + 1):
            for gateway in gateways:
                slow = 20 if gateway.name == "LiteLLM" else 1
                for name, shape in SHAPES.items():
                    count = max(shape.at_once, int(requests * shape.of_requests / slow))
                    found = await cost(gateway, http, shape, count, numbers)
                    costs.setdefault((name, gateway.name), []).append(found)
                found_ms = await added_ttft(gateway, http, urls[0], 8, numbers)
                ttft.setdefault(gateway.name, []).append(found_ms)
                print(f"round {number} of {rounds}: {gateway.name}", file=sys.stderr, flush=True)
    show([gateway.name for gateway in gateways], costs, ttft)


def show(
    names: Sequence[str], costs: Mapping[tuple[str, str], Sequence[Cost]], ttft: Mapping[str, list[float]]
) -> None:
    """Print the tables: CPU and rates, medians without the first round, which is for warming up."""
    print("CPU milliseconds per request, and requests per second")
    print(f"{'':27}" + "".join(f"{shape:>18}" for shape in SHAPES) + f"{'added TTFT, ms':>18}")
    for name in names:
        cells = []
        for shape in SHAPES:
            taken = costs[shape, name][1:]
            cpu_ms, rate = (statistics.median(each[at] for each in taken) for at in (0, 1))
            cells.append(f"{cpu_ms:9.3f}{rate:8.0f}/s")
        print(f"{name:27}" + "".join(cells) + f"{statistics.median(ttft[name][1:]):18.2f}")
    if "Pointsman" in names:
        print("\nPointsman's CPU, relative to each; medians of pairs of the same round")
        for name in names:
            if name != "Pointsman":
                ratios = [
                    statistics.median(
                        ours.cpu_ms / max(theirs.cpu_ms, 1e-3)
                        for ours, theirs in zip(costs[shape, "Pointsman"][1:], costs[shape, name][1:], strict=True)
                    )
                    for shape in SHAPES
                ]
                print(f"{name:27}" + "".join(f"{ratio:17.2f}x" for ratio in ratios))


def programs(names: Sequence[str], folders: Sequence[Path]) -> dict[str, str | None]:
    """The path of each gateway's program; gateways without one are left out, with a printed line."""
    found: dict[str, str | None] = {}
    for name in names:
        program = KINDS[name].program
        if program is None:
            found[name] = None
            continue
        there = [folder / program for folder in folders if (folder / program).exists()]
        if there:
            found[name] = str(there[0])
        else:
            print(f"{name} is left out: no program {program} in {', '.join(map(str, folders))}")
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--programs", nargs="+", type=Path, default=[], help="directories with other programs")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        what, port, *engines = chosen.run
        uvloop.run(OURS[what](int(port), *engines))
        return
    folders = [ENGINES / "bin", *chosen.programs]
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(programs(chosen.gateways, folders), chosen.requests, chosen.rounds, Path(folder)))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
