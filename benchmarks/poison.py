"""A tenant with requests that make backends fail, beside a good tenant.

    python benchmarks/poison.py [--seconds 60] [--alone 30] [--vllm] [--varied]

A router and two servers run in processes of their own: stand-ins that answer 500 to the bad requests at once, or with
`--vllm` real engines (`make engines`), which do so after some work. The good tenant sends 5 short chats a second:
alone, then for `--seconds` beside a tenant with 20 bad requests a second, then alone again, each after some seconds
that do not count. The bad requests are all the same, or with `--varied` all different. Printed are the times of the
good tenant, what the bad one was answered, and the processor time of the router and the engines. Exits with 1 if a good
request fails, if a backend was not in use, or if the good tenant's P95 beside the bad one is above `--most` times that
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from shards.bundled import NAME, weights
from tests.chaos.test_blame import Fragile
from tests.engines.programs import MISSING, VLLMOptions, a_vllm, free_ports

ROOT = Path(__file__).parents[1]
SLA = """
classes: {{chat: {{}}}}
tenants:
  good: {{keys: ["{good}"]}}
  bad: {{keys: ["{bad}"]}}
pools: {{own: {{kind: {kind}, model: {model}, tokenizer: "{tokenizer}", at: {at}}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:{http}", metrics: "127.0.0.1:{metrics}", grpc: off, state: off}}
"""
GOOD_PER_S, BAD_PER_S = 5, 20
SETTLES_S = 5.0
DELAY_S = 0.005
"""Of a stand-in, before each token."""


@dataclass
class Seen:
    """What a tenant was answered: statuses, and milliseconds of each request that counts."""

    statuses: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)

    @property
    def p95(self) -> float:
        """The 95th percentile in milliseconds."""
        return statistics.quantiles(self.times, n=20)[18]

    def __str__(self) -> str:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        median = statistics.median(self.times)
        return f"{answers}; P50 {median:.1f} ms, P95 {self.p95:.1f} ms, longest {max(self.times):.0f} ms"


@dataclass
class System:
    """A router at `http` with its metrics, its process and those of its engines."""

    http: int
    metrics: int
    model: str
    router: int
    engines: Sequence[int]
    session: aiohttp.ClientSession

    async def ask(self, tenant: str, text: str, **more: object) -> int:
        """The status of a chat."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}
        headers = {"authorization": f"Bearer {tenant}-key"}
        url = f"http://127.0.0.1:{self.http}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def steadily(self, tenant: str, per_s: float, seconds: float, requests: Iterator[dict[str, object]]) -> Seen:
        """Send `requests` at a fixed rate, however long the answers take."""
        seen, began = Seen(), time.perf_counter()

        async def one(at: float) -> None:
            status = await self.ask(tenant, **next(requests))  # type: ignore[arg-type]
            if at >= SETTLES_S:
                seen.statuses[status] += 1
                seen.times.append((time.perf_counter() - began - at) * 1e3)

        async with asyncio.TaskGroup() as group:
            for number in range(int((SETTLES_S + seconds) * per_s)):
                at = number / per_s
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                group.create_task(one(at))
        return seen

    async def in_use(self) -> int:
        """How many backends may get requests."""
        async with self.session.get(f"http://127.0.0.1:{self.metrics}/metrics") as reply:
            return len(re.findall(r"^pointsman_backend_healthy\{.*\} 1", await reply.text(), re.MULTILINE))

    def cpu(self) -> str:
        """Processor time so far, in seconds: of the router, and of all engines."""
        return f"router {cpu_of(self.router):.1f} s, engines {sum(map(cpu_of, self.engines)):.1f} s of CPU so far"


def cpu_of(leader: int) -> float:
    """Processor seconds of all processes in the group of `leader`."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def good_requests() -> Iterator[dict[str, object]]:
    """Short chats."""
    for number in itertools.count():
        yield {"text": f"Question {number}"}


def bad_requests(*, is_varied: bool) -> Iterator[dict[str, object]]:
    """Chats with a grammar that never ends, which vLLM 0.32 answers with 500."""
    for number in itertools.count():
        text = f"poison {number}" if is_varied else "poison"
        yield {"text": text, "structured_outputs": {"grammar": "root ::= root"}}


@asynccontextmanager
async def a_process(*command: str) -> AsyncIterator[int]:
    """The id of a process that is ended afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def a_system(*, with_vllm: bool) -> AsyncIterator[System]:
    """A router with two engines, all of which have answered."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        http, metrics, *ports = free_ports(4)
        if with_vllm:
            kind, model, engines = "vllm", NAME, []
            servers = [
                a_vllm(name, folder, VLLMOptions(events=False), port=port)
                for name, port in zip("ab", ports, strict=True)
            ]
            for server in servers:
                server.start()
                stack.callback(server.stop)
            for server in servers:
                await asyncio.to_thread(server.wait_until_ready)
                engines.append(server.pid)
        else:
            kind, model = "openai_compatible", "m"
            engines = [
                await stack.enter_async_context(a_process("benchmarks/poison.py", "--engine", str(port)))
                for port in ports
            ]
        keys = {name: "sha256:" + hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("good", "bad")}
        at = [f"http://127.0.0.1:{port}" for port in ports]
        file = folder / "sla.yaml"
        file.write_text(
            SLA.format(http=http, metrics=metrics, kind=kind, model=model, at=at, tokenizer=weights(), **keys)
        )
        router = await stack.enter_async_context(a_process("-P", "-m", "router", "serve", str(file)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        system = System(http, metrics, model, router, engines, session)
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientError):
                    if await system.in_use() == 2 and await system.ask("good", "hello") == 200:
                        break
                await asyncio.sleep(0.2)
        yield system


async def run(options: argparse.Namespace) -> bool:
    """Measure and print; whether all is within the bounds."""
    alone: list[Seen] = []
    async with a_system(with_vllm=options.vllm) as system:
        looks: list[int] = []

        async def look() -> None:
            while True:
                looks.append(await system.in_use())
                await asyncio.sleep(1)

        async def by_itself(name: str) -> None:
            alone.append(await system.steadily("good", GOOD_PER_S, options.alone, good_requests()))
            print(f"good tenant {name}: {alone[-1]}; {system.cpu()}", flush=True)

        looking = asyncio.create_task(look())
        await by_itself("alone")
        beside, bad = await asyncio.gather(
            system.steadily("good", GOOD_PER_S, options.seconds, good_requests()),
            system.steadily("bad", BAD_PER_S, options.seconds, bad_requests(is_varied=options.varied)),
        )
        print(f"good tenant beside the bad one: {beside}; {system.cpu()}")
        print(f"bad tenant: {bad}", flush=True)
        await by_itself("alone again")
        looking.cancel()
    ratio = beside.p95 / statistics.mean(seen.p95 for seen in alone)
    print(f"P95 beside to alone: {ratio:.2f}; backends in use: {min(looks)} to {max(looks)} of 2 in {len(looks)} looks")
    is_served = all(set(seen.statuses) == {200} for seen in (*alone, beside))
    return is_served and min(looks) == 2 and ratio <= options.most


def main() -> None:
    """Run the command line."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--seconds", type=float, default=60.0, help="for the part beside the bad tenant; default: 60")
    reader.add_argument("--alone", type=float, default=30.0, help="seconds of each part without it; default: 30")
    reader.add_argument("--vllm", action="store_true", help="with two real vLLM; default: stand-ins")
    reader.add_argument(
        "--varied", action="store_true", help="each bad request has another text; default: all the same"
    )
    reader.add_argument("--most", type=float, default=1.2, help="ratio of P95 that is well; default: 1.2")
    reader.add_argument("--engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = reader.parse_args()
    if options.engine:
        web.run_app(Fragile(delay_s=DELAY_S).app(), host="127.0.0.1", port=options.engine, handler_cancellation=True)
    elif options.vllm and MISSING:
        sys.exit(MISSING)
    elif not asyncio.run(run(options)):
        sys.exit(1)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
