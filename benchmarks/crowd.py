"""Many idle and slow connections from one address: what they do to other clients of a router.

    python benchmarks/crowd.py [--connections 10000] [--seconds 20] [--once]

A router runs as `pointsman serve` does, with a scripted backend, as many file descriptors as it may have, and the
default limits. Another process opens connections from 127.0.0.2, and opens each again that is closed: a third sends
nothing, a third half a head, a third one byte of a head every few seconds. With `--once` none comes back. A client at
127.0.0.1 meanwhile sends short chats, 50 a second, on connections of its own, one in ten on a new one; it does so
before and afterwards too.

The crowd also takes processor time from the client. So it first goes to a process that closes each connection at once,
which shows what it does by itself, then to the router, twice: memory that grows the first time is not to grow again.
Exits with 1 if a chat fails, if nothing was logged or counted, or if descriptors or connections remain.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

KEY = "a-key-for-measurements-only"
SLA = """
classes: {{chat: {{ttft_p95: 60s}}}}
tenants: {{acme: {{keys: ["sha256:{key}"]}}}}
pools: {{own: {{kind: fake, at: "a:1", model: m}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:{http}", grpc: off, metrics: "127.0.0.1:{metrics}", state: off}}
"""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: "
OPENED_AT_ONCE = 200
DRIP_S = 3.0
CHATS_PER_S = 50


class Client(asyncio.Protocol):
    """One of the crowd: sends nothing, half a head, or drops of it; comes again when it is closed."""

    def __init__(self, crowd: Crowd, kind: int) -> None:
        self._crowd, self._kind = crowd, kind
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """It is connected."""
        # uvloop's transport is none of asyncio's
        self._transport = transport
        self._crowd.connected += 1
        if self._kind:
            transport.write(HEAD)
        if self._kind == 2:
            self._drip()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It was closed."""
        self._transport = None
        self._crowd.lost(self._kind)

    def _drip(self) -> None:
        if self._transport is not None:
            self._transport.write(b"a")
            asyncio.get_running_loop().call_later(DRIP_S, self._drip)


class Crowd:
    """Opens `count` connections to `port`; where it `comes_back`, each again that the server closes."""

    def __init__(self, port: int, count: int, *, comes_back: bool) -> None:
        self._port, self._comes_back = port, comes_back
        self.wanted: asyncio.Queue[int] = asyncio.Queue()
        self.connected = self.closed = self.opened = 0
        for number in range(count):
            self.wanted.put_nowait(number % 3)

    async def run(self) -> None:
        """Open what is wanted, until cancelled."""
        await asyncio.gather(*(self._open() for _ in range(OPENED_AT_ONCE)))

    def lost(self, kind: int) -> None:
        """A connection was closed."""
        self.connected -= 1
        self.closed += 1
        if self._comes_back:
            self.wanted.put_nowait(kind)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            kind = await self.wanted.get()
            try:
                await loop.create_connection(
                    lambda kind=kind: Client(self, kind), "127.0.0.1", self._port, local_addr=("127.0.0.2", 0)
                )
                self.opened += 1
            except OSError:
                self.wanted.put_nowait(kind)
            # a crowd that takes a whole core would measure the machine
            await asyncio.sleep(0.1)


async def be_a_crowd(port: int, count: int, seconds: float, *, comes_back: bool) -> None:
    """Keep `count` connections to `port` for `seconds`, then print what became of them."""
    crowd = Crowd(port, count, comes_back=comes_back)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await crowd.run()
    print(json.dumps({"opened": crowd.opened, "closed": crowd.closed, "connected": crowd.connected}))


async def chats(port: int, seconds: float) -> list[float]:
    """Seconds that each chat took. Raises AssertionError for one that was not answered."""
    url, taken = f"http://127.0.0.1:{port}/v1/chat/completions", list[float]()
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:

        async def chat(number: int) -> None:
            headers = {"Connection": "close"} if number % 10 == 0 else {}
            began = time.perf_counter()
            async with session.post(url, json=body, headers=headers) as reply:
                await reply.read()
                assert reply.status == 200, reply.status
            taken.append(time.perf_counter() - began)

        began, running = time.perf_counter(), list[asyncio.Task[None]]()
        for number in range(int(seconds * CHATS_PER_S)):
            await asyncio.sleep(max(0.0, began + number / CHATS_PER_S - time.perf_counter()))
            running.append(asyncio.create_task(chat(number)))
        await asyncio.gather(*running)
    return taken


def shown(name: str, taken: list[float]) -> float:
    """Print one line of the results; its P99 in milliseconds."""
    cuts = statistics.quantiles(taken, n=100)
    p50, p99, longest = (seconds * 1e3 for seconds in (cuts[49], cuts[98], max(taken)))
    print(f"{name:16} {len(taken)} chats, P50 {p50:.1f} ms, P99 {p99:.1f} ms, longest {longest:.0f} ms", flush=True)
    return p99


class State(NamedTuple):
    """Of a process: open descriptors, resident MiB, and the processor time that it has used, in seconds."""

    descriptors: int
    mib: float
    cpu_s: float


def state_of(process: int) -> State:
    """Its state now."""
    folder = Path(f"/proc/{process}")
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # fields 14 and 15 of proc_pid_stat(5)
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return State(
        len(list((folder / "fd").iterdir())), resident / 2**20, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    )


async def metric(port: int, line: str) -> float:
    """The value of a series; 0 without one."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
        found = re.search(rf"^{re.escape(line)} (\S+)$", await reply.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(crowd: Sequence[str], seconds: float) -> bool:
    """Measure, print, and return whether all is well."""
    http, metrics = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "sla.yaml"), Path(folder, "log")
        file.write_text(SLA.format(key=hashlib.sha256(KEY.encode()).hexdigest(), http=http, metrics=metrics))
        with log.open("wb") as errors:
            router = subprocess.Popen([sys.executable, "-P", "-m", "router", "serve", str(file)], stderr=errors)
        try:
            is_well = uvloop.run(_measure(http, metrics, router.pid, crowd, seconds))
        finally:
            router.terminate()
            router.wait()
        lines = [line for line in log.read_text().splitlines() if "its address has too many" in line]
    print(f"log lines: {len(lines)}", *lines[:1], sep="\n")
    return is_well and bool(lines)


async def _measure(http: int, metrics: int, router: int, crowd: Sequence[str], seconds: float) -> bool:
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{http}/readyz") as reply:
                    if reply.status == 200:
                        break
            await asyncio.sleep(0.1)
    await chats(http, 2)
    await asyncio.sleep(2)
    start = state_of(router)
    shown("before", await chats(http, seconds))
    quiet_s = state_of(router).cpu_s - start.cpu_s
    with a_listener_that_closes() as elsewhere:
        alone = await _beside("crowd elsewhere", http, seconds, elsewhere, crowd)
    states, waiting, ratios = [state_of(router)], 0.0, []
    for name in ("crowd here", "crowd again"):
        opened, began = await closed(metrics), state_of(router)
        p99 = await _beside(name, http, seconds, http, crowd)
        states.append(state_of(router))
        waiting = await metric(metrics, 'pointsman_http_connections{state="waiting"}')
        each_s = (states[-1].cpu_s - began.cpu_s - quiet_s) / max(1, await closed(metrics) - opened)
        ratios.append(f"{p99 / alone:.1f}")
        print(f"   {waiting:.0f} waiting connections; {each_s * 1e6:.0f} us of the router for each that it closes")
        await asyncio.sleep(2)
    shown("afterwards", await chats(http, seconds))
    await asyncio.sleep(3)
    end = state_of(router)
    left = await metric(metrics, 'pointsman_http_connections{state="waiting"}')
    print(f"P99 with the crowd here to elsewhere: {', '.join(ratios)}")
    for what, value in (("descriptors", "descriptors"), ("MiB", "mib")):
        print(f"{what}:", ", ".join(f"{getattr(state, value):.0f}" for state in (start, *states, end)))
    print(f"closed by the limit: {await closed(metrics):.0f}; waiting at the end: {left:.0f}")
    return await closed(metrics) > 0 and left <= 2 and end.descriptors <= start.descriptors + 2


async def _beside(name: str, http: int, seconds: float, port: int, options: Sequence[str]) -> float:
    """The P99 of chats beside a crowd at `port`, in milliseconds."""
    command = [sys.executable, __file__, "--crowd", str(port), *options]
    crowd = await asyncio.create_subprocess_exec(*command, "--seconds", str(seconds + 6), stdout=subprocess.PIPE)
    await asyncio.sleep(5)
    p99 = shown(name, await chats(http, seconds))
    out, _ = await crowd.communicate()
    print(f"   {out.decode().strip()}")
    return p99


async def closed(metrics: int) -> float:
    """How many connections the router has closed by the limit for an address."""
    return await metric(metrics, 'pointsman_http_limits_total{limit="connections_of_address"}')


@contextmanager
def a_listener_that_closes() -> Iterator[int]:
    """The port of a process that closes every connection as soon as it is accepted."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(4096)
        child = os.fork()
        if not child:
            while True:
                listening.accept()[0].close()
        try:
            yield int(listening.getsockname()[1])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def main() -> None:
    """Run the command line."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--connections", type=int, default=10_000, help="of the crowd; default: 10000")
    reader.add_argument("--seconds", type=float, default=20.0, help="for each of the five parts; default: 20")
    reader.add_argument("--once", action="store_true", help="connections that are closed do not come back")
    reader.add_argument("--crowd", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = reader.parse_args()
    crowd = ["--connections", str(options.connections), *(["--once"] if options.once else [])]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.crowd:
        uvloop.run(be_a_crowd(options.crowd, options.connections, options.seconds, comes_back=not options.once))
    elif not measure(crowd, options.seconds):
        sys.exit(1)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
