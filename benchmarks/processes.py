"""CPU and rates of `serve` with one and several processes, for tenants with and without limits.

Two cheap engines of OpenAI's dialect answer whole answers at once; the client keeps `--at-once`
requests under way. All settings run beside each other and are asked in turns:

    python benchmarks/processes.py [--processes 1 2] [--requests 1000] [--rounds 12] [--at-once 32] [--users]

CPU is the user and system time of the router's processes and of their store, in microseconds per request, by the
kernel's own account: other work on the machine, the client and the engines do not count in it. `two cores` is how many
requests two cores would take in a second if these processes had them alone; the rate by the wall clock depends on what
the client and the engines take of the machine. `--users` sends each request for another end user with limits.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import aiohttp
import uvloop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gateway import CHAT, SHAPES, body_of
from tests.engines.programs import free_ports

LIMITS = {
    "requests_per_minute": "10M",
    "tokens_per_minute": "10000M",
    "budget_per_day": "100000M",
    "concurrent": 4096,
}
OF_USERS = {"requests_per_minute": 600, "budget_per_day": "1M"}
CORES = 2


_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def length_of(data: bytes | bytearray) -> int | None:
    """The length of the HTTP message that `data` begins with; None until its head is there."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    found = _LENGTH.search(data, 0, head)
    return head + 4 + (0 if found is None else int(found[1]))


class Engine(asyncio.Protocol):
    """Answers each request with the same bytes."""

    WHOLE: ClassVar[bytes] = b""
    MODELS: ClassVar[bytes] = b""

    def __init__(self) -> None:
        self.data = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (length := length_of(self.data)) is not None and len(self.data) >= length:
            self.transport.write(self.WHOLE if self.data.startswith(b"POST") else self.MODELS)
            del self.data[:length]


class Client(asyncio.Protocol):
    """One connection, which sends the next request after each answer until there are none left."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.data, self.requests = bytearray(), requests
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def begin(self) -> asyncio.Future[None]:
        """Send the first one; done when there are no more."""
        request = next(self.requests, None)
        if request is None:
            self.transport.close()
            self.is_over.set_result(None)
        else:
            self.transport.write(request)
        return self.is_over

    def data_received(self, data: bytes) -> None:
        self.data += data
        if (length := length_of(self.data)) is not None and len(self.data) >= length:
            if not self.data.startswith(b"HTTP/1.1 200"):
                self.is_over.set_exception(AssertionError(bytes(self.data[:500])))
            self.data.clear()
            self.begin()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_exception(error or ConnectionError("the router hung up"))


async def engine(port: int) -> None:
    """Serve as an engine of OpenAI's dialect."""
    message = {"role": "assistant", "content": "word " * 33}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 50, "completion_tokens": 33, "total_tokens": 83}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "us"}]}
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    for name, content in (("WHOLE", answer), ("MODELS", models)):
        body = json.dumps(content)
        setattr(Engine, name, (head.format(len(body)) + body).encode())
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
    await server.serve_forever()


class Cost(NamedTuple):
    """Microseconds of CPU per request of the routers and of their store, and requests per second by the wall clock."""

    routers_us: float
    store_us: float
    rate: float

    def most(self, count: int) -> float:
        """Most requests per second of `count` processes and their store that have CORES alone."""
        return min(count * 1e6 / self.routers_us, CORES * 1e6 / (self.routers_us + self.store_us))


def cpu_s(pid: int) -> float:
    """User and system time of a process, in nanoseconds' steps (CPUCLOCK_SCHED, as clock_getcpuclockid(3) has it)."""
    return time.clock_gettime(~pid << 3 | 2)


def children(pid: int) -> dict[int, str]:
    """The processes that descend from `pid`, with their commands."""
    found: dict[int, str] = {}
    for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found[int(each)] = command
        found |= children(int(each))
    return found


class Command(NamedTuple):
    """A running `serve` with `count` processes."""

    processes: int
    url: str
    process: asyncio.subprocess.Process


async def measured(command: Command, key: str, numbers: Iterator[int], options: argparse.Namespace) -> Cost:
    """Send the requests of one tenant, on connections that are new, so that they lie at all processes."""
    parent, port = command.process.pid, int(command.url.rpartition(":")[2])

    def requests() -> Iterator[bytes]:
        for number in itertools.islice(numbers, options.requests):
            body = body_of(SHAPES["short"], number)
            if options.users:
                body = json.dumps({**json.loads(body), "user": f"u{number % 1000}"}).encode()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
            )
            yield f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    left, loop = requests(), asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(left), "127.0.0.1", port))[1] for _ in range(options.at_once)
    ]
    below = children(parent)
    stores = {pid for pid, words in below.items() if "redis-server" in words or "valkey-server" in words}
    before, began = {pid: cpu_s(pid) for pid in (parent, *below)}, time.perf_counter()
    await asyncio.gather(*(client.begin() for client in clients))
    seconds = time.perf_counter() - began
    taken = {pid: 1e6 * (cpu_s(pid) - at) / options.requests for pid, at in before.items()}
    of_stores = sum(taken[pid] for pid in stores)
    return Cost(sum(taken.values()) - of_stores, of_stores, options.requests / seconds)


async def is_ready(http: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process, count: int) -> None:
    """Wait until all `count` processes run and one is ready, and a little longer."""
    async with asyncio.timeout(60):
        while True:
            with suppress(OSError):
                routers = [each for each in children(process.pid).values() if "--process " in each]
                async with http.get(f"{url}/readyz") as reply:
                    if reply.status == 200 and len(routers) >= count * (count > 1):
                        break
            assert process.returncode is None, "it has ended"
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


KEYS = {"without": "a-key-without-limits", "with": "a-key-with-limits"}


async def started(
    http: aiohttp.ClientSession, count: int, engines: list[str], folder: Path, options: argparse.Namespace
) -> Command:
    """Start the command with `count` processes, for a tenant without and one with limits."""
    (port,) = free_ports(1)
    digests = {name: f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()}
    limited = {"limits": LIMITS, **({"end_users": {"limits": OF_USERS}} if options.users else {})}
    pool = {"kind": "openai_compatible", "at": engines, "model": "m", "options": {"max_requests": 256}}
    sla = {
        "classes": {"chat": {"ttft_p95": "60s"}},
        "tenants": {"free": {"keys": [digests["without"]]}, "bound": {"keys": [digests["with"]], **limited}},
        "cost": {"uncached": 1, "cached": 0.1, "output": 4},
        "pools": {"engines": pool},
        "rules": [{"class": "chat"}],
        "server": {"http": f"127.0.0.1:{port}", "grpc": "off", "state": str(folder / f"state-{count}")},
    }
    file = folder / f"{count}.yaml"
    file.write_text(json.dumps(sla))
    more = () if count == 1 else ("--processes", str(count))
    with (folder / "log").open("ab") as log:
        words = (sys.executable, "-P", "-m", "router", "serve", str(file), *more)
        process = await asyncio.create_subprocess_exec(*words, stderr=log, stdout=log, cwd=ROOT)
    command = Command(count, f"http://127.0.0.1:{port}", process)
    try:
        await is_ready(http, command.url, process, count)
    except BaseException:
        process.terminate()
        raise
    return command


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """All settings in turns, many short ones; prints medians, and medians of the ratios within a round."""
    rounds: list[dict[tuple[int, str], Cost]] = []
    async with AsyncExitStack() as stack:
        urls = []
        for port in free_ports(2):
            words = (sys.executable, __file__, "--engine", str(port))
            process = await asyncio.create_subprocess_exec(*words)
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            urls.append(f"http://127.0.0.1:{port}")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        commands = []
        for count in options.processes:
            command = await started(http, count, urls, folder, options)
            stack.push_async_callback(command.process.wait)
            stack.callback(command.process.send_signal, signal.SIGTERM)
            commands.append(command)
        numbers = itertools.count()
        for number in range(options.rounds + 1):
            found = {}
            for command, name in itertools.product(commands, options.limits):
                cost = await measured(command, KEYS[name], numbers, options)
                found[command.processes, name] = cost
                print(
                    f"round {number}: {command.processes} processes, {name} limits: {cost}", file=sys.stderr, flush=True
                )
            rounds.append(found)
    show(rounds[1:])


def show(rounds: list[dict[tuple[int, str], Cost]]) -> None:
    """Print the table. The first round is for warming up."""
    print(f"{'processes':>9} {'limits':>8} {'routers us':>11} {'store us':>9} {'two cores':>10} {'wall':>8}  times one")
    for count, name in rounds[0]:
        taken = [each[count, name] for each in rounds]
        routers_us, store_us, rate = (statistics.median(column) for column in zip(*taken, strict=True))
        times = ""
        if (1, name) in rounds[0]:
            ratios = [each[count, name].most(count) / each[1, name].most(1) for each in rounds]
            times = f"{statistics.median(ratios):9.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        most = Cost(routers_us, store_us, rate).most(count)
        print(f"{count:9} {name:>8} {routers_us:11.0f} {store_us:9.0f} {most:8.0f}/s {rate:6.0f}/s {times}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--limits", nargs="+", choices=("without", "with"), default=["without", "with"])
    parser.add_argument("--users", action="store_true")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        uvloop.run(engine(options.engine))
        return
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(options, Path(folder)))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
