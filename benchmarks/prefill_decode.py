"""Three real vLLM behind Pointsman: one computes prompts, two fetch the KV through NIXL and answer. Each is killed.

    make engines && python benchmarks/prefill_decode.py [--requests 300] [--seed 1] [--skip-kills]

First, `--requests` questions about documents, each of its own length and six at a time, half of them streamed, go
through both legs; then the same go to one vLLM alone. Equal answers are counted, and what vLLM's own counters say of
the transfers and of where the tokens of prompts came from.

Then, once for each row of the second table, six requests run when one of the two engines that they use is killed
(SIGKILL) or stands still (SIGSTOP), in the phase that the row says. `longest` is the longest time of any of them;
the timeouts of the pool are 5 s, so none may take longer than 7 s more than the longest undisturbed one.

Where UCX has no RDMA its threads poll, two for each engine: on a machine with two cores transfers are held up for
seconds, and requests go on without them.

The bundled model computes a prompt faster than its KV arrives here, so the router's rule would never use a transfer:
every prompt of 100 tokens or more is sent through both legs by force.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from router.call.prefill import FirstLegs
from shards.bundled import NAME
from tests.engines.apart import a_question, a_router, file_of, is_there, nixl, warmed
from tests.engines.programs import MISSING, VLLM, a_vllm, free_ports
from tests.engines.routed import KEY, Answer, Client

AT_ONCE = 6
TIMEOUTS = {"first_byte": "5s", "first_token": "5s", "between_tokens": "5s"}
ALLOWED_S = 7.0


@dataclass
class Engines:
    """The three vLLM."""

    prompts: VLLM
    answers: list[VLLM]

    @property
    def all(self) -> list[VLLM]:
        """The one that computes prompts first."""
        return [self.prompts, *self.answers]

    def metric(self, name: str) -> float:
        """The sum over those that answer."""
        return sum(each.metric(name) for each in self.answers)

    def sources(self) -> dict[str, float]:
        """Tokens of prompts by where they came from, over those that answer."""
        sums: dict[str, float] = {}
        for each in self.answers:
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
                name = f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="{NAME}",source="{source}"}}'
                sums[source] = sums.get(source, 0.0) + each.metric(name)
        return sums


@dataclass
class Watch:
    """Tells when a request is in a phase: `during` its first leg, `between` the legs, or `after` some of its answer."""

    phase: str
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def on(self, legs: type[FirstLegs]) -> AsyncIterator[None]:
        """Set `reached` when the first request of a router gets there."""
        usual: Any = legs.run

        async def run(itself: FirstLegs, *args: Any) -> Any:
            if self.phase == "during":
                # when it has been sent
                asyncio.get_running_loop().call_later(0.02, self.reached.set)
            done = await usual(itself, *args)
            if self.phase == "between":
                self.reached.set()
                # the engine dies before the second leg begins
                await asyncio.sleep(0.05)
            return done

        legs.run = run  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            legs.run = usual  # type: ignore[method-assign]


async def all_of(client: Client, questions: Sequence[str]) -> list[Answer]:
    """The answers, of which six are waited for at a time; every second one is streamed."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> Answer:
        async with gate:
            return await client.chat(questions[at], stream=at % 2 == 0)

    return await asyncio.gather(*map(one, range(len(questions))))


async def compare(engines: Engines, questions: Sequence[str]) -> None:
    """Print what both legs answer beside one engine, and the engines' counters."""
    names = ("vllm:nixl_xfer_time_seconds_count", "vllm:nixl_xfer_time_seconds_sum", "vllm:nixl_bytes_transferred_sum")
    before, had = [engines.metric(name) for name in names], engines.sources()
    async with a_router(file_of(engines.prompts, engines.answers)) as (client, router):
        began = time.monotonic()
        through = await all_of(client, questions)
        took = time.monotonic() - began
        router.check()
    count, seconds, moved = (engines.metric(name) - was for name, was in zip(names, before, strict=True))
    sources = {name: tokens - had[name] for name, tokens in engines.sources().items()}
    engines.answers[0].forget_prefixes()
    async with aiohttp.ClientSession() as http:
        single = await all_of(Client(http, engines.answers[0].url), questions)
    equal = sum(one.text == other.text for one, other in zip(through, single, strict=True))
    tokens = sum(int(answer.usage["prompt_tokens"]) for answer in through)
    print(f"{len(questions)} requests in {took:.0f} s, {tokens:,} tokens of prompts")
    print(f"answers equal to those of one vLLM: {equal} of {len(questions)}")
    print(f"transfers: {count:.0f}, {moved / 1e6:,.0f} MB, {1000 * seconds / max(1, count):.1f} ms each")
    print("tokens of prompts where answers were given:", ", ".join(f"{name} {n:,.0f}" for name, n in sources.items()))


async def disturbed(engines: Engines, victim: int, by: signal.Signals, phase: str, seed: int) -> tuple[int, float]:
    """How many of six requests were answered while `victim` was ended or stopped, and the longest time of one."""
    engine, watch = engines.all[victim], Watch(phase)
    questions = [a_question(seed + at) for at in range(AT_ONCE)]
    times: list[float] = []

    async def one(client: Client, at: int) -> bool:
        began = time.monotonic()
        try:
            await streamed(client, questions[at], on_first)
        except (AssertionError, aiohttp.ClientError) as error:
            print(f"    lost: {str(error)[:300]}", file=sys.stderr)
            return False
        finally:
            times.append(time.monotonic() - began)
        return True

    def on_first() -> None:
        if phase == "after":
            watch.reached.set()

    async def strike() -> None:
        await watch.reached.wait()
        if by is signal.SIGKILL:
            await asyncio.to_thread(engine.kill)
        else:
            os.killpg(engine.pid, by)

    config = file_of(engines.prompts, engines.answers, **TIMEOUTS)
    async with a_router(config) as (client, router), watch.on(FirstLegs):
        striking = asyncio.create_task(strike())
        answered = await asyncio.gather(*(one(client, at) for at in range(AT_ONCE)))
        watch.reached.set()
        await striking
        router.check()
    if by is signal.SIGKILL:
        engine.start()
        await asyncio.to_thread(engine.wait_until_ready)
        await asyncio.to_thread(warmed, engine)
    else:
        os.killpg(engine.pid, signal.SIGCONT)
    return sum(answered), max(times)


async def streamed(client: Client, text: str, on_first: Callable[[], None]) -> None:
    """Read a streamed answer to its end; `on_first` is called at its first piece. Raises AssertionError if it broke."""
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 96, "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.http.post(f"{client.url}/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        last = b""
        async for line in reply.content:
            if b'"content"' in line:
                on_first()
            last = line.strip() or last
    assert last == b"data: [DONE]", last


CASES = [
    (victim, by, phase)
    for victim, phases in ((0, ("during", "between")), (1, ("between", "after")))
    for phase in phases
    for by in (signal.SIGKILL, signal.SIGSTOP)
]


async def kills(engines: Engines, seed: int) -> None:
    """Print a row for each engine, way to end it, and phase."""
    usual = await disturbed(engines, 0, signal.SIGCONT, "during", seed)
    print(f"\nsix requests, undisturbed: {usual[0]} answered, the longest took {usual[1]:.1f} s\n")
    print("| engine | by | phase of the first request | answered of 6 | longest, s |\n|---|---|---|---|---|")
    for at, (victim, by, phase) in enumerate(CASES):
        answered, longest = await disturbed(engines, victim, by, phase, seed + 100 * (at + 1))
        late = " **late**" if longest > usual[1] + ALLOWED_S else ""
        role = "prompts" if victim == 0 else "answers"
        print(f"| {role} | {by.name} | {phase} | {answered} | {longest:.1f}{late} |", flush=True)


def main() -> None:
    """Parse the command line, run, and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--requests", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--skip-kills", action="store_true")
    chosen = options.parse_args()
    if MISSING or not is_there():
        raise SystemExit(MISSING or "there is no nixl, which moves KV between engines")
    rng = random.Random(chosen.seed)
    questions = [a_question(rng.getrandbits(32), rng.randrange(150, 1200)) for _ in range(chosen.requests)]
    with tempfile.TemporaryDirectory() as folder:
        vllms = [a_vllm(f"v{at}", Path(folder), nixl(port)) for at, port in enumerate(free_ports(3))]
        engines = Engines(vllms[0], vllms[1:])
        try:
            for each in vllms:
                each.start()
            for each in vllms:
                each.wait_until_ready()
                warmed(each)
            asyncio.run(compare(engines, questions))
            if not chosen.skip_kills:
                asyncio.run(kills(engines, chosen.seed * 10_000))
        finally:
            for each in vllms:
                each.kill()


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
