"""Duration of a decision: a prompt of 100k tokens, 100 backends, block keys given, without tokenizing.

The router's own parts, assembled as in `pointsman up`: the prefix index with half a million blocks, with parts of the
prompts on some backends; a cluster of backends that report load and cache and have requests of two ranks in flight;
rules, filters, scores and pick. One decision is the synchronous part: longest match, classify, view of all backends,
decide, count it. Prompts differ, so that nothing can be reused from one decision to the next; no backend holds any part
of every tenth prompt.

Times are the thread's time on a core, which excludes other work on the machine, and the time on the clock, which
includes it. The floor, measured in turn with it, is the least work of any decision that reads every block and every
backend: one dict look-up per block and one call for each backend's load.

    python benchmarks/decision.py [--tokens 100000] [--backends 100] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.nouns import ClusterView, Decision, Delta, Request
from policies.rules import Facts, classify
from policies.sla.parse import parse
from router.call.gateway import Gateway
from router.call.prepare import believed
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
    score: {expected_ttft: 1, cache_thrift: 4, balance: 1}
"""
DESCRIBED = Description(frozenset({MODEL}), 1_000_000, 128_000, speaks_tokens=True, reports_cache=True, preempts=True)


class Reporting(FakeBackend):
    """Reports like a shard, without a shard."""

    def describe(self) -> Description | None:
        return DESCRIBED


@dataclass(frozen=True)
class Bench:
    gateway: Gateway
    prompts: list[Tokens]

    def facts(self, tokens: Tokens, held: Mapping[str, int]) -> Facts:
        tenant = self.gateway.config.anonymous
        assert tenant is not None
        uncached = max(1, tokens.count - self.gateway.cluster.most_held(MODEL, held))
        return Facts(tenant, MODEL, tokens.count, 512, uncached)

    def request(self, tokens: Tokens, facts: Facts) -> Request:
        ruling = classify(facts, self.gateway.config)
        return a_request(tokens, ruling.service_class.name, ruling.rank)

    def decision(self, tokens: Tokens) -> tuple[ClusterView, Decision]:
        """The whole cache."""
        held = believed(tokens, PromptKeys(tokens.keys, MODEL), self.gateway)
        request = self.request(tokens, self.facts(tokens, held))
        gateway = self.gateway
        view = gateway.cluster.view(gateway.clock(), held, rank=request.rank)
        decision = gateway.config.policies[request.policy].decide(request, view, gateway.rng)
        gateway.observer.decided(request, decision, None, config_version=gateway.config.version)
        return view, decision


def a_request(tokens: Tokens, service_class: str, rank: int, *, preemptible: bool = False) -> Request:
    return Request(
        "r", "acme", MODEL, "acme", tokens.count, 512, service_class, rank, None, tokens.keys, preemptible=preemptible
    )


def prepared(tokens: int, backends: int, rng: random.Random) -> Bench:
    """A router under load. `backends` are healthy, each with up to 24 requests."""
    loads = [
        Load(rng.randint(1, 20), rng.randint(0, 3), rng.randint(0, 40_000), 600_000, 64, 2e-5, reported_at=0.99)
        for _ in range(backends)
    ]
    names = [f"own-{number}" for number in range(backends)]
    made = [Reporting(name, "own", reported=load) for name, load in zip(names, loads, strict=True)]
    gateway = build(parse(SLA), backends=lambda _: made, clock=lambda: 1.0, rng=rng).gateway
    for member in gateway.cluster._members.values():
        member.probed(None, now=0.0)
    prompts = [
        Tokens(tokens, b"", tuple(rng.getrandbits(64) for _ in range(tokens // BLOCK_TOKENS))) for _ in range(40)
    ]
    for name in names:
        for _ in range(5_000 // 50):
            gateway.beliefs.index.store(name, [rng.getrandbits(64) for _ in range(50)])
    for number, prompt in enumerate(prompts):
        for name in rng.sample(names, 0 if number % 10 == 9 else rng.randint(1, backends // 2)):
            gateway.beliefs.index.store(name, prompt.keys[: rng.randint(1, len(prompt.keys))])
    for name in names:
        for _ in range(rng.randint(0, 24)):
            under_way(gateway, name, rng)
    return Bench(gateway, prompts)


def under_way(gateway: Gateway, name: str, rng: random.Random) -> None:
    """Add a request at `name`; most have begun to answer, and some arrived after its last report."""
    tokens = Tokens(rng.choice([500, 4000, 60_000]), b"", ())
    rank = rng.randint(0, 2)
    flight = gateway.cluster.begin(name, a_request(tokens, "x", rank, preemptible=rank == 2), tokens.count)
    flight.sent_at = 1.0 if rng.random() < 0.1 else 0.5
    if rng.random() < 0.8:
        flight.heard(Delta(text="x"), 0.9)


def measured(work: Callable[[Tokens], object], prompts: list[Tokens], times: list[tuple[float, float]]) -> None:
    """Seconds of this thread on a core, and on the clock, for each prompt."""
    for prompt in prompts:
        started, began = time.thread_time(), time.perf_counter()
        work(prompt)
        times.append((time.thread_time() - started, time.perf_counter() - began))


def parts(bench: Bench) -> dict[str, Callable[[Tokens], object]]:
    """The measured parts, by name; each does its work from scratch."""
    gateway, config = bench.gateway, bench.gateway.config
    look_up = {key: 1 for prompt in bench.prompts for key in prompt.keys}.get
    reports = [member.backend.load for member in gateway.cluster._members.values()]
    held = believed(bench.prompts[0], PromptKeys(bench.prompts[0].keys, MODEL), gateway)
    facts = bench.facts(bench.prompts[0], held)
    request = bench.request(bench.prompts[0], facts)
    view, policy = gateway.cluster.view(1.0, held, request.rank), config.policies["default"]

    def floor(tokens: Tokens) -> object:
        return list(map(look_up, tokens.keys)), [report() for report in reports]

    return {
        "floor": floor,
        "longest match": lambda tokens: believed(tokens, PromptKeys(tokens.keys, MODEL), gateway),
        "facts and rules": lambda tokens: bench.request(tokens, bench.facts(tokens, held)),
        "view of all": lambda _: gateway.cluster.view(1.0, held, request.rank),
        "filter, score, pick": lambda _: policy.decide(request, view, gateway.rng),
        "decision": bench.decision,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--backends", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    bench = prepared(arguments.tokens, arguments.backends, random.Random(1))
    _, decision = bench.decision(bench.prompts[0])
    assert decision.chosen is not None, decision
    print(f"{bench.gateway.beliefs.index!r}; chosen {decision.chosen}, {len(decision.dropped)} dropped")
    if arguments.profile:
        cProfile.runctx("for _ in range(10): measured(bench.decision, bench.prompts, [])", globals(), locals(), None, 1)
        return
    works = parts(bench)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(arguments.rounds):
        for name, work in works.items():
            measured(work, bench.prompts, times[name])
    floor_s = statistics.median(on_core for on_core, _ in times["floor"])
    print(f"{'milliseconds':22}{'core P50':>9}{'P99':>8}{'of floor':>10}{'clock P50':>11}{'P99':>8}")
    for name, seconds in times.items():
        core, clock = (statistics.quantiles(column, n=100) for column in zip(*seconds, strict=True))
        on_core = f"{1000 * core[49]:9.3f}{1000 * core[98]:8.3f}{core[49] / floor_s:9.1f}x"
        print(f"{name:22}{on_core}{1000 * clock[49]:11.3f}{1000 * clock[98]:8.3f}")


if __name__ == "__main__":
    main()
