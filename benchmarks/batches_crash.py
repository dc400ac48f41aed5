"""A batch by an official client beside interactive requests, while the router is killed and started again.

    python benchmarks/batches_crash.py --client openai|anthropic [--lines 10000] [--rate 5] [--engines 4]

`pointsman serve` in front of stand-ins of an engine (`tests/standins/openai_compatible.py`: a token each 5 ms, no
model), all in processes of their own. First the interactive requests alone: streamed chats at random times. Then beside
a batch of which the router gets a SIGKILL in the middle. Then beside the naive client: the same requests in the batch's
class, sent by the client itself, 64 at a time. Prints times to the first token, and lines per second. Exits with 1
unless each line is in the results exactly once and progress never stepped back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import anthropic
import httpx
import numpy as np
import openai

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engines.programs import Program, free_ports

SLA = """
classes: {{chat: {{ttft_p95: 2s}}, batch: {{deadline: 24h}}}}
tenants: {{acme: {{anonymous: true}}}}
pools: {{own: {{kind: openai_compatible, at: [{engines}], model: m, options: {{max_requests: 64}}}}}}
batches: {{store: "{folder}/batches"}}
server: {{http: "127.0.0.1:{http}", grpc: off}}
"""
ANSWER_TOKENS = 4
IN_CLASS = {"x-pointsman-priority": "batch"}


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number % 50} say {number}"}]


class Client(ABC):
    """An official client with a batch of `lines` requests, which are named line-0 and so on."""

    @abstractmethod
    async def begin(self, lines: int) -> None:
        """Begin the batch."""

    @abstractmethod
    async def answered(self) -> tuple[int, bool]:
        """How many requests were answered, and whether the batch has ended."""

    @abstractmethod
    async def results(self) -> Counter[tuple[str, str]]:
        """The names in its results, with how each ended."""

    @abstractmethod
    async def ask(self, number: int) -> None:
        """Send one request of the batch by itself."""

    @abstractmethod
    async def close(self) -> None:
        """Close its connections."""


class OpenAIClient(Client):
    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=8, timeout=120)
        self._batch = ""

    async def begin(self, lines: int) -> None:
        texts = []
        for number in range(lines):
            body = {"model": "m", "messages": question(number), "max_tokens": ANSWER_TOKENS}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            texts.append(json.dumps(line))
        file = await self._client.files.create(file=("lines.jsonl", "\n".join(texts).encode()), purpose="batch")
        batch = await self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        self._batch = batch.id

    async def answered(self) -> tuple[int, bool]:
        batch = await self._client.batches.retrieve(self._batch)
        done = 0 if batch.request_counts is None else batch.request_counts.completed + batch.request_counts.failed
        return done, batch.status in {"completed", "failed", "expired", "cancelled"}

    async def results(self) -> Counter[tuple[str, str]]:
        batch, found = await self._client.batches.retrieve(self._batch), Counter[tuple[str, str]]()
        for file, how in ((batch.output_file_id, "succeeded"), (batch.error_file_id, "errored")):
            if file is not None:
                text = (await self._client.files.content(file)).text
                found.update((json.loads(line)["custom_id"], how) for line in text.splitlines())
        return found

    async def ask(self, number: int) -> None:
        await self._client.chat.completions.create(
            model="m", messages=question(number), max_tokens=ANSWER_TOKENS, extra_headers=IN_CLASS
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.close()


class AnthropicClient(Client):
    def __init__(self, url: str) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=8, timeout=120)
        self._batch = ""

    async def begin(self, lines: int) -> None:
        asked = []
        for number in range(lines):
            params = {"model": "m", "max_tokens": ANSWER_TOKENS, "messages": question(number)}
            asked.append({"custom_id": f"line-{number}", "params": params})
        self._batch = (await self._client.messages.batches.create(requests=asked)).id

    async def answered(self) -> tuple[int, bool]:
        batch = await self._client.messages.batches.retrieve(self._batch)
        progress: Mapping[str, int] = (batch.model_extra or {}).get("progress") or {}
        has_ended = batch.processing_status == "ended"
        return sum(value for name, value in progress.items() if name in _ENDS), has_ended

    async def results(self) -> Counter[tuple[str, str]]:
        results = await self._client.messages.batches.results(self._batch)
        return Counter([(each.custom_id, each.result.type) async for each in results])

    async def ask(self, number: int) -> None:
        await self._client.messages.create(
            model="m", messages=question(number), max_tokens=ANSWER_TOKENS, extra_headers=IN_CLASS
        )

    async def close(self) -> None:
        await self._client.close()


_ENDS = ("succeeded", "errored", "canceled", "expired")
CLIENTS = {"openai": OpenAIClient, "anthropic": AnthropicClient}


class Interactive:
    """Streamed chats at random times, `rate` a second, from a process of their own until `stop`."""

    def __init__(self, url: str, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_ask_until_told, args=(url, rate, theirs), daemon=True)
        self._process.start()

    async def begin(self) -> None:
        """Return once the first one was answered."""
        await asyncio.to_thread(self._pipe.recv)

    async def stop(self) -> str:
        """Times to the first token, for reading."""
        self._pipe.send("stop")
        ttfts, failed = await asyncio.to_thread(self._pipe.recv)
        self._process.join()
        p50, p95 = (float(np.percentile(ttfts, share)) * 1e3 for share in (50, 95))
        return f"{len(ttfts)} interactive requests: TTFT P50 {p50:.1f}, P95 {p95:.1f} ms, {failed} failed"


def _ask_until_told(url: str, rate: float, told: Connection) -> None:
    told.send(asyncio.run(_ask_all(url, rate, told)))


async def _ask_all(url: str, rate: float, told: Connection) -> tuple[list[float], int]:
    """Times to the first token, and how many requests failed."""
    rng, ttfts, failures = random.Random(0), list[float](), list[Exception]()

    async def ask() -> None:
        began_at, first_at = time.monotonic(), None
        try:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=ANSWER_TOKENS, stream=True
            )
            async for chunk in stream:
                if first_at is None and chunk.choices and chunk.choices[0].delta.content:
                    first_at = time.monotonic()
        except (openai.OpenAIError, httpx.HTTPError) as error:
            # the second breaks off a stream
            failures.append(error)
        else:
            assert first_at is not None
            ttfts.append(first_at - began_at)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        await ask()
        # the first one opened the connection
        ttfts.clear()
        told.send("begun")
        async with asyncio.TaskGroup() as group:
            while not told.poll():
                await asyncio.sleep(rng.expovariate(rate))
                group.create_task(ask())
    return ttfts, len(failures)


async def alone(url: str, args: argparse.Namespace) -> None:
    others = Interactive(url, args.rate)
    await others.begin()
    await asyncio.sleep(args.alone)
    print(f"alone       {await others.stop()}", flush=True)


async def batch(client: Client, router: Program, url: str, args: argparse.Namespace) -> bool:
    """Run the batch with one crash; whether each line was answered exactly once."""
    others = Interactive(url, args.rate)
    await others.begin()
    began_at = time.monotonic()
    await client.begin(args.lines)
    print(f"the batch of {args.lines:,} lines was taken after {time.monotonic() - began_at:.1f} s", flush=True)
    away_s, has_ended, seen = 0.0, False, [0]
    while not has_ended:
        await asyncio.sleep(0.1)
        done, has_ended = await client.answered()
        seen.append(done)
        if not away_s and not has_ended and done >= args.lines / 2:
            killed_at = time.monotonic()
            router.kill()
            await asyncio.to_thread(router.start)
            await asyncio.to_thread(router.wait_until_ready)
            away_s = time.monotonic() - killed_at
            after, _ = await client.answered()
            seen.append(after)
            print(f"kill -9 at {done:,} lines; back after {away_s:.1f} s with {after:,} lines", flush=True)
    took_s = time.monotonic() - began_at
    shown = await others.stop()
    found = await client.results()
    is_once = found == Counter((f"line-{number}", "succeeded") for number in range(args.lines))
    is_steady = seen == sorted(seen)
    print(f"batch       {shown}")
    print(f"            {args.lines / took_s:.0f} lines/s, {args.lines / (took_s - away_s):.0f} while the router ran")
    print(f"            {len(found):,} different lines, {sum(found.values()):,} answers, exactly once: {is_once}")
    print(f"            progress never stepped back: {is_steady}", flush=True)
    return is_once and is_steady and away_s > 0.0


async def naive(client: Client, url: str, args: argparse.Namespace) -> None:
    """The client sends the requests itself."""
    others = Interactive(url, args.rate)
    await others.begin()
    began_at, numbers = time.monotonic(), iter(range(args.lines))

    async def work() -> None:
        for number in numbers:
            await client.ask(number)

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    took_s = time.monotonic() - began_at
    print(f"naive       {await others.stop()}\n            {args.lines / took_s:.0f} lines/s", flush=True)


async def measure(router: Program, url: str, args: argparse.Namespace) -> bool:
    client = CLIENTS[args.client](url)
    try:
        await alone(url, args)
        is_right = await batch(client, router, url, args)
        await naive(client, url, args)
    finally:
        await client.close()
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=CLIENTS, default="openai")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=5.0, help="interactive requests a second, default 5")
    parser.add_argument("--alone", type=float, default=30.0, help="seconds of interactive requests alone, default 30")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=64, help="requests of the naive client at a time")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        http, *ports = free_ports(1 + args.engines)
        url, python = f"http://127.0.0.1:{http}", sys.executable
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        for port, address in zip(ports, addresses, strict=True):
            command = [python, "-m", "tests.standins.openai_compatible", "--port", str(port), "--delay", "0.005"]
            engine = Program(f"engine-{port}", command, folder, f"{address}/v1/models")
            stack.callback(engine.stop)
            engine.start()
            engine.wait_until_ready()
        file = folder / "sla.yaml"
        engines = ", ".join(f'"{address}"' for address in addresses)
        file.write_text(SLA.format(engines=engines, folder=folder, http=http))
        router = Program("router", [python, "-m", "router", "serve", str(file)], folder, f"{url}/readyz")
        stack.callback(router.stop)
        router.start()
        router.wait_until_ready()
        is_right = asyncio.run(measure(router, url, args))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
