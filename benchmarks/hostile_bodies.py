"""Memory and delays of a router that gets the worst bodies, sixteen at once from two tenants, beside a good client.

    python benchmarks/hostile_bodies.py [--bytes 16000000] [--only NAME ...]

The bodies are those of `worst_bodies.py`, the largest that is let in, and a gzip bomb. For each of them a router is
started, with two engines, which are stand-ins: one for the bodies that are let in, which it takes long to read, and one
for the good client. A client of a third tenant sends 20 short chats a second, first alone and
then while sixteen bodies are sent at once, three times. Printed are the statuses, the peak of the router's memory
(VmHWM) without and with the bodies, and the good client's times. Exits with 1 if a router takes more than `--most` MiB
or a good request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.worst_bodies import CHAT, WORST
from shards.bundled import weights
from tests.engines.programs import free_ports

TENANTS = ("bad", "worse", "good")
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
tenants: {{{tenants}}}
pools:
  own: {{kind: openai_compatible, at: ["http://127.0.0.1:{engine}"], model: m, tokenizer: "{tokenizer}"}}
  good: {{kind: openai_compatible, at: ["http://127.0.0.1:{other}"], model: good, tokenizer: "{tokenizer}"}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:{http}", grpc: off, state: off}}
"""
EVERY_S = 0.05
"""Time between two requests of the good client."""

ALONE_S = 3.0
BURSTS = 3
AT_ONCE = 16


class Seen(NamedTuple):
    """Of one kind of body. Memory in MiB, times in milliseconds."""

    statuses: Mapping[int, int]
    idle_mib: float
    peak_mib: float
    alone_p99: float
    p99: float
    slowest: float
    good_failures: int
    burst_s: float


def key_of(tenant: str) -> str:
    """A key."""
    return f"a-key-of-{tenant}"


def posted(path: str, body: bytes, tenant: str, *headers: str) -> bytes:
    """A request on a connection of its own."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: a",
        f"Authorization: Bearer {key_of(tenant)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


async def answered(port: int, request: bytes) -> int:
    """The status of the answer, once all of it came; 0 if none came."""
    with suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            answer = await reader.read()
            return int(answer.split(b" ", 2)[1]) if answer else 0
        finally:
            writer.transport.abort()
    return 0


def burst(port: int, path: str, body: bytes, headers: tuple[str, ...]) -> dict[int, int]:
    """Statuses of `body`, sent AT_ONCE times at once by two tenants."""

    async def run() -> dict[int, int]:
        requests = [posted(path, body, tenant, *headers) for tenant in TENANTS[:2]]
        return Counter(await asyncio.gather(*(answered(port, requests[at % 2]) for at in range(AT_ONCE))))

    return asyncio.run(run())


async def good_client(port: int, until: asyncio.Event) -> tuple[list[float], int]:
    """Milliseconds of each request, and how many failed."""
    chat = {"model": "good", "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 5}
    request, times, failures = posted(CHAT, json.dumps(chat).encode(), "good"), list[float](), 0

    async def one() -> None:
        nonlocal failures
        began = time.perf_counter()
        failures += await answered(port, request) != 200
        times.append((time.perf_counter() - began) * 1e3)

    async with asyncio.TaskGroup() as group:
        while not until.is_set():
            group.create_task(one())
            await asyncio.sleep(EVERY_S)
    return times, failures


def memory_of(pid: int, name: str) -> float:
    """A value of /proc/pid/status in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@contextmanager
def a_router(folder: Path) -> Iterator[tuple[int, int]]:
    """The port and the process id of a router with its engines."""
    engine, other, http = free_ports(3)
    hashes = {name: hashlib.sha256(key_of(name).encode()).hexdigest() for name in TENANTS}
    tenants = ", ".join(f'{name}: {{keys: ["sha256:{digest}"]}}' for name, digest in hashes.items())
    file = folder / "sla.yaml"
    file.write_text(SLA.format(tenants=tenants, engine=engine, other=other, http=http, tokenizer=weights()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    a_standin = ("-m", "tests.standins.openai_compatible", "--delay", "0")
    commands = (
        ("-P", "-m", "router", "serve", str(file)),
        (*a_standin, "--port", str(engine)),
        (*a_standin, "--port", str(other), "--model", "good"),
    )
    programs = [
        subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for command in commands
    ]
    try:
        yield http, programs[0].pid
    finally:
        for program in programs:
            program.terminate()
        for program in programs:
            program.wait()


async def measured(path: str, body: bytes, headers: tuple[str, ...], senders: ProcessPoolExecutor) -> Seen:
    """What `body` does to a router."""
    with tempfile.TemporaryDirectory() as folder, a_router(Path(folder)) as (port, pid):
        chat = {"model": "good", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        first = posted(CHAT, json.dumps(chat).encode(), "good")
        async with asyncio.timeout(60):
            while await answered(port, first) != 200:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        alone, _ = await _beside(port, asyncio.sleep(ALONE_S))
        idle = memory_of(pid, "VmHWM")
        statuses, began = Counter[int](), time.perf_counter()

        async def bursts() -> None:
            for _ in range(BURSTS):
                loop = asyncio.get_running_loop()
                statuses.update(await loop.run_in_executor(senders, burst, port, path, body, headers))

        times, failures = await _beside(port, bursts())
        seconds = time.perf_counter() - began
        return Seen(statuses, idle, memory_of(pid, "VmHWM"), _p99(alone), _p99(times), max(times), failures, seconds)


async def _beside(port: int, work: object) -> tuple[list[float], int]:
    until = asyncio.Event()
    good = asyncio.create_task(good_client(port, until))
    await work  # type: ignore[misc]
    until.set()
    return await good


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def bodies(size: int) -> Iterator[tuple[str, str, bytes, tuple[str, ...]]]:
    """Name, path, body and headers of each kind."""
    for name, shape in WORST.items():
        yield name, shape.field.path, shape.of(size), ()
    small = WORST["parts that are texts"].of(130_000)
    yield "parts that are texts, as many as fit", CHAT, small.ljust(size), ()
    bomb = gzip.compress(WORST["tools of one name"].of(size), 1)
    yield "the first of them in gzip", WORST["tools of one name"].field.path, bomb, ("Content-Encoding: gzip",)


async def run(options: argparse.Namespace) -> bool:
    """Measure each kind; whether all is within the bounds."""
    print("| body | answers | router before | peak | good client alone, P99 | beside it | longest | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    is_well = True
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as senders:
        for name, path, body, headers in bodies(options.bytes):
            if options.only and name not in options.only:
                continue
            seen = await measured(path, body, headers, senders)
            shown = ", ".join(f"{count} x {status}" for status, count in sorted(seen.statuses.items()))
            print(
                f"| {name}, {len(body) / 1e6:.1f} MB | {shown} | {seen.idle_mib:.0f} MiB | {seen.peak_mib:.0f} MiB "
                f"| {seen.alone_p99:.0f} ms | {seen.p99:.0f} ms | {seen.slowest:.0f} ms | {seen.burst_s:.1f} |",
                flush=True,
            )
            is_well &= seen.peak_mib <= options.most and not seen.good_failures
    return is_well


def main() -> None:
    """Run the command line."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--bytes", type=int, default=16_000_000, help="size of each body; default: 16000000")
    reader.add_argument("--only", nargs="*", help="names of bodies; default: all")
    reader.add_argument("--most", type=int, default=2048, help="MiB that a router may take; default: 2048")
    if not asyncio.run(run(reader.parse_args())):
        sys.exit(1)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
