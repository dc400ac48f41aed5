"""Prefix cache hits of two real vLLM behind Pointsman and other routers, by the engines' own counters.

    make engines && python benchmarks/real_engines.py [--workloads documents chats agents] [--routers ...]
        [--runs 3] [--seed 0] [--programs DIR ...]

SMG, vllm-router and Envoy are there after `make engines`; sglang-router needs `pip install sglang-router` and the
directory of the program in `--programs`.

Two vLLM on CPUs with the bundled model, each with a small prefix cache (600 blocks of 32 tokens), so that what is
computed twice evicts what will be asked again. Six requests run at once. The three workloads have about 400 requests
each: `documents` are questions about 24 documents, drawn at random; `chats` are conversations that grow, 20 at a time;
`agents` are trees of calls: agents of one kind share a system prompt and tools, and branches of a tree share a task.

All prompts fit into both caches together, but not into one. Before each run the caches are emptied and the router is
started anew, so each run includes the time in which a router has learnt nothing. A hit rate is vLLM's
prefix_cache_hits / prefix_cache_queries, in tokens. `ideal` is computed from the prompts in the order in which they
were sent: the share of tokens that a single cache would have that is never full and holds a prompt from when it is
sent, and an answer from when it is there, in full blocks of 32 tokens. No router can reach it entirely: a prompt that
two engines serve must be computed twice.

Hit rates do not depend on speed, so that a busy machine gives the same numbers; the order of requests differs a little
from run to run. Times to first token do depend on it: they say what hits cost where a router keeps an engine idle.
Two engines fill a small machine: a router then waits for a core, up to 0.7 s at a time, and a router that leaves one
engine idle gives its cores to the other. Where the system permits it, each engine therefore has one core and no other,
and the client and the routers get a core as soon as they need one (SCHED_RR), as on machines of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.router_programs import (
    Running,
    Setting,
    a_pointsman,
    ahead_of_others,
    envoy_with_picker,
    of_others,
    pointsman,
    running,
)
from shards.bundled import NAME
from shards.bundled.documents import document, facts_within, prompt
from tests.engines.programs import MISSING, VLLM, VLLMOptions, a_vllm
from tests.engines.routed import KEY
from tests.router.shared.store.parts import a_redis

AT_ONCE, BLOCK = 6, 32
OPTIONS = VLLMOptions(blocks=600, extra=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))

Messages = list[dict[str, Any]]
Ask = Callable[[Messages, Sequence[Mapping[str, Any]]], Awaitable[str]]
"""Sends messages and tools; returns the text of the answer."""


# -- workloads --------------------------------------------------------------------------------------------------------


async def documents(rng: random.Random, ask: Ask) -> None:
    """400 questions about 24 documents of some 930 tokens."""
    about = [document(rng, facts_within(950)) for _ in range(24)]
    drawn = [rng.choice(about) for _ in range(400)]
    asked = [prompt(each.text, rng.choice(each.questions).question) for each in drawn]
    await alongside(AT_ONCE, (ask([user(text)], ()) for text in asked))


async def chats(rng: random.Random, ask: Ask) -> None:
    """50 conversations of 8 turns, 20 at a time: a document of some 400 tokens, then some 130 tokens in each turn."""
    system = {"role": "system", "content": "You answer questions about what the user tells you, in one sentence."}

    async def chat(seed: int) -> None:
        mine = random.Random(seed)
        about = document(mine, facts_within(400))
        messages: Messages = [system]
        text = about.text
        for turn in range(8):
            messages.append(user(prompt(text, mine.choice(about.questions).question)))
            answer = await ask(messages, ())
            messages = [*messages, {"role": "assistant", "content": answer}]
            about = document(mine, facts_within(100))
            text = f"Page {turn + 2}.\n{about.text}"

    await alongside(20, (chat(rng.getrandbits(32)) for _ in range(50)))


async def agents(rng: random.Random, ask: Ask) -> None:
    """28 tasks, 5 at a time: a planner, 3 workers side by side with 4 calls of tools each, the planner again."""
    kinds = [an_agent(rng, name) for name in ("planner", "reader", "checker")]

    async def worker(kind: tuple[str, list[dict[str, Any]]], task: str, plan: str, part: int, seed: int) -> str:
        mine = random.Random(seed)
        system, tools = kind
        messages: Messages = [
            {"role": "system", "content": system},
            user(f"{task}\nPlan: {plan}"),
            user(f"Part {part}."),
        ]
        for step in range(4):
            answer = await ask(messages, tools)
            name = tools[mine.randrange(len(tools))]["function"]["name"]
            call = {"name": name, "arguments": json.dumps({"place": f"{part}-{step}", "limit": mine.randrange(100)})}
            messages = [
                *messages,
                {
                    "role": "assistant",
                    "content": answer,
                    "tool_calls": [{"id": f"call-{step}", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": f"call-{step}", "content": document(mine, facts_within(90)).text},
            ]
        return answer

    async def task(seed: int) -> None:
        mine = random.Random(seed)
        text = document(mine, facts_within(200)).text
        system, tools = kinds[0]
        messages: Messages = [{"role": "system", "content": system}, user(text)]
        plan = await ask(messages, tools)
        parts = (worker(kinds[1 + part % 2], text, plan, part, mine.getrandbits(32)) for part in range(3))
        results = await asyncio.gather(*parts)
        await ask([*messages, {"role": "assistant", "content": plan}, user("\n".join(results))], tools)

    await alongside(5, (task(rng.getrandbits(32)) for _ in range(28)))


def an_agent(rng: random.Random, name: str) -> tuple[str, list[dict[str, Any]]]:
    """The system prompt and the tools of one kind of agent, some 550 tokens."""
    system = f"You are the {name}.\n{document(rng, facts_within(220)).text}"
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"{name}_{verb}",
                "description": f"{verb} what the register says about a place, for the {name}",
                "parameters": {
                    "type": "object",
                    "properties": {"place": {"type": "string"}, "limit": {"type": "integer"}},
                    "required": ["place"],
                },
            },
        }
        for verb in ("find", "list", "compare")
    ]
    return system, tools


WORKLOADS = {"documents": documents, "chats": chats, "agents": agents}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def alongside(most: int, lives: Iterator[Awaitable[Any]] | Any) -> None:
    """Run all, `most` at a time, in their order."""
    waiting = iter(lives)

    async def one_after_another() -> None:
        for life in waiting:
            await life

    await asyncio.gather(*(one_after_another() for _ in range(most)))


# -- the client -------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Streams answers from any of `urls`, drawn at random; at most 6 at once. Remembers what was sent, in order.

    `ttft_s` has the seconds from sending to the first piece of text, of each answer.
    """

    http: aiohttp.ClientSession
    urls: Sequence[str]
    rng: random.Random
    log: list[tuple[str, Messages, Sequence[Mapping[str, Any]]]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def ask(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        body: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 32, "temperature": 0, "stream": True}
        if tools:
            body["tools"] = tools
        async with self._slots:
            self.log.append(("sent", messages, tools))
            began = time.perf_counter()
            url = f"{self.rng.choice(self.urls)}/v1/chat/completions"
            async with self.http.post(url, json=body, headers={"authorization": f"Bearer {KEY}"}) as reply:
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {await reply.text()}")
                text = ""
                async for piece in pieces(reply):
                    if piece and not text:
                        self.ttft_s.append(time.perf_counter() - began)
                    text += piece
            self.log.append(("answered", [*messages, {"role": "assistant", "content": text}], tools))
            return text


async def pieces(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in reply.content:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content") or ""


# -- the ideal --------------------------------------------------------------------------------------------------------


async def ideal(client: Client, vllm: VLLM) -> tuple[int, int]:
    """Tokens that an unlimited cache would have had, and tokens of all prompts, as the engine itself counts them."""
    known: set[int] = set()
    hits = asked = 0
    for event, messages, tools in client.log:
        body = {"model": NAME, "messages": messages, "add_generation_prompt": event == "sent"}
        if tools:
            body["tools"] = tools
        async with client.http.post(f"{vllm.url}/tokenize", json=body) as reply:
            tokens = (await reply.json())["tokens"]
        # what closes an answer was not computed when it ended
        keys = chain(tokens if event == "sent" else tokens[:-1])
        if event == "sent":
            # one token at least is computed
            usable = keys[: (len(tokens) - 1) // BLOCK]
            held = next((at for at, key in enumerate(usable) if key not in known), len(usable))
            hits += held * BLOCK
            asked += len(tokens)
        known.update(keys)
    return hits, asked


def chain(tokens: Sequence[int]) -> list[int]:
    """A key for each full block and all before it."""
    keys, before = [], 0
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[at : at + BLOCK]))
        keys.append(before)
    return keys


# -- routers ----------------------------------------------------------------------------------------------------------

SLA = """
classes: {{chat: {{}}}}
tenants: {{everyone: {{keys: ["{key}"]}}}}
pools:
  engines: {pool}
rules: [{{class: chat, policy: {policy}}}]
server: {servers}
{more}
"""


@asynccontextmanager
async def replicas(setting: Setting, *, events: bool = True) -> AsyncIterator[list[str]]:
    """Two Pointsman that share a Redis; each request goes to either."""
    with a_redis() as redis:
        more = f'store: {{redis: "{redis.url}", replicas: 2}}'
        routers = [a_pointsman(f"pointsman-{at}", setting, events=events, more=more) for at in range(2)]
        with running(*(each for each, _ in routers)):
            yield [url for _, url in routers]


ROUTERS: dict[str, Callable[[Setting], Running]] = {
    "Pointsman, events": pointsman,
    "Pointsman, no events": partial(pointsman, events=False),
    "Pointsman, two replicas, events": replicas,
    "Pointsman, two replicas, no events": partial(replicas, events=False),
    "Envoy with Pointsman's picker, events": envoy_with_picker,
    "SMG 1.13 cache_aware": lambda at: of_others(at, "smg", "launch", "--policy", "cache_aware"),
    "sglang-router 0.3.2 cache_aware": lambda at: of_others(at, "sglang-router", "launch", "--policy", "cache_aware"),
    "vllm-router 0.1.17 cache_aware": lambda at: of_others(at, "vllm-router", "--policy", "cache_aware"),
    "vllm-router 0.1.17 consistent_hash": lambda at: of_others(at, "vllm-router", "--policy", "consistent_hash"),
}


# -- runs -------------------------------------------------------------------------------------------------------------


def emptied(vllms: Sequence[VLLM]) -> None:
    """Empty the caches; a short request has each engine say so in its events."""
    for each in vllms:
        each.forget_prefixes()
        body = json.dumps({"model": NAME, "prompt": "Hello", "max_tokens": 1}).encode()
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{each.url}/v1/completions", body, headers)) as reply:
            reply.read()


async def settled(client: Client, feeds: int) -> None:
    """Wait 2 s for probes, then until the `feeds` of all routers have heard what engines repeat of their past.

    A gateway that asks a router shows no feeds, and is waited for as long.
    """
    await asyncio.sleep(2.0)
    async with asyncio.timeout(60):
        while True:
            live = 0
            for url in client.urls if feeds else ():
                async with client.http.get(f"{url}/metrics") as reply:
                    lines = (await reply.text()).splitlines()
                    live += sum(
                        line.startswith("pointsman_feed_confidence{") and line.endswith(" 1.0") for line in lines
                    )
            if live >= feeds:
                return
            await asyncio.sleep(0.2)


async def run(router: str, workload: str, seed: int, setting: Setting, vllms: Sequence[VLLM]) -> dict[str, Any]:
    emptied(vllms)

    def counters() -> tuple[float, float, list[float]]:
        hits, queries = (
            [each.metric(f"vllm:prefix_cache_{what}_total") for each in vllms] for what in ("hits", "queries")
        )
        return sum(hits), sum(queries), queries

    async with ROUTERS[router](setting) as urls, aiohttp.ClientSession() as http:
        client = Client(http, urls, random.Random(seed))
        shows_feeds = router.startswith("Pointsman") and "no events" not in router
        await settled(client, len(vllms) * len(urls) if shows_feeds else 0)
        before = counters()
        began = time.perf_counter()
        await WORKLOADS[workload](random.Random(seed), client.ask)
        seconds, after = time.perf_counter() - began, counters()
    async with aiohttp.ClientSession() as http:
        client.http = http
        best, asked = await ideal(client, vllms[0])
    hits, queries = after[0] - before[0], after[1] - before[1]
    if asked != queries:
        print(f"  the engines counted {queries:.0f} tokens of prompts, the client sent {asked}")
    share = (after[2][0] - before[2][0]) / queries
    return {
        "router": router,
        "workload": workload,
        "seed": seed,
        "hit_rate": hits / queries,
        "ideal": best / asked,
        "requests": sum(event == "sent" for event, _, _ in client.log),
        "first_engine": share,
        "seconds": seconds,
        "ttft_mean_s": statistics.fmean(client.ttft_s),
        "ttft_p95_s": statistics.quantiles(client.ttft_s, n=20)[18],
    }


def on_a_core_of_its_own(vllm: VLLM, at: int) -> None:
    """Keep this engine, which has just been started, on core `at`, counted among those that this process may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(vllm.pid, {cores[at % len(cores)]})


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row for each router: hit rates, and in brackets the mean share of the ideal and of prompts on one engine.

    The second share is that of the engine with more prompts. The third number is the mean TTFT in milliseconds.
    """
    workloads = [name for name in WORKLOADS if any(each["workload"] == name for each in results)]
    rows = [["", *workloads]]
    best = [[each["ideal"] for each in results if each["workload"] == name] for name in workloads]
    rows.append(["ideal", *(f"{min(each):.4f} to {max(each):.4f}" for each in best)])
    for router in ROUTERS:
        row = [router]
        for name in workloads:
            mine = [each for each in results if (each["router"], each["workload"]) == (router, name)]
            rates = ", ".join(f"{each['hit_rate']:.4f}" for each in mine)
            row.append(f"{rates} ({summary(mine)})" if mine else "")
        if any(row[1:]):
            rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """What the table says in brackets."""
    of_ideal = statistics.fmean(each["hit_rate"] / each["ideal"] for each in results)
    on_one = statistics.fmean(max(each["first_engine"], 1 - each["first_engine"]) for each in results)
    ttft_s = statistics.fmean(each["ttft_mean_s"] for each in results)
    return f"{of_ideal:.3f}; {on_one:.0%}; {1e3 * ttft_s:.0f} ms"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--seed", type=int, default=0, help="of the first run; each run adds one")
    options.add_argument("--programs", nargs="+", type=Path, default=[], help="directories with other programs")
    options.add_argument("--results", type=Path, help="lines of JSON, which are added to and shown together")
    chosen = options.parse_args()
    if MISSING:
        sys.exit(MISSING)
    known = chosen.results.read_text().splitlines() if chosen.results and chosen.results.exists() else []
    results = [json.loads(line) for line in known]
    with tempfile.TemporaryDirectory() as folder:
        vllms = [a_vllm(f"vllm-{at}", Path(folder), OPTIONS) for at in range(2)]
        with ExitStack() as stack:
            for at, each in enumerate(vllms):
                stack.callback(each.stop)
                each.start()
                on_a_core_of_its_own(each, at)
            for each in vllms:
                each.wait_until_ready()
            ahead_of_others()
            setting = Setting(Path(folder), vllms, NAME, SLA, programs=chosen.programs)
            for seed in range(chosen.seed, chosen.seed + chosen.runs):
                for workload in chosen.workloads:
                    for router in chosen.routers:
                        results.append(asyncio.run(run(router, workload, seed, setting, vllms)))
                        line = json.dumps(results[-1])
                        print(line, flush=True)
                        if chosen.results:
                            with chosen.results.open("a") as file:
                                file.write(f"{line}\n")
    print(table(results))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
