"""The simulation against the real thing: two shards on this machine's CPU, then the same requests simulated.

    python benchmarks/simulation.py [--seconds 60] [--per-second 2.0]

Runs `pointsman up` with the bundled model and a decision log, sends prompts of 200 to 2,000 tokens at random times, half
of which begin like another one, and reads what the router has learnt of its shards' speed from /metrics. With that as a
profile the decision log is replayed by `pointsman simulate`, and both say their times to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from shards.options import EngineOptions

ROOT = Path(__file__).parents[1]
SLA = "classes: {chat: {ttft_p95: 5s}}\npools: {own: {kind: shard, local: 2, model: bundled}}\n"
URL = "http://127.0.0.1:18080"
LEARNT = re.compile(r'pointsman_backend_latency\{backend="(own-\d)",coefficient="(\w+)"\} (\S+)')


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Token ids; every other prompt begins with one of four documents of 512 tokens."""
    rng = random.Random(seed)
    documents = [[rng.randrange(50, 400) for _ in range(512)] for _ in range(4)]
    made = []
    for at in range(count):
        rest = [rng.randrange(50, 400) for _ in range(rng.randrange(200, 1400))]
        made.append([*documents[at % 4], *rest] if at % 2 else rest)
    return made


async def wait_until_ready(session: aiohttp.ClientSession) -> None:
    for _ in range(300):
        try:
            async with session.get(f"{URL}/readyz") as reply:
                if reply.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the router is not ready")


async def ask(session: aiohttp.ClientSession, model: str, prompt: list[int]) -> float:
    """Seconds to the first piece of an answer of 32 tokens, as a client sees them."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "stream": True, "ignore_eos": True, "temperature": 0}
    began_at, first_at = time.perf_counter(), 0.0
    async with session.post(f"{URL}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {") and not first_at:
                first_at = time.perf_counter()
    return first_at - began_at


async def drive(seconds: float, per_second: float) -> tuple[list[float], str]:
    """Times to first token, and the metrics at the end. The first ten requests only warm up what learns."""
    rng = random.Random(2)
    async with aiohttp.ClientSession() as session:
        await wait_until_ready(session)
        async with session.get(f"{URL}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        calls = []
        for prompt in prompts(int(seconds * per_second)):
            calls.append(asyncio.create_task(ask(session, model, prompt)))
            await asyncio.sleep(rng.expovariate(per_second))
        seen = await asyncio.gather(*calls)
        async with session.get(f"{URL}/metrics") as reply:
            return list(seen), await reply.text()


def profile_of(metrics: str) -> str:
    """The mean of what is learnt of the shards, in the words of a profile."""
    found: dict[str, list[float]] = {}
    for _, coefficient, value in LEARNT.findall(metrics):
        found.setdefault(coefficient, []).append(float(value))
    mean = {name: sum(values) / len(values) for name, values in found.items()}
    way_s = max(0.0, mean["fixed_s"] - mean["step_s"])
    # what a router sees of a token holds its part of the steps that prompts are cut into
    own_share = max(0.1, 1.0 - mean["step_s"] / EngineOptions().step_s)
    entries = {
        "way_ms": 1e3 * way_s,
        "step_ms": 1e3 * mean["step_s"],
        "token_us": 1e6 * mean["token_s"] * own_share,
        "pair_ns": 1e9 * mean["pair_s"] * own_share,
        "sequence_us": 1e6 * mean["sequence_s"],
        "context_ns": 1e9 * mean["context_s"],
    }
    return "own: {" + ", ".join(f"{name}: {value:.6f}" for name, value in entries.items()) + ", kv_tokens: 100k}\n"


def quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return "  ".join(f"P{share} {1000 * ordered[int(share * len(ordered) / 100)]:7.1f} ms" for share in (50, 90, 95))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--per-second", type=float, default=2.0)
    chosen = options.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        sla, log, profile = (Path(folder) / name for name in ("sla.yaml", "log.jsonl", "profile.yaml"))
        sla.write_text(SLA)
        up = [sys.executable, "-m", "router", "up", str(sla), "--http", URL[7:], "--grpc", "127.0.0.1:0"]
        server = subprocess.Popen(
            [*up, "--admin", "off", "--decisions", str(log)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            seen, metrics = asyncio.run(drive(chosen.seconds, chosen.per_second))
        finally:
            server.terminate()
            server.wait(30)
        profile.write_text(profile_of(metrics))
        print(profile.read_text().strip())
        logged = [json.loads(line)["ttft_s"] for line in log.read_text().splitlines()]
        simulate = ["simulate", str(sla), "--decisions", str(log), "--profile", str(profile), "--json", "-"]
        done = subprocess.run(
            [sys.executable, "-m", "router", *simulate], cwd=ROOT, env=environment, capture_output=True, check=True
        )
        (run,) = json.loads(done.stdout)["runs"]
        spread = run["classes"][0]["ttft_s"]
        print(f"{len(seen)} requests")
        print(f"client     {quantiles(seen)}")
        print(f"router     {quantiles(logged)}")
        print(f"simulated  P50 {1000 * spread['p50']:7.1f} ms  P95 {1000 * spread['p95']:.1f} ms")
        print(f"agreement  {run['agreement']}, hit rate simulated {run['pools'][0]['hit_rate']:.1%}")


if __name__ == "__main__":
    main()
