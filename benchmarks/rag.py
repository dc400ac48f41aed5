"""Retrieval workloads on two engines: what each step adds to the hit rate, and what it does to the first token.

    python -m benchmarks.rag [--engines own vllm] [--workloads top-3 top-10 top-30 turns agents] [--seeds 11 12]
        [--requests 80] [--ways fixed any sets] [--contextpilot PYTHON]

The engines are two shards, or two vLLM on CPUs (`make engines`), each a process with the bundled model and KV of 19,200
tokens. Documents are drawn by Zipf's law (exponent 1) and ranked at random; each prompt has about 1,500 to 2,100
tokens of them behind the same words of the system. Four requests run at once.

- top-3, top-10, top-30: k of 200 documents for each question.
- turns: conversations of four turns; each turn keeps three of its five documents and gets two new ones.
- agents: each agent has a memory of six notes, which come in the order of their scores with four documents; each step
  rewrites one note, and one document comes twice.

- fixed: the order in which they are ranked, so prefix caching alone.
- any: `document_order: any`, and a document that comes twice is written once.
- sets: the same, and the documents are a document set that is computed ahead.
- reuse, any+reuse: `reuse: chunks` beside fixed or any order: documents are taken from where they stood before (own
  shards only).
- contextpilot: prompts as `ContextPilot.optimize` of the package contextpilot makes them, in the interpreter PYTHON
  that has it, through the same router.

Printed are the cached and the blended share of the prompts' tokens, the tokens that were computed for prompts, and P50
and P95 of the time to the first token. Chunks that are computed by themselves for `reuse` are not counted as prompts.
Before each run the caches are emptied (vLLM) or the shards are started anew, and so is the router.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.documents import by_zipf
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import document, facts_within
from tests.chaos.continued import _serves
from tests.engines.programs import MISSING, Program, VLLMOptions, a_vllm, free_ports
from tests.engines.routed import KEY, a_router

DOCUMENTS = 200
SYSTEM = {"role": "system", "content": "You answer questions from the documents below, in one short sentence."}
AT_ONCE = 4
BLOCKS_OF_32 = 600
KV_GIB = "0.055"
"""Memory for 300 blocks of 64 tokens of the bundled model."""
PATH = "/v1/document_sets/all"
WAYS = ("fixed", "any", "sets", "reuse", "any+reuse")

Documents = list[dict[str, str]]


class Ask(NamedTuple):
    """One request: its documents in the order of their ranks, the conversation so far, and the session."""

    documents: Documents
    turns: list[dict[str, str]]
    session: str


def a_corpus(seed: int, tokens: int) -> Documents:
    """Documents of about so many tokens."""
    texts = (document(random.Random(1000 * seed + number), facts_within(tokens)).text for number in range(DOCUMENTS))
    return [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]


def asked(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": f"Question: {text}"}


def top(k: int, corpus: Documents, rng: random.Random, requests: int) -> Iterator[list[Ask]]:
    """Questions by themselves."""
    for number in range(requests):
        found = [corpus[at] for at in by_zipf(rng, DOCUMENTS, k)]
        yield [Ask(found, [asked(f"what is said in {found[0]['id']} of {number}?")], "")]


def turns(corpus: Documents, rng: random.Random, requests: int) -> Iterator[list[Ask]]:
    """Conversations of four turns."""
    for number in range(requests // 4):
        found, said, chat = [corpus[at] for at in by_zipf(rng, DOCUMENTS, 5)], list[dict[str, str]](), list[Ask]()
        for turn in range(4):
            chat.append(Ask(list(found), [*said, asked(f"{number} and {turn}?")], f"chat {number}"))
            said += [asked(f"{number} and {turn}?"), {"role": "assistant", "content": f"It is {turn}."}]
            known = rng.sample(found, 3)
            new = [corpus[at] for at in by_zipf(rng, DOCUMENTS, 8) if corpus[at] not in known][:2]
            found = rng.sample([*known, *new], 5)
        yield chat


def agents(corpus: Documents, rng: random.Random, requests: int) -> Iterator[list[Ask]]:
    """Agents with a memory, eight steps each."""
    for number in range(requests // 8):
        memory = [{"id": f"note {number}.{at}", "text": corpus[rng.randrange(DOCUMENTS)]["text"]} for at in range(6)]
        steps = list[Ask]()
        for step in range(8):
            found = [corpus[at] for at in by_zipf(rng, DOCUMENTS, 4)]
            notes = rng.sample(memory, len(memory))
            steps.append(Ask([*notes, *found, found[0]], [asked(f"step {step}?")], f"agent {number}"))
            memory[step % 6] = {"id": f"note {number}.{step % 6}.{step}", "text": f"In step {step}: done. {number}"}
        yield steps


WORKLOADS: Mapping[str, tuple[int, Any]] = {
    "top-3": (620, lambda *given: top(3, *given)),
    "top-10": (190, lambda *given: top(10, *given)),
    "top-30": (62, lambda *given: top(30, *given)),
    "turns": (360, turns),
    "agents": (150, agents),
}
"""Tokens of a document, and the asks that follow one another."""


@dataclass
class Result:
    """The answers of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    blended_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        times = statistics.quantiles(self.ttft_s, n=20)
        computed = self.prompt_tokens - self.cached_tokens - self.blended_tokens
        cached, blended = self.cached_tokens / self.prompt_tokens, self.blended_tokens / self.prompt_tokens
        p50, p95 = 1e3 * times[9], 1e3 * times[18]
        return f"{cached:.3f} | {blended:.3f} | {computed:,} | {p50:.0f} | {p95:.0f}"

    def __iadd__(self, other: Result) -> Result:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.blended_tokens += other.blended_tokens
        self.ttft_s += other.ttft_s
        return self


class Pilot:
    """ContextPilot in a process of its own, which gives each prompt its messages."""

    _CODE = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import contextpilot
pilot = contextpilot.ContextPilot(use_gpu=False)
for line in sys.stdin:
    asked = json.loads(line)
    out.write(json.dumps(pilot.optimize(asked["contexts"], asked["query"])) + "\\n")
    out.flush()
"""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", self._CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def messages(self, ask: Ask) -> Any:
        """What it makes of the documents and the last question; the turns before stay in front of that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        contexts = [f"Document {each['id']}\n{each['text']}" for each in ask.documents]
        self._process.stdin.write(json.dumps({"contexts": contexts, "query": ask.turns[-1]["content"]}) + "\n")
        self._process.stdin.flush()
        made = json.loads(self._process.stdout.readline())
        return [*made[:-1], *ask.turns[:-1], made[-1]]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def body_of(ask: Ask, way: str, pilot: Pilot | None) -> dict[str, Any]:
    """The request of `ask` in this way."""
    usual = {
        "model": NAME,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if pilot is not None:
        return {**usual, "messages": pilot.messages(ask)}
    order = "fixed" if way in ("fixed", "reuse") else "any"
    body = {**usual, "messages": [SYSTEM, *ask.turns], "document_order": order}
    if way.endswith("reuse"):
        body["reuse"] = "chunks"
    if way != "sets":
        return {**body, "documents": ask.documents}
    stored = [{"id": each["id"]} if each["id"].startswith("d") else each for each in ask.documents]
    return {**body, "documents": stored, "document_set": "all"}


async def send(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], session: str, into: Result, *, key: str = KEY
) -> None:
    """One streamed request."""
    headers = {"authorization": f"Bearer {key}", **({"x-pointsman-session": session} if session else {})}
    began, first_s, usage = time.monotonic(), 0.0, None
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    first_s = first_s or time.monotonic() - began
                usage = event.get("usage") or usage
    assert usage is not None
    into.prompt_tokens += usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    into.cached_tokens += details.get("cached_tokens") or 0
    into.blended_tokens += details.get("blended_tokens") or 0
    into.ttft_s.append(first_s or time.monotonic() - began)


async def run(url: str, chains: Sequence[list[Ask]], way: str, pilot: Pilot | None) -> Result:
    """All asks: those of a chain one after the other, AT_ONCE chains side by side."""
    result, left = Result(), iter(chains)

    async def work() -> None:
        for chain in left:
            for ask in chain:
                await send(http, url, body_of(ask, way, pilot), ask.session, result)

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return result


async def upload(router: Router, corpus: Documents) -> None:
    """Have the documents of the corpus computed ahead, as far as there is room for pins: the most popular ones."""
    body = {"documents": corpus, "model": NAME, "messages": [SYSTEM], "ttl": "1h"}
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.put(f"{router.http_url}{PATH}", json=body) as reply:
            assert reply.status == 200, await reply.text()
        while True:
            async with http.get(f"{router.http_url}{PATH}") as reply:
                progress = (await reply.json())["progress"]
            if not progress.get("waiting") and not progress.get("warming"):
                return
            await asyncio.sleep(0.1)


class Engines:
    """Two engines of one kind; `fresh` gives them with empty caches, and the pool of the SLA file."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self.kind, self._folder, self._stack = kind, folder, stack
        self._programs: list[Program] = []
        if kind == "vllm":
            assert not MISSING, MISSING
            self._vllm = [a_vllm(name, folder, VLLMOptions(blocks=BLOCKS_OF_32)) for name in ("a", "b")]
            for each in self._vllm:
                each.start()
                stack.callback(each.stop)
            for each in self._vllm:
                each.wait_until_ready()

    async def fresh(self) -> dict[str, Any]:
        """A pool of both, with nothing in their caches."""
        if self.kind == "vllm":
            for vllm in self._vllm:
                await asyncio.to_thread(vllm.forget_prefixes)
            options = {"events": [vllm.events for vllm in self._vllm], "replay": [vllm.replay for vllm in self._vllm]}
            return {"kind": "vllm", "at": [vllm.url for vllm in self._vllm], "model": NAME, "options": options}
        for each in self._programs:
            await asyncio.to_thread(each.stop)
        ports = free_ports(2)
        self._programs = [self._a_shard(f"own-{at}-{port}", port) for at, port in enumerate(ports)]
        for each in self._programs:
            each.start()
            self._stack.callback(each.stop)
        await asyncio.gather(*map(_serves, ports))
        return {"kind": "shard", "at": [f"127.0.0.1:{port}" for port in ports], "model": NAME}

    def _a_shard(self, name: str, port: int) -> Program:
        options = ["--listen", f"127.0.0.1:{port}", "--threads", "1", "--kv-memory", KV_GIB]
        environment = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        return Program(
            name, (sys.executable, "-P", "-m", "shards", *options), self._folder, "", environment=environment
        )


@asynccontextmanager
async def a_fleet(engines: Engines) -> AsyncIterator[Router]:
    """A new router in front of both, with nothing cached."""
    sla = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["{key}"], limits: {{pinned_tokens: 7k}}}}}}
pools:
  engines: {pool}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
    async with a_router(await engines.fresh(), sla) as (_, router):
        yield router


async def measure(arguments: argparse.Namespace) -> None:
    """Print one row for each workload and way."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for kind in arguments.engines:
            engines = Engines(kind, Path(folder), stack)
            print(f"\n{kind}, seeds {', '.join(map(str, arguments.seeds))}, {arguments.requests} requests each")
            print("| workload | way | cached share | blended share | computed tokens | TTFT P50, ms | P95, ms |")
            print("|---|---|---|---|---|---|---|")
            ways = [*arguments.ways, *(["contextpilot"] if arguments.contextpilot else [])]
            for name, way in itertools.product(arguments.workloads, ways):
                total = Result()
                for seed in arguments.seeds:
                    tokens, make = WORKLOADS[name]
                    corpus = a_corpus(seed, tokens)
                    chains = list(make(corpus, random.Random(seed), arguments.requests))
                    pilot = Pilot(arguments.contextpilot) if way == "contextpilot" else None
                    async with a_fleet(engines) as router:
                        if way == "sets":
                            await upload(router, corpus)
                        assert router.http_url is not None
                        total += await run(router.http_url, chains, way, pilot)
                    if pilot is not None:
                        pilot.close()
                print(f"| {name} | {way} | {total} |", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("own", "vllm"), default=["own"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["fixed", "any", "sets"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--contextpilot", metavar="PYTHON")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
