"""Second requests: the times to a first token with and without them, while shards stand still at random moments.

    python benchmarks/hedging.py [--seconds 240] [--rate 6] [--every 12]

Two shards with the bundled model run in processes of their own behind a router. One of them, drawn anew each time, is
stopped (SIGSTOP) for 0.3 to 1.2 s every 12 s on average: as with a pause of a garbage collector, a busy host or a
network that loses packets. Two tenants send the same load at the same time: the class of one has `hedge: p95`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import grpc

from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import document, facts_within, prompt
from tests.chaos.continued import a_shard
from tests.engines.programs import Program, free_ports

SLA = """
classes: {{plain: {{}}, hedged: {{hedge: p95}}}}
tenants:
  plain: {{keys: ["${{env:PLAIN}}"]}}
  hedged: {{keys: ["${{env:HEDGED}}"]}}
pools: {{own: {{kind: shard, model: bundled, at: {at}}}}}
rules: [{{when: {{tenant: hedged}}, class: hedged}}, {{class: plain}}]
server: {{http: "127.0.0.1:0", grpc: off, metrics: open, strangers: off}}
"""
CLASSES = ("plain", "hedged")


def a_prompt(rng: random.Random) -> str:
    about = document(rng, facts_within(200))
    return prompt(about.text, rng.choice(about.questions).question)


async def first_token_s(http: aiohttp.ClientSession, url: str, tenant: str, text: str) -> float:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 16}
    began_at, first_s = time.perf_counter(), None
    headers = {"authorization": f"Bearer key-of-{tenant}"}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if (
                first_s is None
                and line.startswith(b"data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                first_s = time.perf_counter() - began_at
    return time.perf_counter() - began_at if first_s is None else first_s


async def pauses(programs: Sequence[Program], every_s: float, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(1 / every_s))
        process = rng.choice(programs).pid
        os.killpg(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.3, 1.2))
        finally:
            os.killpg(process, signal.SIGCONT)


def told(tenant: str, times: Sequence[float]) -> str:
    ordered = sorted(times)
    quantiles = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.95, 0.99)]
    return " | ".join([tenant, str(len(ordered)), *(f"{1000 * value:.0f}" for value in (*quantiles, ordered[-1]))])


async def measure(folder: Path, seconds: float, rate: float, every_s: float) -> None:
    ports, rng = free_ports(2), random.Random(1)
    programs = [a_shard(f"own-{at}", port, folder) for at, port in enumerate(ports)]
    try:
        for program in programs:
            program.start()
        for port in ports:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(90):
                await channel.channel_ready()
        keys = {name.upper(): f"key-of-{name}" for name in CLASSES}
        sla = parse(SLA.format(at=[f"127.0.0.1:{port}" for port in ports]), environment=keys)
        async with Router(sla) as router, aiohttp.ClientSession() as http:
            assert await router.wait_until_reached(30)

            async def load(for_s: float) -> dict[str, list[float]]:
                times: dict[str, list[float]] = {name: [] for name in CLASSES}
                until = time.monotonic() + for_s

                async def one(name: str) -> None:
                    times[name].append(await first_token_s(http, router.http_url, name, a_prompt(rng)))

                async with asyncio.TaskGroup() as group:
                    while time.monotonic() < until:
                        for name in CLASSES:
                            group.create_task(one(name))
                        await asyncio.sleep(rng.expovariate(rate / 2))
                return times

            await load(min(20.0, seconds))
            pausing = asyncio.create_task(pauses(programs, every_s, rng))
            times = await load(seconds)
            pausing.cancel()
            with suppress(asyncio.CancelledError):
                await pausing
            async with http.get(f"{router.http_url}/metrics") as reply:
                page = await reply.text()
        print("| class | requests | TTFT P50, ms | P90 | P95 | P99 | longest |\n|---|---|---|---|---|---|---|")
        for name in CLASSES:
            print(f"| {told(name, times[name])} |")
        print(*(line for line in page.splitlines() if "events_total" in line and "hedge" in line), sep="\n")
    finally:
        for program in programs:
            program.kill()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second, of both classes together")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two pauses, on average")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), chosen.seconds, chosen.rate, chosen.every))


if __name__ == "__main__":
    main()
