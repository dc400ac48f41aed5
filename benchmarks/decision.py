"""Duration of a decision by the size of the fleet and the length of the prompt, block keys given, without tokenizing.

The router's own parts, assembled as in `pointsman up`: the prefix index with half a million blocks, with parts of the
prompts on some backends; a cluster of backends that report load and cache and have requests of three ranks in flight;
rules, filters, scores and pick. One decision is the synchronous part: longest match, classify, shortlist, view, decide,
count it. Prompts differ, so that nothing can be reused from one decision to the next; no backend holds any part of
every tenth prompt. Between two decisions a tenth of the backends report, and at two of them a request ends and another
begins.

In turn all prompts are decided by the router as it is (`now`) and by scoring all backends (`all`). Times are the
thread's time on a core, which excludes other work on the machine. The floor is the least work of a decision that reads
every block and every backend: one dict look-up per block and one call for each backend's load. The growth exponent is
the slope of log(time) over log(backends).

A choice differs if scoring all backends at the same moment gives it a lower score than the best. How much lower is
printed as `score`, which is at most 1, and as `TTFT`, its predicted time to first token above that of the best. Choices
are compared on several fleets: on one alone the share that differs is anything between half and twice the mean.

With `--lend` all backends can fetch KV from each other, so that each has an offer.

    python benchmarks/decision.py [--backends 10,100,1000,5000] [--tokens 1000,100000,1000000] [--lend] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.compose import are_equal
from policies.learning.cost import Latency
from policies.nouns import ClusterView, Decision, Delta, Request
from policies.predict import predicted_ttft_s
from policies.rules import Facts, classify
from policies.sla.parse import parse
from router.call.bid import Look
from router.call.gateway import Gateway
from router.fleet.cluster.flights import Flight
from router.fleet.prompt_keys import PromptKeys
from router.start.build import build
from router.text.tokenize import Tokens
from shards.kv.keys import BLOCK_TOKENS

MODEL = "model"
SLA = """
classes: {interactive: {ttft_p95: 800ms}, long-rag: {ttft_p95: 12s}, batch: {deadline: 15m, preemptible: true}}
tenants: {acme: {anonymous: true}}
rules:
  - {when: {priority: batch}, class: batch}
  - {when: {headers: {x-team: [search, ads]}, uncached_tokens: ">= 16k"}, class: long-rag}
  - {when: {prompt_tokens: "< 4k"}, class: interactive}
  - {class: long-rag}
policies:
  default:
    filter: [healthy, serves_model, fits_context, {has_room: {tokens: 512}}, under_limit]
    score: {marginal_cost: 1}
    waits_for_best: true
"""
CACHE_TOKENS = 4_000_000
DESCRIBED = Description(frozenset({MODEL}), 2_000_000, 128_000, speaks_tokens=True, reports_cache=True, preempts=True)

TRUTH = Latency(token_s=2e-5)
"""What the backends observe to be their speed."""

PROMPTS = 20
INDEXED = 500_000
"""Blocks in the index beside those of the prompts, over all backends."""

SETTLING = 400
"""Decisions after which a fleet is as it remains."""

MOST_HELD = 4_000_000
"""Blocks of the prompts that all backends hold together: with more, to fill the index takes longer than the rest."""


class Reporting(FakeBackend):
    """Reports like a shard, without a shard."""

    def describe(self) -> Description | None:
        return DESCRIBED


class Lending(Reporting):
    """One that exchanges KV as well."""

    kv_group = "model"

    def lend(self, tokens: int) -> Mapping[str, object]:
        return {"tokens": tokens}


@dataclass
class Bench:
    """A router under load, and prompts for it."""

    gateway: Gateway
    backends: list[Reporting]
    prompts: list[Tokens]
    rng: random.Random
    flying: list[Flight] = field(default_factory=list)

    def facts(self, tokens: Tokens, held: Mapping[str, int]) -> Facts:
        tenant = self.gateway.config.anonymous
        assert tenant is not None
        uncached = max(1, tokens.count - self.gateway.cluster.most_held(MODEL, held))
        return Facts(tenant, MODEL, tokens.count, 512, uncached)

    def held(self, tokens: Tokens) -> Mapping[str, int]:
        return self.gateway.lookup.believed(tokens, PromptKeys(tokens.keys, MODEL))

    def request(self, tokens: Tokens, held: Mapping[str, int]) -> Request:
        ruling = classify(self.facts(tokens, held), self.gateway.config)
        return a_request(tokens, ruling.service_class.name, ruling.rank)

    def decision(self, tokens: Tokens, *, all_backends: bool = False) -> tuple[ClusterView, Decision]:
        """All of a decision."""
        gateway, held = self.gateway, self.held(tokens)
        request = self.request(tokens, held)
        policy = gateway.config.policies[request.policy]
        view, decision = gateway.decider.decide(request, policy, held, look=Look(all_backends=all_backends))
        gateway.observer.decided(request, decision, None, config_version=gateway.config.version)
        return view, decision

    def begin(self, name: str) -> None:
        """Add a request at `name`; most have begun to answer, and some arrived after its last report."""
        rng, tokens = self.rng, Tokens(self.rng.choice([500, 4000, 60_000]), b"", ())
        rank = rng.randint(0, 2)
        request = a_request(tokens, "x", rank, preemptible=rank == 2)
        flight = self.gateway.cluster.begin(name, request, tokens.count)
        flight.sent_at = 1.0 if rng.random() < 0.1 else 0.5
        if rng.random() < 0.8:
            flight.heard(Delta(text="x"), flight.sent_at + TRUTH.prefill_s(tokens.count) * rng.uniform(0.9, 1.1))
        self.flying.append(flight)

    def stir(self) -> None:
        """A tenth of the backends report; at two of them a request ends, and another begins somewhere."""
        for backend in self.rng.sample(self.backends, max(1, len(self.backends) // 10)):
            backend.reported = a_report(self.rng)
            self.gateway.cluster.changed(backend.name)
        for _ in range(2):
            flight = self.flying.pop(self.rng.randrange(len(self.flying)))
            self.gateway.cluster.end(flight)
            self.begin(self.rng.choice(self.backends).name)


def a_report(rng: random.Random) -> Load:
    running, waiting = rng.randint(1, 20), rng.randint(0, 3)
    waiting_tokens, free = rng.randint(0, 40_000), rng.randint(0, CACHE_TOKENS)
    return Load(running, waiting, waiting_tokens, free, CACHE_TOKENS, 64, 2e-5, reported_at=0.99)


def a_request(tokens: Tokens, service_class: str, rank: int, *, preemptible: bool = False) -> Request:
    return Request(
        "r",
        "acme",
        MODEL,
        "acme",
        tokens.count,
        512,
        service_class,
        rank,
        None,
        tokens.keys,
        preemptible=preemptible,
        may_fetch=True,
    )


def prepared(tokens: int, backends: int, rng: random.Random, kind: type[Reporting] = Reporting) -> Bench:
    """A router under load. `backends` of this kind are healthy, each with up to 24 requests."""
    names = [f"own-{number}" for number in range(backends)]
    made = [kind(name, "own", reported=a_report(rng)) for name in names]
    gateway = build(parse(SLA), backends=lambda _: made, clock=lambda: 1.0, rng=rng).gateway
    for member in gateway.cluster._members.values():
        member.probed(None, now=0.0)
    blocks = tokens // BLOCK_TOKENS
    prompts = [Tokens(tokens, b"", tuple(rng.getrandbits(64) for _ in range(blocks))) for _ in range(PROMPTS)]
    for name in names:
        gateway.beliefs.index.store(name, [rng.getrandbits(64) for _ in range(INDEXED // backends)])
    most_holders = max(1, min(backends // 2, 4 * MOST_HELD // PROMPTS // blocks))
    for number, prompt in enumerate(prompts):
        for name in rng.sample(names, 0 if number % 10 == 9 else rng.randint(1, most_holders)):
            gateway.beliefs.index.store(name, prompt.keys[: rng.randint(1, len(prompt.keys))])
    bench = Bench(gateway, made, prompts, rng)
    for name in names:
        for _ in range(rng.randint(1, 24)):
            bench.begin(name)
    gc.collect()
    # a started router does so too
    gc.freeze()
    return bench


def decide_all(bench: Bench) -> None:
    for prompt in bench.prompts:
        bench.stir()
        bench.decision(prompt)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of this thread on a core that `work` took."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


PARTS = ("floor", "all", "now", "match", "rules", "choice")


def measured(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds of each of PARTS for each prompt: the decision of all backends and now, and its parts now."""
    gateway = bench.gateway
    look_up = {key: 1 for prompt in bench.prompts for key in prompt.keys}.get
    reports = [backend.load for backend in bench.backends]
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def floor(prompt: Tokens) -> object:
        return list(map(look_up, prompt.keys)), [report() for report in reports]

    def choice(held: Mapping[str, int], request: Request) -> object:
        return gateway.decider.decide(request, gateway.config.policies[request.policy], held)

    for _ in range(rounds):
        for prompt in bench.prompts:
            bench.stir()
            times["now"].append(seconds_of(partial(bench.decision, prompt)))
        for prompt in bench.prompts:
            bench.stir()
            times["match"].append(seconds_of(partial(bench.held, prompt)))
            held = bench.held(prompt)
            times["rules"].append(seconds_of(partial(bench.request, prompt, held)))
            times["choice"].append(seconds_of(partial(choice, held, bench.request(prompt, held))))
        for prompt in bench.prompts:
            bench.stir()
            times["all"].append(seconds_of(partial(bench.decision, prompt, all_backends=True)))
            times["floor"].append(seconds_of(partial(floor, prompt)))
    return times


@dataclass
class Compared:
    """Choices on a shortlist against choices of all, at the same moments."""

    choices: int = 0
    scored: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    """How much lower than the best, of each choice that differs."""
    seconds: list[float] = field(default_factory=list)
    """How much later its first token is predicted, relative to the best's prediction."""
    refused: Counter[bool] = field(default_factory=Counter)

    def add(self, bench: Bench, prompt: Tokens) -> None:
        held = bench.held(prompt)
        request = bench.request(prompt, held)
        policy = bench.gateway.config.policies[request.policy]
        few, chosen = bench.gateway.decider.decide(request, policy, held)
        everything, best = bench.gateway.decider.decide(request, policy, held, look=Look(all_backends=True))
        name, best_name = (made.chosen or made.awaits for made in (chosen, best))
        assert (name is None) == (best_name is None), "a shortlist refuses what others take"
        self.refused[name is None] += 1
        if name is None or best_name is None:
            return
        self.choices += 1
        self.scored.append(len(few.backends))
        totals = dict(best.scores)
        if not are_equal(totals[name], totals[best_name]):
            self.score.append(totals[best_name] - totals[name])
            predicted = {view.name: view for view in everything.backends}
            here, there = (predicted_ttft_s(request, predicted[at]) for at in (name, best_name))
            self.seconds.append(here / there - 1.0)


def compare(bench: Bench, rounds: int, found: Compared) -> None:
    for _ in range(rounds):
        for prompt in bench.prompts:
            bench.stir()
            found.add(bench, prompt)


def settled(tokens: int, backends: int, rng: random.Random, kind: type[Reporting]) -> Bench:
    """A router under load, some time after its start."""
    bench = prepared(tokens, backends, rng, kind)
    for _ in range(SETTLING):
        bench.stir()
        bench.decision(bench.prompts[0])
    return bench


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(sizes), by least squares."""
    slope, _ = statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(duration_s) for duration_s in seconds]
    )
    return slope


def report(tokens: int, sizes: Sequence[int], rounds: int, fleets: int, kind: type[Reporting]) -> None:
    """Measure all `sizes` with prompts of `tokens`, and print the table."""
    print(f"\n{tokens:,} tokens; milliseconds on a core")
    print(f"{'backends':>8}{'floor':>8}{'all':>9}{'now':>8}{'P99':>8}{'of all':>11}", end="")
    print(f"{'match':>8}{'rules':>8}{'choice':>8}{'scored':>11}{'differ':>8}{'score':>9}{'TTFT':>8}{'worst':>8}")
    medians: dict[str, list[float]] = {"all": [], "now": []}
    for backends in sizes:
        bench = prepared(tokens, backends, random.Random(1), kind)
        times = measured(bench, max(2, rounds * 100 // max(100, backends)))
        half = {part: statistics.median(seconds) for part, seconds in times.items()}
        ratio = statistics.median(now / whole for now, whole in zip(times["now"], times["all"], strict=True))
        for part, seconds in medians.items():
            seconds.append(half[part])
        quality = Compared()
        for seed in range(1, fleets + 1):
            fleet = bench if seed == 1 else settled(tokens, backends, random.Random(seed), kind)
            compare(fleet, max(5, rounds * 100 // max(100, backends)), quality)
        late = statistics.quantiles(times["now"], n=100)[98]
        print(f"{backends:8}{1e3 * half['floor']:8.3f}{1e3 * half['all']:9.3f}", end="")
        print(f"{1e3 * half['now']:8.3f}{1e3 * late:8.3f}{ratio:11.2f}", end="")
        print(f"{1e3 * half['match']:8.3f}{1e3 * half['rules']:8.3f}{1e3 * half['choice']:8.3f}", end="")
        scored = statistics.mean(quality.scored) if quality.scored else 0.0
        print(f"{scored:11.0f}{len(quality.score) / max(1, quality.choices):8.1%}", end="")
        if quality.score:
            later = statistics.mean(quality.seconds)
            print(f"{statistics.mean(quality.score):9.4f}{later:8.1%}{max(quality.seconds):8.1%}", end="")
        print(f"   {quality.refused[True]} of {quality.refused.total()} refused" if quality.refused[True] else "")
        gc.unfreeze()
    if len(sizes) > 1:
        print(f"growth exponent: all {exponent(sizes, medians['all']):.2f}", end="")
        print(f", now {exponent(sizes, medians['now']):.2f}")


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=integers, default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--backends", type=integers, default=[10, 100, 1_000, 5_000])
    parser.add_argument("--rounds", type=int, default=20, help="for up to 100 backends; fewer for more")
    parser.add_argument("--fleets", type=int, default=4, help="on which choices are compared")
    parser.add_argument("--lend", action="store_true", help="backends exchange KV")
    parser.add_argument("--profile", action="store_true", help="of the first length and size, instead of times")
    arguments = parser.parse_args()
    kind = Lending if arguments.lend else Reporting
    if arguments.profile:
        bench = prepared(arguments.tokens[0], arguments.backends[0], random.Random(1), kind)
        cProfile.runctx("for _ in range(10): decide_all(bench)", globals(), {"bench": bench}, sort="tottime")
        return
    for tokens in arguments.tokens:
        report(tokens, arguments.backends, arguments.rounds, arguments.fleets, kind)


if __name__ == "__main__":
    main()
