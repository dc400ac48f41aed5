"""Four shards are restarted one after the other under load: what is cached before, meanwhile and afterwards.

    python -m benchmarks.rolling_restart [--documents 96] [--rate 3] [--seconds 20] [--seed 1]

Four shards with the bundled model, each a process, behind a router in this process. Questions about documents of about
1,500 tokens, all equally often, arrive at `--rate` a second (Poisson). When every document was asked about once, the
first `--seconds` are measured; then each shard gets SIGTERM and is started again as soon as it has ended, and takes
requests for five seconds before the next one; then `--seconds` are measured again. In three ways:

- alone: the shards exchange no KV;
- lending: with `--kv-listen`, but the router names no shards that take the KV of one that stops;
- handing over: as it is.

Printed is the cached share of the prompts' tokens, and the mean and P95 of the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from policies.sla.parse import parse
from router.fleet.cluster.cluster import Cluster
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import Document, prompt
from tests.chaos.continued import KEY, SLA, _serves
from tests.engines.programs import Program, free_ports
from tests.engines.routed import a_document

SHARDS = 4
SETTLE_S = 5.0
WAYS = ("alone", "lending", "handing over")


@dataclass
class Asked:
    """The requests of one part of a run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        share = self.cached_tokens / max(1, self.prompt_tokens)
        p95 = statistics.quantiles(self.ttft_s, n=20)[-1]
        times = f"{1000 * statistics.mean(self.ttft_s):5.0f} {1000 * p95:6.0f}"
        return f"{share:6.1%} {times} {len(self.ttft_s):5} {self.failed:3}"


@dataclass
class Load:
    """Asks about documents; `into` gets the answers of questions that are asked from now on."""

    http: aiohttp.ClientSession
    url: str
    documents: list[Document]
    rng: random.Random
    into: Asked = field(default_factory=Asked)

    async def ask(self, document: Document) -> None:
        """One streamed question."""
        into, began = self.into, time.monotonic()
        text = prompt(document.text, self.rng.choice(document.questions).question)
        body = {"model": NAME, "prompt": text, "max_tokens": 8, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {KEY}"}
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as reply:
            usage, first_s = None, 0.0
            async for line in reply.content:
                first_s = first_s or time.monotonic() - began
                if line.startswith(b"data: {") and b'"usage":{' in line.replace(b" ", b""):
                    usage = line
        if reply.status != 200 or usage is None:
            into.failed += 1
            return
        counts = json.loads(usage[6:])["usage"]
        into.prompt_tokens += counts["prompt_tokens"]
        into.cached_tokens += counts["prompt_tokens_details"]["cached_tokens"]
        into.ttft_s.append(first_s)

    async def go_on(self, rate: float) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                await asyncio.sleep(self.rng.expovariate(rate))
                asking.create_task(self.ask(self.rng.choice(self.documents)))


def a_shard(name: str, port: int, folder: Path, *, exchanges: bool) -> Program:
    """A shard with the bundled model, on one thread."""
    options = ["--listen", f"127.0.0.1:{port}", "--threads", "1", "--kv-memory", "0.1", "--host-memory", "0.3"]
    if exchanges:
        options += ["--kv-listen", "127.0.0.1:0"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    return Program(name, (sys.executable, "-P", "-m", "shards", *options), folder, "", environment=environment)


@contextmanager
def naming_nothing(is_so: bool) -> Iterator[None]:
    """Routers name no shard that takes over."""
    usual = Cluster.hand_over
    if is_so:
        Cluster.hand_over = lambda self, name: None  # type: ignore[method-assign] # noqa: ARG005
    try:
        yield
    finally:
        Cluster.hand_over = usual  # type: ignore[method-assign]


async def run(way: str, arguments: argparse.Namespace, folder: Path) -> list[tuple[str, Asked]]:
    """The three parts of one run."""
    ports = free_ports(SHARDS)
    programs = [a_shard(f"own-{at}", port, folder, exchanges=way != "alone") for at, port in enumerate(ports)]
    rng = random.Random(arguments.seed)
    documents = [a_document(arguments.seed * 1000 + at, tokens=1500) for at in range(arguments.documents)]
    try:
        for program in programs:
            program.start()
        await asyncio.gather(*map(_serves, ports))
        file = parse(SLA.format(at=[f"127.0.0.1:{port}" for port in ports]))
        async with Router(file) as router, aiohttp.ClientSession() as http:
            assert await router.wait_until_reached(30)
            assert router.http_url is not None
            load = Load(http, router.http_url, documents, rng)
            for document in documents:
                await load.ask(document)
            parts = [("before", Asked()), ("during", Asked()), ("after", Asked())]
            load.into = parts[0][1]
            asking = asyncio.create_task(load.go_on(arguments.rate))
            await asyncio.sleep(arguments.seconds)
            load.into = parts[1][1]
            began = time.monotonic()
            for program, port in zip(programs, ports, strict=True):
                await asyncio.to_thread(program.stop)
                program.start()
                await _serves(port)
                await asyncio.sleep(SETTLE_S)
            print(f"{way}: the restarts took {time.monotonic() - began:.0f} s", file=sys.stderr)
            load.into = parts[2][1]
            await asyncio.sleep(arguments.seconds)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return parts
    finally:
        for program in programs:
            program.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    print(f"{'':14}{'':8} cached  TTFT: mean   P95  asked failed")
    for way in arguments.ways:
        with tempfile.TemporaryDirectory() as folder, naming_nothing(way == "lending"):
            for part, asked in asyncio.run(run(way, arguments, Path(folder))):
                print(f"{way:14}{part:8} {asked}", flush=True)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
