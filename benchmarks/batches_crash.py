"""A batch by an official client beside interactive requests, while the router is killed and started again.

    python benchmarks/batches_crash.py --client openai|anthropic [--lines 10000] [--rate 5] [--engines 4]

`pointsman serve` in front of stand-ins of an engine (`tests/standins/openai_compatible.py`: a token each 5 ms, no
model), all in processes of their own. First the interactive requests alone: streamed chats at random times. Then beside
a batch of which the router gets a SIGKILL in the middle; the time without a router and the first 5 s with it again are
told apart. Then beside programs that take as much CPU time as the batch took, and have nothing to do with the router.
Then alone again, and beside the naive client: the same requests in the batch's class, sent by the client itself, 64 at
a time. Prints times to the first token, lines per second and the CPU time of the programs. Exits with 1 unless each
line is in the results exactly once and progress never stepped back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
server: {{http: "127.0.0.1:{http}", grpc: off, state: off}}
"""
ANSWER_TOKENS = 4
AROUND_S = 5.0
SPINNERS, PIECE_S = 2, 0.001
SPIN = """
import random, sys, time
pieces, piece_s = map(float, sys.argv[1:])
while True:
    time.sleep(random.expovariate(pieces))
    until = time.process_time() + piece_s
    while time.process_time() < until:
        pass
"""
IN_CLASS = {"x-pointsman-priority": "batch"}


def question(number: int) -> list[Any]:
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
        asked: list[Any] = []
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


class Chat(NamedTuple):
    """One interactive request: when it was sent, and its time to the first token; None: it failed."""

    sent_at: float
    ttft_s: float | None


class Interactive:
    """Streamed chats at random times, `rate` a second, from a process of their own until `stop`."""

    def __init__(self, url: str, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_ask_until_told, args=(url, rate, theirs), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    async def begin(self) -> None:
        """Return once the first one was answered."""
        await asyncio.to_thread(self._pipe.recv)

    async def stop(self) -> list[Chat]:
        """All of them."""
        self._pipe.send("stop")
        chats: list[Chat] = await asyncio.to_thread(self._pipe.recv)
        self._process.join()
        return chats


def _ask_until_told(url: str, rate: float, told: Connection) -> None:
    told.send(asyncio.run(_ask_all(url, rate, told)))


async def _ask_all(url: str, rate: float, told: Connection) -> list[Chat]:
    rng, chats = random.Random(0), list[Chat]()

    async def ask() -> None:
        began_at, first_at = time.monotonic(), None
        try:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=ANSWER_TOKENS, stream=True
            )
            async for chunk in stream:
                if first_at is None and chunk.choices and chunk.choices[0].delta.content:
                    first_at = time.monotonic()
        except (openai.OpenAIError, httpx.HTTPError):
            # the second breaks off a stream
            first_at = None
        chats.append(Chat(began_at, None if first_at is None else first_at - began_at))

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        await ask()
        # the first one opened the connection
        chats.clear()
        told.send("begun")
        async with asyncio.TaskGroup() as group:
            while not told.poll():
                await asyncio.sleep(rng.expovariate(rate))
                group.create_task(ask())
    return chats


class Period(NamedTuple):
    """A part of the run, by the monotonic clock that all processes share, and the CPU seconds of each program in it."""

    name: str
    begin: float
    end: float
    cpu_s: Mapping[str, float]


class Run:
    """The programs, and the periods so far."""

    def __init__(self, args: argparse.Namespace, url: str, router: Program, engines: Sequence[Program]) -> None:
        self.args, self.url, self.router, self.engines = args, url, router, engines
        self.client = CLIENTS[args.client](url)
        self.others = Interactive(url, args.rate)
        self.periods: list[Period] = []

    @contextmanager
    def period(self, name: str) -> Iterator[None]:
        """What is done inside is a period."""
        begin, before = time.monotonic(), self._cpu_s()
        yield
        spent = {program: now - before[program] for program, now in self._cpu_s().items()}
        self.periods.append(Period(name, begin, time.monotonic(), spent))

    def _cpu_s(self) -> dict[str, float]:
        return {
            "router": _cpu_s(self.router.pid),
            "engines": sum(_cpu_s(engine.pid) for engine in self.engines),
            "interactive client": _cpu_s(self.others.pid),
            "batch client": time.process_time(),
        }

    def of(self, name: str) -> list[Period]:
        """The periods of this name."""
        return [period for period in self.periods if period.name == name]

    def batch_share(self) -> float:
        """The CPU time that the batch added in a second."""

        def share(name: str) -> float:
            periods = self.of(name)
            return sum(sum(each.cpu_s.values()) for each in periods) / sum(each.end - each.begin for each in periods)

        return max(0.0, share("batch") - share("alone"))


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def alone(run: Run) -> None:
    with run.period("alone"):
        await asyncio.sleep(run.args.alone)


async def batch(run: Run) -> bool:
    """Run the batch with one crash; whether each line was answered exactly once."""
    args, client, router = run.args, run.client, run.router
    began_at, seen = time.monotonic(), [0]

    async def until(lines: float) -> bool:
        """Wait for so many answers or the end; whether that is the end."""
        while True:
            await asyncio.sleep(args.poll)
            done, has_ended = await client.answered()
            seen.append(done)
            if has_ended or done >= lines:
                return has_ended

    with run.period("batch"):
        await client.begin(args.lines)
        print(f"the batch of {args.lines:,} lines was taken after {time.monotonic() - began_at:.1f} s", flush=True)
        has_ended = await until(args.lines / 2)
    killed_at, before = time.monotonic(), seen[-1]
    router.kill()
    await asyncio.to_thread(router.start)
    await asyncio.to_thread(router.wait_until_ready)
    away_s = time.monotonic() - killed_at
    seen.append((await client.answered())[0])
    print(f"kill -9 at {before:,} lines; back after {away_s:.1f} s with {seen[-1]:,} lines", flush=True)
    await asyncio.sleep(AROUND_S)
    run.periods.append(Period("restart", killed_at, time.monotonic(), {}))
    with run.period("batch"):
        is_over = has_ended or await until(math.inf)
    took_s = time.monotonic() - began_at
    found = await client.results()
    is_once = found == Counter((f"line-{number}", "succeeded") for number in range(args.lines))
    is_steady = seen == sorted(seen)
    print(f"{args.lines / took_s:.0f} lines/s, {args.lines / (took_s - away_s):.0f} while the router ran")
    print(f"{len(found):,} different lines, {sum(found.values()):,} answers, exactly once: {is_once}")
    print(f"progress never stepped back: {is_steady}", flush=True)
    return is_once and is_steady and is_over and not has_ended


async def control(run: Run) -> None:
    """Other programs take the CPU time that the batch took, in pieces of a millisecond."""
    with spinning(run.batch_share()), run.period("control"):
        await asyncio.sleep(run.args.alone)


@contextmanager
def spinning(share: float) -> Iterator[None]:
    """Inside, programs take so many CPU seconds in a second."""
    pieces = max(share / PIECE_S / SPINNERS, 0.01)
    command = [sys.executable, "-c", SPIN, str(pieces), str(PIECE_S)]
    spinners = [subprocess.Popen(command) for _ in range(SPINNERS)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


async def naive(run: Run) -> None:
    """The client sends the requests itself."""
    numbers = iter(range(run.args.lines))

    async def work() -> None:
        for number in numbers:
            await run.client.ask(number)

    with run.period("naive"):
        await asyncio.gather(*(work() for _ in range(run.args.concurrency)))


async def measure(run: Run) -> bool:
    try:
        await run.others.begin()
        await alone(run)
        is_right = await batch(run)
        await alone(run)
        await control(run)
        await alone(run)
        if run.args.naive:
            await naive(run)
        chats = await run.others.stop()
    finally:
        await run.client.close()
    for name in dict.fromkeys(period.name for period in run.periods):
        show(run, name, chats)
    return is_right


def show(run: Run, name: str, chats: Sequence[Chat]) -> None:
    periods = run.of(name)
    inside = [chat for chat in chats if any(each.begin <= chat.sent_at < each.end for each in periods)]
    ttfts = [chat.ttft_s for chat in inside if chat.ttft_s is not None]
    p50, p95 = (float(np.percentile(ttfts, share)) * 1e3 for share in (50, 95)) if ttfts else (math.nan, math.nan)
    took_s, spent = sum(each.end - each.begin for each in periods), Counter[str]()
    for each in periods:
        spent.update(each.cpu_s)
    shares = ", ".join(f"{program} {seconds / took_s:.0%}" for program, seconds in spent.items())
    failed = len(inside) - len(ttfts)
    print(
        f"{name:8} {len(ttfts):5} interactive requests: TTFT P50 {p50:.1f}, P95 {p95:.1f} ms, {failed} failed; {shares}"
    )
    if name == "naive":
        print(f"         {run.args.lines / took_s:.0f} lines/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=CLIENTS, default="openai")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=5.0, help="interactive requests a second, default 5")
    parser.add_argument("--alone", type=float, default=30.0, help="seconds of interactive requests alone, default 30")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.005, help="seconds that engines take for a token")
    parser.add_argument("--poll", type=float, default=0.1, help="seconds between two looks for progress")
    parser.add_argument("--no-naive", dest="naive", action="store_false", help="without the naive client")
    parser.add_argument("--concurrency", type=int, default=64, help="requests of the naive client at a time")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        http, *ports = free_ports(1 + args.engines)
        url, python = f"http://127.0.0.1:{http}", sys.executable
        engines = list[Program]()
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        for port, address in zip(ports, addresses, strict=True):
            command = [
                python,
                "-m",
                "tests.standins.openai_compatible",
                "--port",
                str(port),
                "--delay",
                str(args.delay),
            ]
            engine = Program(f"engine-{port}", command, folder, f"{address}/v1/models")
            stack.callback(engine.stop)
            engine.start()
            engine.wait_until_ready()
            engines.append(engine)
        file = folder / "sla.yaml"
        at = ", ".join(f'"{address}"' for address in addresses)
        file.write_text(SLA.format(engines=at, folder=folder, http=http))
        router = Program("router", [python, "-P", "-m", "router", "serve", str(file)], folder, f"{url}/readyz")
        stack.callback(router.stop)
        router.start()
        router.wait_until_ready()
        is_right = asyncio.run(measure(Run(args, url, router, engines)))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
