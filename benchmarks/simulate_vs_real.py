"""Predictions of `pointsman simulate` against a router and shards in real time: the same SLA file and requests.

    python benchmarks/simulate_vs_real.py [--shards 2] [--seconds 60] [--loads 0.5 0.9] [--rounds 1] [--computing]

Router and shards are processes of their own; this process is the clients, over HTTP. The shards are complete `shards/`
except for the arithmetic: a step sleeps as long as examples/capacity/l4-profile.yaml says, so that other work on the
machine counts little. With `--computing` it is `pointsman up` with the bundled model on CPUs, which is meaningful on a
quiet machine with a core for each shard, the router and the clients.

Two predictions: with that profile itself (except for `--computing`), and with a profile made, as docs/capacity.md
describes, from the router's learnt latencies at a light load (`pointsman_backend_latency`). The simulator finds the
request rate that keeps the shards busy for the wanted share of the time; each load runs on new processes with empty
caches and an untrained router, as in the simulation.

Prompts are 100 to 1,700 tokens, every other one a question behind one of 12 documents of 1,024 tokens; answers have 8
to 96 tokens.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import Any

import aiohttp
import torch
from torch import Tensor

from policies.sla.parse import parse
from shards.bundled import NAME as MODEL
from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model
from shards.sched.cost import StepShape, prefill_shape
from shards.server import serve
from shards.warmup import warm_up
from simulation.speed import Machine, Speed, read_profile

ROOT = Path(__file__).parents[1]
CHUNK = 512

L4 = ROOT / "examples/capacity/l4-profile.yaml"
SLA = """
classes: {{chat: {{ttft_p95: 120s}}}}
server: {{metrics: open, state: off}}
pools: {{own: {{kind: shard, {where}}}}}
rules: [{{class: chat}}]
"""


@dataclass(frozen=True)
class Scene:
    """The measured scene: an SLA file in `folder`, for shards at `addresses` that compute or sleep."""

    folder: Path
    addresses: tuple[str, ...]
    is_computing: bool

    @property
    def file(self) -> Path:
        """The SLA file."""
        return self.folder / "sla.yaml"

    def write(self) -> None:
        """Write the SLA file."""
        where = f"at: [{', '.join(self.addresses)}]"
        self.file.write_text(
            SLA.format(where=f"local: {len(self.addresses)}, model: bundled" if self.is_computing else where)
        )

    def machine(self) -> Machine | None:
        """The profile of each shard, if it does not compute."""
        return None if self.is_computing else read_profile(L4, parse(self.file.read_text()))["own"]


class SleepingNetwork:
    """Computes nothing in the time given by `speed`, and draws one token over and over."""

    vocabulary, context_tokens, block_bytes = 4096, 4096, 2**20

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    def allocate(self, blocks: int) -> None:
        """Allocate nothing."""

    def forward(self, batch: Batch) -> Tensor:
        """Constant logits, when they are due."""
        due_s = time.perf_counter() + self._seconds(batch)
        logits = torch.zeros(len(batch.logit_rows), self.vocabulary)
        logits[:, 300] = 1.0
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return logits

    def _seconds(self, batch: Batch) -> float:
        shape, decoding = StepShape(), 0
        for row in batch.rows:
            is_decoding = row.tokens == 1
            decoding += is_decoding
            prefill = prefill_shape(row.context_tokens - row.tokens, row.tokens)
            shape += StepShape(1, decode_context=row.context_tokens) if is_decoding else prefill
        return self._speed.seconds(shape, decoding=decoding)


def serve_sleeping(address: str) -> None:
    """One shard that sleeps, until SIGTERM."""
    machine = read_profile(L4, parse(SLA.format(where=f"at: [{address}]")))["own"]
    model = Model(MODEL, SleepingNetwork(machine.speed), path=weights())
    options = replace(machine.options, kv_blocks=machine.blocks)
    engine = Engine(model, options)
    warm_up(engine)
    asyncio.run(serve(engine, address, shard=address, grace_s=1.0))


@dataclass(frozen=True)
class Asked:
    """One request: its time, the beginning of its prompt (chunks by name), and the lengths of prompt and answer."""

    at_s: float
    prompt_tokens: int
    new_tokens: int
    chunks: tuple[int, ...]
    number: int

    def token_ids(self) -> list[int]:
        """Its prompt; equal chunks are equal tokens."""
        ids: list[int] = []
        for name in self.chunks:
            ids += random.Random(name).choices(range(50, 400), k=CHUNK)
        return ids + random.Random(-1 - self.number).choices(range(50, 400), k=self.prompt_tokens - len(ids))

    def line(self) -> str:
        """The request as a line of a trace."""
        sizes = {"input_length": self.prompt_tokens, "output_length": self.new_tokens}
        return json.dumps({"timestamp": self.at_s * 1000, **sizes, "hash_ids": self.chunks})


@dataclass
class Heard:
    """One client's observations, in seconds from the planned time of its request."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    cached: int = 0
    prompt: int = 0
    late_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """The result of one load."""

    ttft_s: tuple[float, float, float]
    tpot_s: tuple[float, float, float]
    out_per_s: float
    hit_rate: float
    requests: int = field(compare=False, default=0)


def asked(per_second: float, seconds: float, seed: int) -> list[Asked]:
    """Requests at random times, `per_second` on average."""
    rng, at_s, made = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(per_second)) < seconds:
        number = len(made)
        document = seed * 1000 + 2 * rng.randrange(12)
        chunks = (document, document + 1) if number % 2 else ()
        tail = rng.randrange(100, 650)
        made.append(Asked(at_s, len(chunks) * CHUNK + tail, rng.randrange(8, 97), chunks, seed * 10**6 + number))
    return made


@asynccontextmanager
async def up(scene: Scene) -> AsyncIterator[str]:
    """Shards and a router as processes; yields the HTTP address once all shards are ready."""
    url = f"http://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        if scene.is_computing:
            await stack.enter_async_context(a_process("-P", "-m", "router", "up", str(scene.file), "--http", url[7:]))
        else:
            for address in scene.addresses:
                await stack.enter_async_context(a_process(__file__, "--serve", address))
            await stack.enter_async_context(
                a_process("-P", "-m", "router", "serve", str(scene.file), "--http", url[7:])
            )
        async with aiohttp.ClientSession() as session, asyncio.timeout(300):
            while await ready(session, url) < len(scene.addresses):  # noqa: ASYNC110 - another process reports it
                await asyncio.sleep(0.2)
        yield url


@asynccontextmanager
async def a_process(*command: str) -> AsyncIterator[None]:
    """Run Python with `command` until the context ends."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes as long as it lives
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        elif process.returncode:
            log.seek(0)
            print(log.read().decode())
        await process.wait()
        log.close()


async def ready(session: aiohttp.ClientSession, url: str) -> int:
    """The number of shards that may get requests."""
    try:
        async with session.get(f"{url}/metrics") as reply:
            return len(re.findall(r"^pointsman_backend_healthy\{.*\} 1.0$", await reply.text(), re.MULTILINE))
    except aiohttp.ClientError:
        return 0


def free_port() -> int:
    """A free port."""
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def measured(url: str, coming: Sequence[Asked]) -> list[Heard]:
    """The observations of clients that send at their times, whatever happens to earlier requests."""
    began, heard = time.perf_counter(), [Heard() for _ in coming]
    # made before, so that it costs no client its time
    bodies = [body_of(request) for request in coming]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:

        async def ask(request: Asked, body: bytes, answer: Heard) -> None:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            answer.late_s = time.perf_counter() - began - request.at_s
            headers = {"content-type": "application/json"}
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                async for line in reply.content:
                    hear(line, answer, time.perf_counter() - began - request.at_s)
            assert answer.tokens == request.new_tokens, f"{answer} is no answer to {request}"

        async with asyncio.TaskGroup() as group:
            for request, body, answer in zip(coming, bodies, heard, strict=True):
                group.create_task(ask(request, body, answer))
    return heard


def body_of(request: Asked) -> bytes:
    """The request as JSON."""
    options: dict[str, Any] = {"max_tokens": request.new_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True}
    return json.dumps({"model": MODEL, "prompt": request.token_ids(), **options}).encode()


def hear(line: bytes, answer: Heard, at_s: float) -> None:
    """Process one line of an answer."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    if usage := event.get("usage"):
        answer.tokens, answer.prompt = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
    if event["choices"]:
        answer.first_s = answer.first_s or at_s
        answer.last_s = at_s


async def learnt(url: str) -> dict[str, float]:
    """Coefficient -> its mean over the shards, as the router has learnt it."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        text = await reply.text()
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r'^pointsman_backend_latency\{.*coefficient="(\w+)".*\} (\S+)$', text, re.MULTILINE):
        found.setdefault(name, []).append(float(value))
    return {name: statistics.fmean(values) for name, values in found.items()}


def learnt_profile(learned: dict[str, float], machine: Machine | None) -> dict[str, float]:
    """A pool's entry in a profile, as docs/capacity.md describes."""
    budget_s = machine.step_budget_s if machine else EngineOptions().step_s
    own = max(0.1, 1 - learned["step_s"] / budget_s)
    kv_tokens = machine.kv_tokens if machine else kv_tokens_of_local_shards()
    return {
        "step_budget_ms": 1e3 * budget_s,
        "running": machine.running if machine else EngineOptions().max_running,
        "way_ms": 1e3 * max(0.0, learned["fixed_s"] - learned["step_s"]),
        "step_ms": 1e3 * learned["step_s"],
        "token_us": 1e6 * learned["token_s"] * own,
        "pair_ns": 1e9 * learned["pair_s"] * own,
        "sequence_us": 1e6 * learned["sequence_s"],
        "context_ns": 1e9 * learned["context_s"],
        "kv_tokens": kv_tokens,
        "context_tokens": 4096 if machine else 2560,
    }


def simulated(scene: Scene, profile: Path, coming: Sequence[Asked]) -> tuple[Result, float]:
    """The prediction of `pointsman simulate`, and the share of the time in which shards are busy."""
    trace = scene.folder / "trace.jsonl"
    trace.write_text("\n".join(request.line() for request in coming))
    command = [sys.executable, "-P", "-m", "router", "simulate", str(scene.file), "--trace", str(trace)]
    done = subprocess.run(
        [*command, "--profile", str(profile), "--json", "-"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    (run,) = json.loads(done.stdout)["runs"]
    (row,), (pool,) = run["classes"], run["pools"]
    ttft, tpot = ((row[name]["p50"], row[name]["p95"], row[name]["p99"]) for name in ("ttft_s", "tpot_s"))
    result = Result(ttft, tpot, pool["drawn_tokens"] / run["seconds"], pool["hit_rate"], row["requests"])
    return result, pool["utilisation"]


def rate_for(share: float, scene: Scene, profile: Path) -> float:
    """The request rate that keeps the shards busy for this share of the time, found by halving."""
    low, high = 0.25, 32.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        _, busy = simulated(scene, profile, asked(middle, 60.0, seed=9))
        low, high = (middle, high) if busy < share else (low, middle)
    return (low * high) ** 0.5


def result_of(coming: Sequence[Asked], heard: Sequence[Heard]) -> Result:
    """The clients' observations, summarised as the simulator does."""
    # a trace begins with its first request
    seconds = max(request.at_s + answer.last_s for request, answer in zip(coming, heard, strict=True)) - coming[0].at_s
    ttft = [answer.first_s for answer in heard]
    tpot = [(answer.last_s - answer.first_s) / (answer.tokens - 1) for answer in heard]
    hits = sum(answer.cached for answer in heard) / sum(answer.prompt for answer in heard)
    return Result(points(ttft), points(tpot), sum(answer.tokens for answer in heard) / seconds, hits, len(heard))


def points(values: Sequence[float]) -> tuple[float, float, float]:
    """P50, P95, P99."""
    ordered = sorted(values)
    p50, p95, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return p50, p95, p99


def rows(result: Result) -> Iterator[tuple[str, float, str]]:
    """Name, value and unit."""
    for name, values in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s)):
        for point, value in zip(("P50", "P95", "P99"), values, strict=True):
            yield f"{name} {point}", value * 1000, "ms"
    yield "out tokens/s", result.out_per_s, ""
    yield "hit rate", result.hit_rate * 100, "%"


def show(title: str, seen: Result, predicted: dict[str, Result]) -> None:
    """All figures, and the ratio of each prediction to the measured value."""
    print(f"\n{title}: {seen.requests} requests")
    print(f"{'':14}{'measured':>12}" + "".join(f"{name:>14}{'ratio':>8}" for name in predicted))
    columns = [[value for _, value, _ in rows(result)] for result in predicted.values()]
    for number, (name, was, unit) in enumerate(rows(seen)):
        cells = "".join(
            f"{column[number]:>11.1f} {unit:2}{column[number] / max(1e-9, was):>8.2f}" for column in columns
        )
        print(f"{name:14}{was:>9.1f} {unit:2}{cells}", flush=True)


def kv_tokens_of_local_shards() -> int:
    """Tokens of KV that a shard with the bundled model has."""
    model = Model.load(weights(), name=MODEL)
    return EngineOptions(kv_bytes=2**29).blocks(model.network.block_bytes) * BLOCK_TOKENS


async def profiles(scene: Scene, options: argparse.Namespace) -> dict[str, Path]:
    """The speeds given to simulations: the profile itself, and the one that a router has learnt."""
    async with up(scene) as url:
        # the first requests only teach the router the speed
        await measured(url, asked(options.calm, 20.0, seed=1))
        await measured(url, asked(options.calm, options.seconds, seed=2))
        profile = learnt_profile(await learnt(url), scene.machine())
    print("learnt:", json.dumps({name: round(value, 3) for name, value in profile.items()}), flush=True)
    learnt_at = scene.folder / "learnt.yaml"
    learnt_at.write_text(json.dumps({"own": profile}))
    return {"learnt": learnt_at} if scene.is_computing else {"given": L4, "learnt": learnt_at}


async def compare(scene: Scene, options: argparse.Namespace) -> None:
    """Measure, predict, print."""
    scene.write()
    paths = await profiles(scene, options)
    for load in options.loads:
        rate = rate_for(load, scene, next(iter(paths.values())))
        for number in range(options.rounds):
            coming = asked(rate, options.seconds, seed=20 + number)
            predicted = {name: simulated(scene, path, coming) for name, path in paths.items()}
            async with up(scene) as url:
                heard = await measured(url, coming)
            late_ms = max(answer.late_s for answer in heard) * 1000
            _, busy = next(iter(predicted.values()))
            title = (
                f"{rate:.2f} a second, shards {busy:.0%} busy as predicted, clients late by {late_ms:.0f} ms at most"
            )
            show(title, result_of(coming, heard), {name: result for name, (result, _) in predicted.items()})


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calm", type=float, default=1.0, help="requests a second while it is measured")
    parser.add_argument("--computing", action="store_true", help="`pointsman up` with the bundled model on CPUs")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_sleeping(options.serve)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PYTHONPATH"] = str(ROOT)
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(options.shards))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Scene(Path(folder), addresses, options.computing), options))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
