"""Placement by real programs over HTTP, beside the simulator's figures for their rules.

    make engines && python benchmarks/placement_http.py [--workload agents] [--load 60 90] [--program SMG] [--seeds 1]
        [--pace 3] [--programs DIR ...] [--json FILE]

Each program runs as a process in front of the same eight simulated engines (`simulation/vllm_server.py`), which speak
vLLM's HTTP with streams, usage, metrics and cache events. A step takes as long as on the L40S of
`benchmarks/placement.py`, but plans as vLLM does: first come, first served, at most 2,048 tokens in a step, 16 requests
at once. The clock runs `--pace` times as fast as the wall's, so the time that programs and connections take themselves
counts as many times as it takes; Pointsman's targets and its time between probes are divided by the pace, and options
of the peers are their defaults. Programs are started anew for each run, as are the engines.

Requests, classes, columns and seeds are those of `benchmarks/placement.py`. The row below each program is its rule
in the simulator, on machines of the same kind that report their load after each step. `router`: CPU seconds of the
program for each second; `rest`: those of the engines and of the client, which share a core.

SMG, vllm-router and Envoy are there after `make engines`; sglang-router where `--programs` names a directory with it
(`pip install sglang-router`). Dynamo's frontend speaks only to Dynamo's own workers, so it cannot stand in front of
these engines. Programs that are not there are left out. `--json FILE` appends each run to FILE, and skips the runs that
it has. A run takes 10 to 25 seconds at a pace of 5, on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_rules import policies
from benchmarks.placement import (
    BOUND,
    HEADS,
    JUDGED,
    L40S,
    Figures,
    a_config,
    asked,
    behind,
    bound_of,
    figures_of,
    fleet_of,
    machines_of,
    mean_of,
    run_of,
    table_of,
)
from benchmarks.router_programs import Running, Setting, ahead_of_others, envoy_with_picker, of_others, pointsman
from policies.nouns import Outcome, Usage
from simulation.arrivals import CHUNK_TOKENS, Arrival
from simulation.client import Call
from simulation.engine import Work
from simulation.run import Backend, Run
from simulation.vllm_server import Ports, vllm_servers, write_tokenizer
from simulation.workloads import BATCH, WORKLOADS, ScaledLoad, load_of
from tests.engines.programs import Program, free_ports, program
from tests.engines.routed import KEY

MODEL, CHAT = "m", "/v1/chat/completions"
ENGINE = replace(L40S, ranks=False, batch_tokens=2048)
"""The machine of each engine: vLLM's defaults on such a GPU, but for 16 requests at once."""

SLA = """
classes:
  chat:  {{ttft_p95: %(chat_ttft)dms, tpot_p95: %(chat_tpot)dms}}
  long:  {{ttft_p95: %(long_ttft)dms, tpot_p95: %(long_tpot)dms}}
  batch: {{deadline: %(batch)dms, preemptible: true}}
tenants: {{all: {{keys: ["{key}"]}}}}
pools: {{engines: {pool}}}
rules:
  - {{when: {{priority: batch}}, class: batch, policy: {policy}}}
  - {{when: {{prompt_tokens: ">= 6k"}}, class: long, policy: {policy}}}
  - {{class: chat, policy: {policy}}}
policies:
  former: {{score: {{expected_ttft: 1, cache_thrift: 4, balance: 1}}}}
server: {servers}
{more}
"""


@dataclass(frozen=True)
class Entry:
    """A program: how it is started, its rule's name in the simulator, and the other program that it needs, if any."""

    rule: str
    start: Callable[[Setting], Running]
    needs: str | None = None


CACHE_AWARE = "SMG, SGLang: cache_aware"
ENTRIES = {
    "Pointsman, default": Entry("Pointsman: default", pointsman),
    "Pointsman, former default": Entry("Pointsman: former default", lambda at: pointsman(at, policy="former")),
    "Envoy with Pointsman's picker": Entry("Pointsman: default", envoy_with_picker, "envoy"),
    "SMG cache_aware": Entry(CACHE_AWARE, lambda at: of_others(at, "smg", "launch", "--policy", "cache_aware"), "smg"),
    "sglang-router cache_aware": Entry(
        CACHE_AWARE, lambda at: of_others(at, "sglang-router", "launch", "--policy", "cache_aware"), "sglang-router"
    ),
    "vllm-router cache_aware": Entry(
        CACHE_AWARE, lambda at: of_others(at, "vllm-router", "--policy", "cache_aware"), "vllm-router"
    ),
    "vllm-router consistent_hash": Entry(
        "vllm-router: consistent_hash",
        lambda at: of_others(at, "vllm-router", "--policy", "consistent_hash"),
        "vllm-router",
    ),
}
CHOICES = tuple(name for name, workload in WORKLOADS.items() if not workload.changes and len({*workload.speeds}) == 1)
USUAL = ("documents", "agents", "conversations", "batch beside chat", "bursts")
SIMULATED = "  its rule, simulated"
ENGINES_AT_ONCE = 8
CLEAR = 0.05
"""Figures that differ by more than this share are not noise."""

PROBED_S = 2.0
"""Programs are ready when they have probed all engines."""

CORES = sorted(os.sched_getaffinity(0))


class HttpCell(msgspec.Struct, frozen=True):
    """The figures of one program on one workload at one load with one seed, and of its rule in the simulator.

    `failed` requests had no whole answer. `router_cpu` and `rest_cpu` are shares of a core.
    """

    workload: str
    load: int
    program: str
    seed: int
    pace: float
    figures: Figures
    simulated: Figures
    failed: int
    router_cpu: float
    rest_cpu: float


class Address(NamedTuple):
    """One engine's place."""

    ports: Ports

    @property
    def port(self) -> int:
        """Of its HTTP."""
        return self.ports.http

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def events(self) -> str:
        """Address of its cache events."""
        return f"tcp://127.0.0.1:{self.ports.events}"

    @property
    def replay(self) -> str:
        """Address of their repetition."""
        return f"tcp://127.0.0.1:{self.ports.replay}"


# -- the engines, in a process of their own ---------------------------------------------------------------------------


async def serve_engines(ports: Sequence[Ports], pace: float) -> None:
    """Serve an engine at each of `ports` until the process ends."""
    async with vllm_servers([ENGINE] * len(ports), ports, model=MODEL, pace=pace):
        await asyncio.Event().wait()


def the_engines(folder: Path, count: int, pace: float) -> tuple[Program, list[Address]]:
    """The process of the engines, not started, and their addresses."""
    free = iter(free_ports(3 * count))
    ports = [Ports(*three) for three in zip(free, free, free, strict=True)]
    words = json.dumps([pace, *map(astuple, ports)])
    command = (sys.executable, __file__, "--engines", words)
    ready = f"http://127.0.0.1:{ports[-1].http}/health"
    return Program("engines", command, folder, ready, {"PYTHONPATH": str(ROOT)}), [Address(at) for at in ports]


# -- the client -------------------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


def prompt_of(arrival: Arrival) -> str:
    """Its text, a letter a token: chunks of equal names are equal, and nothing else is."""
    whole = min(arrival.prompt_tokens, len(arrival.chunks) * CHUNK_TOKENS)
    shared = "".join(_repeated(f"{name:x} ", CHUNK_TOKENS) for name in arrival.chunks)[:whole]
    return shared + _repeated(f"request {arrival.number} ", arrival.prompt_tokens - whole)


def _repeated(word: str, letters: int) -> str:
    return (word * (letters // len(word) + 1))[:letters]


def class_of(arrival: Arrival) -> str:
    """Its service class, by the rules of SLA."""
    if arrival.priority == BATCH:
        return "batch"
    return "long" if arrival.prompt_tokens >= 6000 else "chat"


@dataclass
class Client:
    """Sends arrivals to `url` at their times, which pass `pace` times as fast as the wall's."""

    http: aiohttp.ClientSession
    url: str
    pace: float
    began_s: float = 0.0

    def now_s(self) -> float:
        """Seconds of the simulation since the client began."""
        return (time.monotonic() - self.began_s) * self.pace

    async def send(self, arrivals: Sequence[Arrival]) -> list[Call]:
        """Send all; returns when the last answer has ended."""
        bodies = [self._body(arrival) for arrival in arrivals]
        self.began_s = time.monotonic()
        return await asyncio.gather(*(self._ask(*both) for both in zip(arrivals, bodies, strict=True)))

    def _body(self, arrival: Arrival) -> bytes:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt_of(arrival)}],
            "max_tokens": arrival.new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def _ask(self, arrival: Arrival, body: bytes) -> Call:
        await asyncio.sleep(arrival.at_s / self.pace - (time.monotonic() - self.began_s))
        call = Call(replace(arrival, at_s=self.now_s()), service_class=class_of(arrival), outcome=Outcome.FAILED)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        headers |= {"x-session-id": arrival.session or "", "x-pointsman-session": arrival.session or ""}
        if arrival.priority:
            headers["x-pointsman-priority"] = arrival.priority
        try:
            async with self.http.post(self.url + CHAT, data=body, headers=headers) as reply:
                if reply.status != 200:
                    call.code = f"{reply.status} {(await reply.text())[:200]}"
                    return call
                async for line in reply.content:
                    self._read(call, line)
        except aiohttp.ClientError as error:
            call.code = repr(error)
        return call

    def _read(self, call: Call, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            call.ended_s = self.now_s()
            is_whole = call.usage.completion_tokens == call.arrival.new_tokens
            call.outcome = Outcome.FINISHED if is_whole else Outcome.FAILED
        elif line.startswith(b"data: "):
            chunk = _CHUNKS.decode(line[6:])
            if any(choice.delta.content for choice in chunk.choices):
                call.last_s = self.now_s()
                call.first_s = call.first_s or call.last_s
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details or _Details()
                call.usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, details.cached_tokens or 0)


# -- runs -------------------------------------------------------------------------------------------------------------


async def run_program(
    entry: Entry, load: ScaledLoad, folder: Path, *, pace: float, programs: Sequence[Path] = (), on_cores: bool = True
) -> dict[str, Any]:
    """Send `load` to one program, which has just been started; the figures of HttpCell that are its own.

    `on_cores`: the program has a core, and the engines and this process share another.
    """
    write_tokenizer(folder)
    engines, addresses = the_engines(folder, ENGINES_AT_ONCE, pace)
    pool = {
        "tokenizer": str(folder),
        "options": {"max_requests": ENGINE.running},
        "health": {"probe_every": f"{2000 / pace:.0f}ms"},
    }
    setting = Setting(folder, addresses, MODEL, sla_at(pace), pool, programs)
    engines.start()
    try:
        engines.wait_until_ready(30)
        async with (
            entry.start(setting) as (url,),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            await asyncio.sleep(PROBED_S)
            ours = {os.getpid(), engines.pid}
            routers = descendants_of(os.getpid()) - ours
            if on_cores:
                keep_on(CORES[0], routers)
                keep_on(CORES[-1], ours)
            before, began = (cpu_s(routers), cpu_s(ours)), time.monotonic()
            calls = await Client(http, url, pace).send(load.arrivals)
            seconds = time.monotonic() - began
            router_s, rest_s = cpu_s(routers) - before[0], cpu_s(ours) - before[1]
            works = [await work_of(http, each.url) for each in addresses]
    finally:
        engines.stop()
    backends = [Backend(f"engine-{at}", "own", work) for at, work in enumerate(works)]
    unfinished = [call for call in calls if call.outcome is not Outcome.FINISHED]
    for call in unfinished[:1]:
        print(f"{len(unfinished)} requests failed, such as: {call.code or call}", file=sys.stderr)
    config, fleet = a_config(policies(ENGINE)[entry.rule]), fleet_of(WORKLOADS[USUAL[0]], ENGINE)
    return {
        "figures": figures_of(Run(config, fleet, calls, backends, {}, seconds * pace)),
        "failed": len(unfinished),
        "router_cpu": round(router_s / seconds, 3),
        "rest_cpu": round(rest_s / seconds, 3),
    }


def is_there(name: str, folders: Sequence[Path]) -> bool:
    """Can this program be started? If not, that is printed."""
    needed = ENTRIES[name].needs
    if needed is None or any((folder / needed).exists() for folder in (Path(program("")), *folders)):
        return True
    print(f"{name} is left out: there is no program {needed}", file=sys.stderr)
    return False


async def work_of(http: aiohttp.ClientSession, url: str) -> Work:
    """The totals of one engine."""
    async with http.get(f"{url}/work") as reply:
        return Work(**await reply.json())


def sla_at(pace: float) -> str:
    """Pointsman's file, with the targets of `benchmarks/placement.py` at this pace."""
    config = a_config(policies(ENGINE)["Pointsman: default"])
    chat, long, batch = (config.classes[name] for name in ("chat", "long", "batch"))

    def paced(seconds: float | None) -> int:
        assert seconds is not None
        return round(1000 * seconds / pace)

    targets = {"chat_ttft": chat.ttft_s, "chat_tpot": chat.tpot_s, "long_ttft": long.ttft_s, "long_tpot": long.tpot_s}
    return SLA % {name: paced(seconds) for name, seconds in {**targets, "batch": batch.deadline_s}.items()}


def descendants_of(pid: int) -> set[int]:
    """All processes that `pid` has started, and theirs."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants_of(child)
    return found


def cpu_s(pids: Set[int]) -> float:
    """User and system time of these processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def keep_on(core: int, pids: Set[int]) -> None:
    """Let all threads of these processes run on `core` only."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def cells(chosen: argparse.Namespace, done: Mapping[tuple[str, int, str, int], HttpCell]) -> Iterator[HttpCell]:
    """All runs that were asked for, those that are `done` and the others."""
    entries = {
        name: ENTRIES[name] for name in ENTRIES if asked(name, chosen.program) and is_there(name, chosen.programs)
    }
    for name in [name for name in CHOICES if asked(name, chosen.workload or USUAL)]:
        for percent in chosen.load:
            for seed in chosen.seeds:
                workload = WORKLOADS[name]
                load = load_of(workload, machines_of(workload), share=percent / 100, seed=seed)
                simulated: dict[str, Figures] = {}
                for program_name, entry in entries.items():
                    if (known := done.get((name, percent, program_name, seed))) is not None:
                        yield known
                        continue
                    if entry.rule not in simulated:
                        run = run_of(workload, load, policies(ENGINE)[entry.rule], seed, machine=ENGINE)
                        simulated[entry.rule] = figures_of(run)
                    with tempfile.TemporaryDirectory() as folder:
                        running = run_program(entry, load, Path(folder), pace=chosen.pace, programs=chosen.programs)
                        found = asyncio.run(running)
                    cell = HttpCell(
                        name, percent, program_name, seed, chosen.pace, simulated=simulated[entry.rule], **found
                    )
                    print(f"{name} {percent} {program_name} {seed}: {cell}", file=sys.stderr, flush=True)
                    yield cell


def main() -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workload", nargs="+", help=f"only workloads with one of these in their names; else {USUAL}")
    options.add_argument("--program", nargs="+", help="only programs with one of these in their names")
    options.add_argument("--load", type=int, nargs="+", default=[60, 90], help="percent")
    options.add_argument("--seeds", type=int, nargs="+", default=[1])
    options.add_argument("--pace", type=float, default=3.0, help="seconds of the simulation in each second")
    options.add_argument("--programs", nargs="+", type=Path, default=[], help="directories with other programs")
    options.add_argument("--json", type=Path, help="file of runs, which are not repeated")
    options.add_argument("--engines", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.engines:
        pace, *ports = json.loads(chosen.engines)
        asyncio.run(serve_engines([Ports(*at) for at in ports], pace))
        return
    ahead_of_others()
    done = read_cells(chosen.json)
    found: dict[tuple[str, int], dict[str, list[HttpCell]]] = {}
    for cell in cells(chosen, done):
        if chosen.json and (cell.workload, cell.load, cell.program, cell.seed) not in done:
            with chosen.json.open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
        found.setdefault((cell.workload, cell.load), {}).setdefault(cell.program, []).append(cell)
    for (name, percent), rows in found.items():
        print(f"\n{name} at {percent} %; seconds, TPOT in ms", *report_of(name, percent, rows), sep="\n")
    print("\ndistance from the best program, over HTTP and (simulated): mean of the tables")
    print(*distances_of(list(found.values())), sep="\n")
    print(f"\npairs of programs more than {CLEAR:.0%} apart in the simulator, and those in the same order over HTTP")
    print(*(f"  {line}" for line in orders_of(list(found.values()))), sep="\n")


def read_cells(path: Path | None) -> dict[tuple[str, int, str, int], HttpCell]:
    """The runs in a file, if it is there."""
    lines = path.read_bytes().splitlines() if path and path.exists() else []
    known = [msgspec.json.decode(line, type=HttpCell) for line in lines]
    return {(cell.workload, cell.load, cell.program, cell.seed): cell for cell in known}


def report_of(name: str, percent: int, rows: Mapping[str, Sequence[HttpCell]]) -> Iterator[str]:
    """The lines of one table: each program, and below it its rule; means over the seeds."""
    workload = WORKLOADS[name]
    seeds = {cell.seed for row in rows.values() for cell in row}
    loads = [load_of(workload, machines_of(workload), share=percent / 100, seed=seed) for seed in sorted(seeds)]
    yield from table_of({BOUND: mean_of([bound_of(workload, load) for load in loads])})
    for program_name, row in rows.items():
        _, measured = table_of({program_name: mean_of([cell.figures for cell in row])})
        _, simulated = table_of({SIMULATED: mean_of([cell.simulated for cell in row])})
        router, rest = (statistics.fmean(getattr(cell, name) for cell in row) for name in ("router_cpu", "rest_cpu"))
        failed = sum(cell.failed for cell in row)
        yield f"{measured}   router {router:.2f}, rest {rest:.2f}" + (f", {failed} failed" if failed else "")
        yield simulated


def distances_of(tables: Sequence[Mapping[str, Sequence[HttpCell]]]) -> Iterator[str]:
    """For each program and column: how far it is behind the best program, over HTTP and in the simulator."""
    yield f"  {'':30}" + "".join(f"{HEADS[column]:>20}" for column in JUDGED)
    for name in dict.fromkeys(name for rows in tables for name in rows):
        words = []
        for column in JUDGED:
            far: list[tuple[float, float]] = []
            for rows in tables:
                if name in rows:
                    measured = {other: mean_of([cell.figures for cell in row]) for other, row in rows.items()}
                    simulated = {other: mean_of([cell.simulated for cell in row]) for other, row in rows.items()}
                    far.append((behind(measured, name, column), behind(simulated, name, column)))
            over_http, in_simulator = map(statistics.fmean, zip(*far, strict=True))
            words.append(f"{f'{over_http:.1%} ({in_simulator:.1%})':>20}")
        yield f"  {name:30}" + "".join(words)


def orders_of(tables: Sequence[Mapping[str, Sequence[HttpCell]]]) -> Iterator[str]:
    """For each column: of the pairs of programs that differ clearly in the simulator, those in the same order."""
    for column in JUDGED:
        same = clear = 0
        for rows in tables:
            values = [
                (getattr(mean_of([cell.simulated for cell in row]), column), mean_of([cell.figures for cell in row]))
                for row in rows.values()
            ]
            for (simulated, measured), (other, beside) in itertools.combinations(values, 2):
                if abs(simulated - other) > CLEAR * max(simulated, other):
                    clear += 1
                    same += (simulated < other) == (getattr(measured, column) < getattr(beside, column))
        yield f"{HEADS[column]}: {same} of {clear}"


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
