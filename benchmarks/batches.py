"""Batches beside interactive requests: what they cost those, and their throughput beside that of a naive client.

    python benchmarks/batches.py [--lines 10000] [--seconds 600] [--rate 8] [--seeds 0 1 2]

The router's own pipeline, batches and store run on a virtual clock in front of two simulated backends: the shards'
scheduler and cache with the times of an 8B model on one H200 (`simulation/speed.py`). So times are exact on a busy
machine, and the same seed gives the same numbers. Interactive requests arrive open loop (Poisson), 4,000 tokens on
average of which 1,024 are shared by a tenth of them, with answers of 200 tokens. A batch has questions about 400
documents of 3,000 tokens in random order, with answers of 64 tokens.

Each seed is run four times: without a batch, with it, with the same file in its own order, and with a naive client: it
sends the lines in the file's order as requests of the last class, a fixed number at a time. Computed tokens and hit
rates are the engines' own counts of all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from backends.base import CacheListener
from policies.errors import ExpectedError
from policies.nouns import Outcome
from policies.sla.parse import parse
from router.batches.job import Job
from router.batches.pace import Pace
from router.call.identify import Granted
from router.call.pipeline import serve
from router.operate.operations import Operations
from router.shared.store.memory import MemoryStore
from router.start.build import build
from simulation.arrivals import Arrival
from simulation.backend import NEW_TOKENS, TOKEN_IDS, SimulatedBackend
from simulation.client import Call, SimulatedCaller
from simulation.speed import Machine
from simulation.virtual_time import run_virtually

MODEL = "model"
SLA = """
classes: {{chat: {{ttft_p95: 2s}}, batch: {{deadline: 24h}}}}
pools: {{own: {{kind: shard, at: [{at}], model: model}}}}
rules: [{{when: {{priority: batch}}, class: batch}}, {{class: chat}}]
batches: {{store: "{store}", slowdown: {slowdown}}}
"""
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 3000, 60, 64


class AtOnce(ThreadPoolExecutor):
    """Runs what it gets before it returns: the virtual clock does not wait for threads."""

    def submit(self, work: Any, /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            done.set_exception(error)
        return done


class Backend(SimulatedBackend):
    """Answers lines too: the answer is as long as it may be."""

    def generate(self, request: Any, prompt: Any) -> Any:
        if TOKEN_IDS not in (prompt.body or {}):
            body = {TOKEN_IDS: prompt.token_ids, NEW_TOKENS: request.max_new_tokens}
            prompt = msgspec.structs.replace(prompt, body=body)
        return super().generate(request, prompt)


@dataclass
class Result:
    """One run."""

    ttfts: dict[int, float] = field(default_factory=dict)
    tpots: dict[int, float] = field(default_factory=dict)
    until_s: float = 1e9
    failed: int = 0
    line_s: float | None = None
    lines: int = 0
    computed: int = 0
    cached: int = 0
    answered: list[str] = field(default_factory=list)


def interactive(rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    rng, at_s, number = random.Random(seed), 0.0, 0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        tokens = min(30_000, int(rng.lognormvariate(7.8, 0.9)))
        shared = tuple((1 + rng.randrange(8)) * 10 + at for at in range(2)) if rng.random() < 0.1 else ()
        yield Arrival(number, at_s, max(1100, tokens) if shared else tokens, 200, shared, model=MODEL)
        number += 1


def write_lines(path: Path, count: int, documents_count: int, seed: int) -> None:
    rng = random.Random(seed)
    documents = [[rng.randrange(1000, 30_000) for _ in range(DOCUMENT_TOKENS)] for _ in range(documents_count)]
    with path.open("w") as file:
        for number in range(count):
            prompt = rng.choice(documents) + [rng.randrange(1000, 30_000) for _ in range(QUESTION_TOKENS)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run_one(arrivals: Sequence[Arrival], lines: Path | None, how: str, args: argparse.Namespace) -> Result:
    return run_virtually(_run(arrivals, lines, how, args))


async def _run(arrivals: Sequence[Arrival], lines: Path | None, how: str, args: argparse.Namespace) -> Result:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(AtOnce())
    with tempfile.TemporaryDirectory() as store:
        config = parse(
            SLA.format(store=store, slowdown=args.slowdown, at=", ".join(f'"b{n}:1"' for n in range(args.backends)))
        )
        made: list[Backend] = []
        machine = Machine(kv_tokens=args.kv_tokens)

        def make(listener: CacheListener) -> list[Backend]:
            served, clock = frozenset({MODEL}), loop.time
            made.extend(
                Backend(
                    name, pool="own", kind="shard", machine=machine, models=served, model=MODEL, listener=listener,
                    clock=clock,
                )
                for name in (f"own-{n}" for n in range(args.backends))
            )  # fmt: skip
            return made

        operations = build(
            config, backends=make, clock=loop.time, unix_time=loop.time, rng=random.Random(0),
            quotas=MemoryStore(loop.time),
        )  # fmt: skip
        gateway = operations.gateway
        for backend in made:
            backend.on_load = gateway.cluster.changed
            await gateway.cluster.probe(backend.name)
        result = Result()
        asking = asyncio.create_task(_ask_all(arrivals, operations, result))
        if lines is not None and how == "naive":
            await _naive(lines, operations, args.concurrency, result)
        elif lines is not None:
            await _batch(lines, operations, result, is_sorted=how == "batch", show=args.show)
        await asking
        for backend in made:
            work = backend.engine.work
            result.computed += work.prompt_tokens
            result.cached += work.cached_tokens
            await backend.close()
        await gateway.tokenizers.close()
        return result


async def _ask_all(arrivals: Sequence[Arrival], operations: Operations, result: Result) -> None:
    gateway, clock = operations.gateway, operations.gateway.clock
    calls: dict[str, Call] = {}

    class Listening:
        def decided(self, *_: object) -> None: ...
        def missed(self, *_: object) -> None: ...
        def ended(self, account: Any, outcome: Any, code: str, at: float) -> None:
            if account.id in calls:
                calls[account.id].ended(account, outcome, code, at)

    operations.telemetry.listen(Listening())

    async def ask(arrival: Arrival) -> None:
        name = f"i{arrival.number:023x}"
        calls[name] = call = Call(arrival)
        try:
            await serve(SimulatedCaller(name, None, call, clock), gateway)
        except ExpectedError:
            result.failed += 1
        gateway.later.flush()
        if call.outcome is Outcome.FINISHED:
            result.ttfts[arrival.number] = call.ttft_s or 0.0
            result.tpots[arrival.number] = call.tpot_s or 0.0

    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            if (wait_s := arrival.at_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(ask(arrival))


async def _batch(lines: Path, operations: Operations, result: Result, *, is_sorted: bool, show: bool) -> None:
    batches, clock = operations.batches, operations.gateway.clock
    assert batches is not None
    batches.means = replace(batches.means, is_sorted=is_sorted, pace=Pace(threads=AtOnce()))
    async with batches:
        await asyncio.sleep(60.0)
        began_at = clock()
        draft = batches.shelf.store.draft("")
        draft.write(await asyncio.to_thread(lines.read_bytes))
        assert operations.gateway.config.anonymous is not None
        tenant = operations.gateway.config.anonymous.name
        job = Job(
            granted=Granted(tenant),
            id="batch_" + "0" * 28, tenant=tenant, api="openai", endpoint="/v1/completions", created_at=clock(),
            expires_at=clock() + 86_400,
        )  # fmt: skip
        await batches.begin(job, partial(batches.shelf.give_input, job, draft))
        while (now := batches.shelf.job(job.tenant, job.id)) is not None and not now.has_ended:
            await asyncio.sleep(1.0)
            if show and int(clock()) % 10 == 0:
                room = batches.room
                slow = room._company_of("own").slowdown
                print(f"{clock():6.0f} s", room, {n: round(w.size, 1) for n, w in room.spare._windows.items()}, slow)
        assert now is not None
        result.line_s, result.lines, result.until_s = clock() - began_at, now.counts.succeeded, clock()
        assert now.status == "completed", now


async def _naive(lines: Path, operations: Operations, concurrency: int, result: Result) -> None:
    gateway, clock = operations.gateway, operations.gateway.clock
    await asyncio.sleep(60.0)
    began_at, waiting = clock(), iter(lines.open())

    async def work() -> None:
        for line in waiting:
            body = json.loads(line)["body"]
            token_ids = np.array(body["prompt"], dtype="<u4").tobytes()
            arrival = Arrival(0, clock(), len(body["prompt"]), ANSWER_TOKENS, (), model=MODEL, priority="batch")

            class Caller(SimulatedCaller):
                async def read(self, held: Any) -> Any:
                    ask = await super().read(held)
                    ids: dict[str, Any] = {TOKEN_IDS: token_ids, NEW_TOKENS: ANSWER_TOKENS}  # noqa: B023
                    return msgspec.structs.replace(ask, inputs=(token_ids,), bodies=(ids,))  # noqa: B023

            await serve(Caller(next(gateway.ids), None, Call(arrival), clock), gateway)
            result.lines += 1

    await asyncio.gather(*(work() for _ in range(concurrency)))
    result.line_s, result.until_s = clock() - began_at, clock()


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--backends", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--slowdown", default="2%")
    parser.add_argument("--kv-tokens", type=int, default=300_000)
    parser.add_argument("--how", nargs="+", default=["alone", "batch", "file order", "naive"])
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    changes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        write_lines(lines, args.lines, args.documents, 7)
        for seed in args.seeds:
            arrivals = list(interactive(args.rate, args.seconds, seed))
            base: Result | None = None
            for how in args.how:
                result = run_one(arrivals, None if how == "alone" else lines, how, args)
                base = base or result
                # those that came while the batch ran, in both runs
                during = {arrival.number for arrival in arrivals if 60.0 <= arrival.at_s < result.until_s - 1.0}
                ttfts = [result.ttfts[each] for each in during & result.ttfts.keys()]
                tpots = [result.tpots[each] for each in during & result.tpots.keys()]
                before = [base.ttfts[each] for each in during & base.ttfts.keys()]
                p95 = percentile(ttfts, 0.95)
                change = p95 / percentile(before, 0.95) - 1
                middle = percentile(ttfts, 0.5) / percentile(before, 0.5) - 1
                mean = statistics.fmean(ttfts) / statistics.fmean(before) - 1
                changes.setdefault(how, []).append(change)
                hit = result.cached / max(1, result.cached + result.computed)
                speed = "" if result.line_s is None else f"{result.lines / result.line_s:6.1f} lines/s"
                print(
                    f"seed {seed}  {how:10}  TTFT P50 {percentile(ttfts, 0.5) * 1e3:6.1f} ({middle:+.1%})"
                    f" P95 {p95 * 1e3:6.1f} ({change:+.1%}) P99 {percentile(ttfts, 0.99) * 1e3:7.1f} ms"
                    f" mean {mean:+.1%} of {len(ttfts):,}"
                    f"  TPOT P50 {percentile(tpots, 0.5) * 1e3:5.2f} ms"
                    f"  computed {result.computed / 1e6:6.2f}M  hit {hit:5.1%}  {speed}  failed {result.failed}",
                    flush=True,
                )
    for how, shares in changes.items():
        print(f"{how:10}  change of TTFT P95, median {statistics.median(shares):+.1%}")


if __name__ == "__main__":
    main()
