"""Streams through a router whose shards are killed one after the other, at random tokens of random streams.

`python -m tests.chaos.continued --cut 1000` goes on until so many streams were cut. The answers are compared with those
of the same requests when nothing is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import jsonschema

from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import document, facts_within, prompt
from tests.engines.programs import ROOT, Program, free_ports

SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["sha256:dc81b088d47dee432ace4a498915448892259b74b2c58b812bbdd356badfb103"]}}}}
pools:
  own: {{kind: shard, model: bundled, at: {at}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
KEY = "demo-key-of-acme"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}


@dataclass
class Stream:
    """One answer as its client got it."""

    text: str = ""
    pieces: int = 0
    ids: set[str] = field(default_factory=set)
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    error: Any = None
    backend: str = ""

    @property
    def completion_tokens(self) -> int:
        return sum(int(usage["completion_tokens"]) for usage in self.usages)


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of streams: greedy ones, seeded ones, and ones that are held to a schema."""
    rng = random.Random(seed)
    bodies = []
    for number in range(count):
        about = document(rng, facts_within(200))
        body: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": prompt(about.text, rng.choice(about.questions).question)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 96,
        }
        if number % 3 == 0:
            body |= {"temperature": 0, "ignore_eos": True}
        elif number % 3 == 1:
            body |= {"temperature": 1, "seed": number, "ignore_eos": True, "frequency_penalty": 0.2}
        else:
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
            body |= {"temperature": 1, "seed": number, "response_format": form, "max_tokens": 300}
        bodies.append(body)
    return bodies


@dataclass
class Shards:
    """Three shards in processes of their own, in front of them a router in this one."""

    router: Router
    programs: Mapping[str, Program]
    ports: Mapping[str, int]

    async def restart(self, name: str) -> None:
        """Start the shard `name`, which was killed, and wait until the router reaches it."""
        self.programs[name].start()
        await _serves(self.ports[name])


async def _serves(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(90):
        await channel.channel_ready()


def a_shard(name: str, port: int, folder: Path) -> Program:
    """A shard with the bundled model, on one thread."""
    options = ("--listen", f"127.0.0.1:{port}", "--threads", "1", "--kv-memory", "0.1")
    return Program(
        name, (sys.executable, "-P", "-m", "shards", *options), folder, "", environment={"PYTHONPATH": str(ROOT)}
    )


@asynccontextmanager
async def shards(folder: Path, count: int = 3) -> AsyncIterator[Shards]:
    """`count` shards with the bundled model, and a router that has reached them."""
    ports = {f"own-{at}": port for at, port in enumerate(free_ports(count))}
    programs = {}
    for name, port in ports.items():
        programs[name] = a_shard(name, port, folder)
    try:
        for program in programs.values():
            program.start()
        await asyncio.gather(*map(_serves, ports.values()))
        async with Router(parse(SLA.format(at=[f"127.0.0.1:{port}" for port in ports.values()]))) as router:
            assert await router.wait_until_reached(30)
            yield Shards(router, programs, ports)
    finally:
        for program in programs.values():
            program.kill()


async def stream(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], answer: Stream, waits: asyncio.Event | None = None
) -> None:
    """Read one stream into `answer`; `waits` is set after each piece."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        answer.backend = reply.headers.get("x-pointsman-backend", "")
        if reply.status != 200:
            answer.error = await reply.text()
            return
        async for line in reply.content:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = chunk["error"]
                continue
            answer.ids.add(chunk["id"])
            if chunk.get("usage"):
                answer.usages.append(chunk["usage"])
            for choice in chunk["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.pieces += bool(choice["delta"].get("content"))
                if choice["finish_reason"]:
                    answer.finish_reasons.append(choice["finish_reason"])
            if waits is not None:
                waits.set()


async def undisturbed(http: aiohttp.ClientSession, url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Stream]:
    """The answers when nothing fails."""
    answers = [Stream() for _ in bodies]
    await asyncio.gather(*(stream(http, url, body, answer) for body, answer in zip(bodies, answers, strict=True)))
    return answers


async def disturbed(
    there: Shards, http: aiohttp.ClientSession, bodies: Sequence[Mapping[str, Any]], rng: random.Random
) -> tuple[list[Stream], str]:
    """The answers when a shard is killed at a random token of a random one; the name of that shard."""
    answers, moved = [Stream() for _ in bodies], asyncio.Event()
    victim, at = rng.choice(answers), rng.randrange(1, 60)
    url = there.router.http_url
    pairs = zip(bodies, answers, strict=True)
    running = [asyncio.create_task(stream(http, url, body, answer, moved)) for body, answer in pairs]
    while victim.pieces < at and not all(task.done() for task in running):
        moved.clear()
        waiting = asyncio.create_task(moved.wait())
        await asyncio.wait((waiting, *running), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    there.programs[victim.backend].kill()
    await asyncio.gather(*running)
    return answers, victim.backend


def complaints(got: Stream, wanted: Stream, body: Mapping[str, Any]) -> list[str]:
    """What is wrong with an answer; empty if it is what it would have been undisturbed."""
    found = []
    if got.error is not None:
        return [f"error: {got.error}"]
    if got.text != wanted.text:
        found.append(f"text differs: {got.text!r} instead of {wanted.text!r}")
    if got.finish_reasons != wanted.finish_reasons:
        found.append(f"ended {got.finish_reasons} instead of {wanted.finish_reasons}")
    if len(got.ids) != 1:
        found.append(f"ids {sorted(got.ids)}")
    counted = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in got.usages]
    if counted != [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in wanted.usages]:
        found.append(f"usage {got.usages} instead of {wanted.usages}")
    if "response_format" in body and got.finish_reasons == ["stop"]:
        try:
            jsonschema.validate(json.loads(got.text), SCHEMA)
        except (ValueError, jsonschema.ValidationError) as error:
            found.append(f"no valid JSON: {error}")
    return found


def continued(router: Router) -> int:
    """How many streams the router has continued at another backend."""
    samples = (sample for family in router.gateway.observer.registry.collect() for sample in family.samples)
    named = (sample for sample in samples if sample.name == "pointsman_events_total")
    return sum(int(sample.value) for sample in named if sample.labels["event"] == "continued")


def charged_tokens(router: Router) -> int:
    """Completion tokens that the router has counted for its tenants."""
    samples = (sample for family in router.gateway.observer.registry.collect() for sample in family.samples)
    named = (sample for sample in samples if sample.name == "pointsman_tokens_total")
    return sum(int(sample.value) for sample in named if sample.labels.get("kind") == "completion")


@dataclass
class Outcome:
    """The sum of all rounds."""

    streams: int = 0
    cut: int = 0
    kills: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    shown_tokens: int = 0
    charged: int = 0


async def rounds(folder: Path, *, cut: int, at_once: int, seed: int, report: Any = lambda _: None) -> Outcome:
    """Kill shards until `cut` streams were cut, with `at_once` streams in each round."""
    rng, outcome = random.Random(seed), Outcome()
    bodies = requests(at_once, seed)
    async with shards(folder) as there, aiohttp.ClientSession() as http:
        wanted = await undisturbed(http, there.router.http_url, bodies)
        outcome.shown_tokens += sum(answer.completion_tokens for answer in wanted)
        while outcome.cut < cut:
            got, killed = await disturbed(there, http, bodies, rng)
            outcome.kills += 1
            outcome.streams += len(got)
            outcome.cut = continued(there.router)
            for body, answer, right in zip(bodies, got, wanted, strict=True):
                outcome.shown_tokens += answer.completion_tokens
                for wrong in complaints(answer, right, body):
                    outcome.wrong[wrong.partition(":")[0]] += 1
                    outcome.examples.append(wrong)
            report(outcome)
            await there.restart(killed)
        outcome.charged = charged_tokens(there.router)
        there.router.check()
    return outcome


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut", type=int, default=1000, help="streams to cut")
    parser.add_argument("--at-once", type=int, default=24, help="streams of a round")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()

    def report(outcome: Outcome) -> None:
        print(f"{outcome.kills} kills: {outcome.cut} of {outcome.streams} streams cut, wrong {dict(outcome.wrong)}")

    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(
            rounds(Path(folder), cut=chosen.cut, at_once=chosen.at_once, seed=chosen.seed, report=report)
        )
    print(*outcome.examples[:20], sep="\n")
    print(f"tokens: {outcome.shown_tokens} shown to clients, {outcome.charged} charged")


if __name__ == "__main__":
    main()
