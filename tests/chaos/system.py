"""The system under faults: routers, servers or shards, and Redis as processes, with lines between them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import redis

from tests.chaos.disks import Disks
from tests.chaos.load import TENANTS, Door
from tests.chaos.wire import Wire, a_wire
from tests.engines.programs import ROOT, NotStarted, Program, VLLMOptions, a_vllm, free_ports
from tests.router.shared.store.parts import EXECUTABLE
from tests.standins.name_server import NameServer
from tests.tls.authority import Authority

INSPECTION = Path(__file__).parent / "inspection"
STRAYS = "strays"
"""The tenant of clients that behave badly: their requests are not compared with anything."""

KEYS = {name: f"{name}-key" for name in (*TENANTS, STRAYS)}
SLA = """
classes: {{chat: {{ttft_p95: 400ms}}}}
tenants:
{tenants}
pools:
  own:
    {pool}
    at: {at}
    health: {health}
rules: [{{class: chat}}]
queue: {{outage: {outage}}}
store: {{redis: "redis://127.0.0.1:{redis}", replicas: {replicas}, journal: {owed}}}
server:
  http: "127.0.0.1:{http}"
  grpc: "127.0.0.1:{grpc}"
  admin: "127.0.0.1:{admin}"
  decision_log: {decisions}
  drain: 3s
"""
BOOKS = """
cost: {{currency: USD, uncached: 0.2, cached: 0.02, output: 0.6}}
usage: {{store: {disks}/usage/usage.sqlite}}
batches: {{store: {disks}/batches/jobs, concurrent: 4}}
audit: {{file: {disks}/audit/router-{number}.log}}
"""
"""What a file adds for routers with budgets in money."""

BUDGETS = {False: "1000M", True: "1000000 USD"}
"""The budgets a day, by whether they are in money."""
NAME = "servers.test"
"""The servers' name, if they are found by DNS."""

OPENSSL = shutil.which("openssl")
"""The program that makes certificates; None where there is none."""

COMPILER = shutil.which("cc")
"""The C compiler, which makes the library that sets a process's time of day; None where there is none."""

QUICK = (
    "{probe_every: 300ms, probe_timeout: 1s, suspect_after: 600ms, retry: 300ms, slow_start: 1s,\n"
    "             first_byte: 1500ms..4s, first_token: 1500ms..4s, between_tokens: 1500ms..3s}"
)
"""Health settings that notice within a second, for the short form."""

STARTS_WITHIN_S = 1800
"""Seconds for the start of any program: a bound for one that hangs. A vLLM takes half a minute on an idle machine, and
a shard has taken seven on a busy one."""

POOLS = {
    "server": "kind: openai_compatible\n    model: m",
    "shard": "kind: shard\n    model: bundled",
    "vllm": "kind: vllm\n    model: pointsman-reader",
}


@dataclass(frozen=True)
class Plan:
    """What is started."""

    backends: str = "server"
    """`server`: stand-ins with OpenAI's API. `shard`: our own engine. `vllm`: real vLLM, of `make engines`."""
    count: int = 3
    routers: int = 1
    processes: int = 1
    """Of each router."""
    health: str = QUICK
    outage: str = "3s"
    has_names: bool = False
    """Whether the routers find the servers by DNS, at a name server of their own. Needs root."""
    has_small_disk: bool = False
    """Whether the routers write their log of decisions to a file system of 1 MB. Needs root."""
    has_clock: bool = False
    """Whether the routers' time of day can be set. Needs a C compiler."""
    has_tls: bool = False
    """Whether the servers show certificates, which the routers check. Needs openssl."""
    keeps_books: bool = False
    """Whether budgets are in money and usage, batches and an audit log are kept, on disks of their own, and Redis keeps
    its data and has a replica. Needs root."""
    prefill_s: float = 0.0
    """Seconds that shards take for each token of a prompt behind the first 512, more than their model needs."""

    @property
    def model(self) -> str:
        return "m" if self.backends == "server" else "pointsman-reader"


class RedisProgram(Program):
    """A Redis, not started."""

    @property
    def port(self) -> int:
        return int(self.command[2])

    def wait_until_ready(self, timeout_s: float = 10.0) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with suppress(redis.RedisError), self.admin() as admin:
                admin.ping()
                return
            time.sleep(0.02)
        raise NotStarted(f"{self.name} was not ready:\n{self.log_tail()}")

    def admin(self) -> redis.Redis:
        """A connection for operators."""
        return redis.Redis(port=self.port, socket_timeout=2)

    def follow(self, leader: RedisProgram) -> None:
        """Become a replica of `leader`, as far as it is reachable."""
        with self.admin() as admin:
            admin.replicaof("127.0.0.1", leader.port)

    def has_all_of(self, leader: RedisProgram) -> bool:
        """Whether it is a replica of `leader` and has each of its writes."""
        with leader.admin() as source, self.admin() as copy:
            ahead, own = source.info("replication"), copy.info("replication")
        linked = own["role"] == "slave" and own["master_port"] == leader.port and own["master_link_status"] == "up"
        return linked and own["slave_repl_offset"] == ahead["master_repl_offset"]


@dataclass
class RouterProgram:
    """A router's process and addresses."""

    program: Program
    door: Door
    admin: str


@dataclass(frozen=True)
class Held:
    """What the `processes` of the routers hold at one moment."""

    processes: int
    tasks: Counter[str]
    objects: Counter[str]
    threads: int
    descriptors: int
    """Open descriptors, without those of connections that are kept for later: `pooled`."""
    pooled: int
    resident_mb: float


@dataclass
class System:
    """The running system. `servers` and `routers` are by number; `lines` lead from the routers to the servers."""

    plan: Plan
    folder: Path
    servers: list[Program] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    lines: list[Wire] = field(default_factory=list)
    routers: list[RouterProgram] = field(default_factory=list)
    names: NameServer | None = None
    authority: Authority | None = None
    stranger: Authority | None = None
    redis: RedisProgram = field(init=False)
    """The one that the routers' line leads to."""
    replica: RedisProgram | None = None
    redis_line: Wire = field(init=False)
    disks: Disks | None = None

    numbers: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    """Gives each request of the system's life a number of its own."""

    @property
    def keys(self) -> dict[str, str]:
        """The tenants' keys."""
        return KEYS

    @property
    def doors(self) -> list[Door]:
        return [router.door for router in self.routers]

    @property
    def scheme(self) -> str:
        """What stands before the servers' addresses."""
        return "" if self.plan.backends == "shard" else "https://" if self.plan.has_tls else "http://"

    def certify(self, number: int, *, days: int = 2, by_stranger: bool = False) -> None:
        """Give server `number` a new certificate, which it shows after its next start; with negative `days` it has
        expired."""
        authority = self.stranger if by_stranger else self.authority
        assert authority is not None
        issued = authority.issue(f"server-{number}", days=days)
        for source, kind in ((issued.cert, "crt"), (issued.key, "key")):
            shutil.copy(source, self.folder / f"server-{number}.{kind}")

    @property
    def clock(self) -> Path:
        """The file that has the seconds by which the routers' time of day is ahead."""
        return self.folder / "clock"

    def set_clock(self, ahead_s: int) -> None:
        """The routers' time of day is `ahead_s` ahead of the machine's from now on."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("q", ahead_s))

    @property
    def disk(self) -> Path:
        """Where the routers write; for a small disk, as they see it."""
        return self.folder / "disk"

    @property
    def resolver(self) -> Path:
        """The routers' resolv.conf, if they find servers by DNS."""
        return self.folder / "resolv.conf"

    @property
    def sla(self) -> Path:
        """The SLA file of the first router."""
        return self.folder / "router-0.yaml"

    def programs(self) -> Iterator[Program]:
        if self.disks is not None:
            yield self.disks
        yield self.redis
        if self.replica is not None:
            yield self.replica
        yield from self.servers
        for router in self.routers:
            yield router.program

    async def restart(self, program: Program) -> None:
        """Start a program that ended, and wait until it is ready."""
        program.start()
        await asyncio.to_thread(program.wait_until_ready, STARTS_WITHIN_S)

    def pids(self, program: Program) -> list[int]:
        """Its processes: the one that was started, and its children."""
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        return [program.pid, *map(int, children)]

    def workers(self, router: RouterProgram) -> list[int]:
        """The processes of a router that serve."""
        pids = self.pids(router.program)
        return pids if self.plan.processes == 1 else pids[1:]

    async def until_workers(self, router: RouterProgram) -> None:
        """Wait until all processes of a router serve."""
        while True:
            pids = self.workers(router)
            with suppress(OSError):
                if len(pids) == self.plan.processes and all([(await self.look_into(pid))["is_router"] for pid in pids]):
                    return
            await asyncio.sleep(0.1)

    def descriptors(self, pid: int) -> int:
        """One more than the highest open descriptor of a process."""
        return 1 + max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir())

    @contextmanager
    def limited(self, pid: int, kind: int, most: int) -> Iterator[None]:
        """A process has a soft resource limit until the context is left."""
        before, hard = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (most, hard))
        try:
            yield
        finally:
            resource.prlimit(pid, kind, (before, hard))

    def fail_over(self) -> bool:
        """Make the replica the primary, which the line leads to from then on, without a loss; False if it lags behind.

        Connections of before stay at the old primary, which becomes the replica.
        """
        old, new = self.redis, self.replica
        assert new is not None
        until = time.monotonic() + 2
        with old.admin() as admin, new.admin() as heir:
            admin.execute_command("CLIENT", "PAUSE", "4000", "WRITE")
            try:
                while not new.has_all_of(old):
                    if time.monotonic() > until:
                        return False
                    time.sleep(0.02)
                heir.replicaof("NO", "ONE")
                self.redis, self.replica, self.redis_line.target = new, old, new.port
                old.follow(new)
            finally:
                admin.execute_command("CLIENT", "UNPAUSE")
        return True

    def operate_redis(self, *command: str) -> None:
        """Send a command to Redis, past the line."""
        with self.redis.admin() as admin:
            admin.execute_command(*command)

    async def change_mode(self, number: int, mode: str) -> None:
        """Tell a server what to do: see server.py."""
        url = f"{self.scheme}127.0.0.1:{self.ports[number]}/mode"
        async with aiohttp.ClientSession() as http, http.put(url, data=mode, ssl=False) as reply:
            assert reply.status == 200

    async def drain(self, number: int, *, is_draining: bool) -> None:
        """Drain a server at every router, or take it back."""
        for router in self.routers:
            url = f"{router.admin}/admin/backends/own-{number}"
            async with aiohttp.ClientSession() as http, http.patch(url, json={"draining": is_draining}) as reply:
                assert reply.status == 200, await reply.text()

    async def look_into(self, pid: int) -> dict[str, Any]:
        """What the process says about itself: see inspection/sitecustomize.py."""
        reader, writer = await asyncio.open_unix_connection(str(self.folder / f"{pid}.sock"))
        try:
            return dict(json.loads(await reader.read()))
        finally:
            writer.close()

    async def held(self) -> tuple[Held, list[str]]:
        """What all processes of all routers hold together, and their objections to being called idle."""
        tasks: Counter[str] = Counter()
        objects: Counter[str] = Counter()
        threads = descriptors = pages = 0
        objections = []
        pids = [pid for router in self.routers for pid in self.workers(router)]
        for pid in pids:
            seen = await self.look_into(pid)
            assert seen["is_router"], f"process {pid} is no router: {seen}"
            if seen["objection"]:
                objections.append(seen["objection"])
            tasks.update(seen["tasks"])
            objects.update(seen["objects"])
            of_process = _resources(pid)
            threads, descriptors, pages = (
                sum(pair) for pair in zip((threads, descriptors, pages), of_process, strict=True)
            )
        pooled = sum(line.connections for line in (*self.lines, self.redis_line))
        resident_mb = pages * resource.getpagesize() / 1e6
        return Held(len(pids), tasks, objects, threads, descriptors - pooled, pooled, resident_mb), objections

    async def get(self, url: str) -> Any:
        """The JSON, or the text, at `url`."""
        # the routers check certificates, tests do not
        async with aiohttp.ClientSession() as http, http.get(url, ssl=False) as reply:
            assert reply.status == 200, f"{url}: {reply.status}"
            return await (reply.json() if "json" in reply.content_type else reply.text())

    async def metrics(self) -> list[dict[str, float]]:
        """The metrics of each router, by name with labels."""
        texts = [await self.get(f"{router.admin}/metrics") for router in self.routers]
        return [dict(map(_measured, re.findall(r"^[a-z].*$", text, re.MULTILINE))) for text in texts]

    async def usage(self) -> Counter[str]:
        """What all routers counted of each tenant since they started, as `tenant what`."""
        sums: Counter[str] = Counter()
        for router in self.routers:
            for row in (await self.get(f"{router.admin}/admin/usage"))["usage"]:
                for what in ("requests", "finished", "prompt_tokens", "completion_tokens"):
                    sums[f"{row['tenant']} {what}"] += row[what]
        return sums

    def budgets(self) -> dict[str, float]:
        """What Redis says each tenant has used of its budget, in its units."""
        with self.redis.admin() as admin:
            found = {}
            for tenant in TENANTS:
                levels: Any = admin.hgetall(f"pointsman:{{{tenant}}}:levels")
                used = [value for name, value in levels.items() if name == b"cost"]
                found[tenant] = float(used[0].split()[0]) / 1000 if used else 0.0
            return found

    def reservations(self) -> int:
        """Reservations in Redis that are not settled."""
        with self.redis.admin() as admin:
            held: list[Any] = [admin.hvals(f"pointsman:{{{tenant}}}:held") for tenant in KEYS]
            return sum(value != b"" for values in held for value in values)

    async def open_at_servers(self) -> int:
        """Answers that the servers still compute."""
        if self.plan.backends != "server":
            rows = (await self.get(f"{self.routers[0].admin}/admin/snapshot"))["backends"]
            return sum(row["running"] + row["waiting"] for row in rows)
        return sum([(await self.get(f"{self.scheme}127.0.0.1:{port}/counts"))["open"] for port in self.ports])

    def log_size(self) -> list[int]:
        """Bytes that each router has logged."""
        return [router.program.log.stat().st_size for router in self.routers]

    def logged_since(self, sizes: list[int]) -> str:
        """What the routers have logged since `log_size` returned `sizes`."""
        parts = []
        for router, size in zip(self.routers, sizes, strict=True):
            with router.program.log.open("rb") as log:
                log.seek(size)
                parts.append(log.read().decode(errors="replace"))
        return "".join(parts)


def _resources(pid: int) -> tuple[int, int, int]:
    """Threads, descriptors and resident pages of a process."""
    proc = Path(f"/proc/{pid}")
    threads, descriptors = (len(list((proc / name).iterdir())) for name in ("task", "fd"))
    return threads, descriptors, int((proc / "statm").read_text().split()[1])


def _measured(line: str) -> tuple[str, float]:
    name, _, value = line.rpartition(" ")
    return name, float(value)


def _redis(name: str, port: int, system: System) -> RedisProgram:
    home = system.folder / name
    home.mkdir()
    command: tuple[str, ...] = (EXECUTABLE, "--port", str(port), "--save", "", "--dir", str(home))
    if system.plan.keeps_books:
        # each write is in the file before its answer, and outlives the process
        command += ("--appendonly", "yes", "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
    return RedisProgram(name, command, system.folder, "")


def _server(number: int, plan: Plan, folder: Path, port: int) -> Program:
    if plan.backends == "vllm":
        return a_vllm(f"vllm-{number}", folder, VLLMOptions(blocks=600, events=False), port=port)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if plan.backends == "shard":
        module = "shards"
        environment |= {"PYTHONPATH": f"{INSPECTION}{os.pathsep}{ROOT}", "POINTSMAN_INSPECT": str(folder)}
        if plan.prefill_s:
            module = "tests.chaos.slow_shard"
            started = str(folder / f"shard-{number}.started")
            environment |= {"CHAOS_PREFILL_S": str(plan.prefill_s), "CHAOS_STARTED": started}
        command: tuple[str, ...] = (sys.executable, "-P", "-m", module, "--listen", f"127.0.0.1:{port}")
        command += ("--name", f"own-{number}", "--threads", "1", "--kv-memory", "0.05")
        return Listening(f"shard-{number}", command, folder, str(port), environment=environment)
    command = (sys.executable, "-m", "tests.chaos.server", "--port", str(port))
    if plan.has_tls:
        command += ("--cert", str(folder / f"server-{number}.crt"), "--cert-key", str(folder / f"server-{number}.key"))
        return Listening(f"server-{number}", command, folder, str(port), environment=environment)
    return Program(f"server-{number}", command, folder, f"http://127.0.0.1:{port}/v1/models", environment=environment)


class Listening(Program):
    """A program that is ready once it listens at the port `ready_at`."""

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(self.ready_at)), 1):
                return
            time.sleep(0.1)
        raise NotStarted(f"{self.name} was not ready:\n{self.log_tail()}")


def _router(number: int, system: System) -> RouterProgram:
    http, grpc_port, admin = free_ports(3)
    plan = system.plan
    budget = BUDGETS[plan.keeps_books]
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    tenants = "\n".join(
        f'  {name}: {{keys: ["sha256:{digest}"], limits: {{budget_per_day: {budget}, concurrent: 500}}}}'
        for name, digest in hashes.items()
    )
    pool = POOLS[plan.backends]
    if system.authority is not None:
        pool += f"\n    tls: {{ca: {system.authority.cert}}}"
    text = SLA.format(
        tenants=tenants,
        pool=pool,
        at=json.dumps(
            [f"dns://{NAME}:{system.lines[0].port}"]
            if plan.has_names
            else [f"{system.scheme}{line.host}:{line.port}" for line in system.lines]
        ),
        health=plan.health,
        outage=plan.outage,
        redis=system.redis_line.port,
        replicas=plan.routers * plan.processes,
        owed=system.folder / "owed",
        http=http,
        grpc=grpc_port,
        admin=admin,
        decisions=system.disk / f"decisions-{number}.jsonl",
    )
    if system.disks is not None:
        text += BOOKS.format(disks=system.disks.place, number=number)
    file = system.folder / f"router-{number}.yaml"
    file.write_text(text)
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "router", "serve", str(file))
    if plan.processes > 1:
        command += ("--processes", str(plan.processes))
    environment = {"PYTHONPATH": f"{INSPECTION}{os.pathsep}{ROOT}", "POINTSMAN_INSPECT": str(system.folder)}
    if plan.has_clock:
        environment |= _with_clock(system)
    command = _with_mounts(system, command)
    if system.disks is not None:
        command = system.disks.seeing(command)
    url = f"http://127.0.0.1:{http}"
    program = Program(f"router-{number}", command, system.folder, f"{url}/readyz", environment=environment)
    return RouterProgram(program, Door(url, f"127.0.0.1:{grpc_port}"), f"http://127.0.0.1:{admin}")


def _with_clock(system: System) -> dict[str, str]:
    """Variables for a process with a time of day that `system.set_clock` sets."""
    assert COMPILER is not None
    library = system.folder / "clock.so"
    source = Path(__file__).parent / "clock.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    system.clock.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "POINTSMAN_CLOCK": str(system.clock)}


def _with_mounts(system: System, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with the file systems of its plan, which it alone sees."""
    mounts = []
    if system.plan.has_small_disk:
        mounts.append(f"mount -t tmpfs -o size=1m none {system.disk}")
    if system.plan.has_names:
        mounts.append(f"mount --bind {system.resolver} /etc/resolv.conf")
    if not mounts:
        return command
    unshare = shutil.which("unshare")
    assert unshare is not None
    return (unshare, "-m", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh", *command)


@asynccontextmanager
async def _lines(system: System) -> AsyncIterator[list[Wire]]:
    """A line to each server; for DNS, all at one port of different addresses."""
    async with AsyncExitStack() as stack:
        if not system.plan.has_names:
            yield [await stack.enter_async_context(a_wire(port)) for port in system.ports]
            return
        (port,) = free_ports(1)
        # addresses of this machine that hardly any other program uses
        net = f"127.{random.randrange(10, 250)}.{random.randrange(1, 250)}"
        hosts = [f"{net}.{number + 1}" for number in range(len(system.ports))]
        system.names = NameServer({NAME: list(hosts)})
        system.resolver.write_text(f"nameserver {net}.53\noptions timeout:1 attempts:1\n")
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: system.names, local_addr=(f"{net}.53", 53)
        )
        stack.callback(transport.close)
        pairs = zip(hosts, system.ports, strict=True)
        yield [await stack.enter_async_context(a_wire(to, host=host, port=port)) for host, to in pairs]


@asynccontextmanager
async def a_system(plan: Plan) -> AsyncIterator[System]:
    """The system of `plan`, ready to answer; at the end all of its processes are gone."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    system = System(plan, folder)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        redis_port, replica_port, *system.ports = free_ports(2 + plan.count)
        system.redis = _redis("redis", redis_port, system)
        system.redis_line = await stack.enter_async_context(a_wire(redis_port))
        if plan.keeps_books:
            system.replica = _redis("replica", replica_port, system)
            system.disks = Disks.mounted_at(folder / "disks")
        if plan.has_tls:
            (folder / "ca").mkdir()
            system.authority = Authority(folder / "ca")
            system.stranger = Authority(folder / "ca", "stranger")
            for number in range(plan.count):
                system.certify(number)
        system.servers = [_server(number, plan, folder, port) for number, port in enumerate(system.ports)]
        system.disk.mkdir()
        system.lines = await stack.enter_async_context(_lines(system))
        if system.disks is not None:
            stack.callback(_end, system.disks)
            await system.restart(system.disks)
        system.routers = [_router(number, system) for number in range(plan.routers)]
        programs = [program for program in system.programs() if not program.is_started]
        for program in programs:
            stack.callback(_end, program)
            program.start()
        for program in programs:
            await asyncio.to_thread(program.wait_until_ready, STARTS_WITHIN_S)
        if system.replica is not None:
            system.replica.follow(system.redis)
        yield system


def _end(program: Program) -> None:
    with suppress(AssertionError, ProcessLookupError):
        os.killpg(program.pid, signal.SIGCONT)
    program.kill()
