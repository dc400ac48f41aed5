"""Placement: the shipped policy against those of other routers, on real conversations and one virtual clock.

    python benchmarks/routing.py TRACE [--requests 4000] [--speed 2 4] [--backends 8] [--kind shard]

TRACE is Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl), replayed
at `--speed` times its speed. Everything but the policy is the same for all: the pipeline, the prefix index
with exact events, the shards' scheduler, machines with an 8B model on an H200. So the figures compare decisions, not
programs: each peer's rule is written here from its documentation and source, with its own constants, and reads this
router's state, which is fresher than that of some peers.

- SGLang's and SMG's `cache_aware` (2026-08): if the best holder's load is above 1.5 times the mean and 64 over it, the
  least loaded; else the longest match if that is more than 0.3 of the prompt; else the least loaded.
- Dynamo's KV router: least of blocks to prefill there, less what is held, plus blocks that decode there.
- llm-d's scorers: 3 for the share of the prompt that is held, 2 for a short queue relative to the candidates', 2 for
  the share of free KV.
- The production stack's `loadaware`: share that is held, less load over the mean.
- Least requests, and in turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from policies import filters, picks, scores
from policies.catalogue import builtin_catalogue
from policies.compose import Policy, Score, WeightedScore
from policies.nouns import BackendView, Outcome, Request
from policies.sla.config import Config
from policies.sla.parse import parse
from simulation.arrivals import Arrival, settled, sped_up, usual_of
from simulation.client import Call
from simulation.fleet import Fleet
from simulation.run import simulate
from simulation.speed import Machine
from simulation.trace import read_trace

BLOCK = 64
FILE = """
classes: {chat: {}}
tenants: {all: {keys: ["sha256:5ef5ef0364b6939c4ca61f34b393f7b368d1be8619647aaf83d5b395919ab629"]}}
pools: {own: {kind: shard, at: ['a:1'], models: {m: m}}}
rules: [{class: chat}]
"""

HEADS = "answered; TTFT mean, P50, P95, P99; ms a token P50, P95; whole P50, P95; hits; busy least, most; run"


def load(backend: BackendView) -> int:
    """Requests there, from all routers."""
    return backend.running + backend.waiting


def held(backend: BackendView) -> int:
    """Tokens of the prompt that the backend is believed to hold."""
    return backend.held_tokens or 0


def ranked(values: Sequence[float]) -> list[float | None]:
    """The best gets 1, the worst 0."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 1.0 for value in values]


def sglang() -> Score:
    """SMG model_gateway/src/policies, `cache_aware`, with the defaults of its command line."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        loads = [load(backend) for backend in candidates]
        mean, most = statistics.fmean(loads), max(map(held, candidates))
        if most > 0.3 * request.prompt_tokens:
            # of backends that hold as much, the least loaded
            best = min((backend for backend in candidates if held(backend) == most), key=load)
            if not (load(best) > 1.5 * mean and load(best) > mean + 64):
                return [float(backend is best) for backend in candidates]
        return ranked([-float(there) for there in loads])

    return score


def dynamo(kv_tokens: int) -> Score:
    """Dynamo's KV router: `overlap_score_weight` 1, temperature 0, blocks of 64."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        incoming = request.prompt_tokens / BLOCK

        def cost(backend: BackendView) -> float:
            prefill = max(0.0, backend.waiting_tokens / BLOCK + incoming - held(backend) / BLOCK)
            decode = (kv_tokens - (backend.free_tokens or 0)) / BLOCK
            return prefill + decode + incoming

        return ranked([-cost(backend) for backend in candidates])

    return score


def llm_d(kv_tokens: int) -> Score:
    """llm-d's prefix, queue and KV scorers, 3 : 2 : 2, as in its guides."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        prefix = [min(1.0, held(backend) / max(1, request.prompt_tokens)) for backend in candidates]
        queue = ranked([-float(backend.waiting) for backend in candidates])
        free = [(backend.free_tokens or 0) / kv_tokens for backend in candidates]
        return [
            (3 * cached + 2 * (short or 0.0) + 2 * room) / 7
            for cached, short, room in zip(prefix, queue, free, strict=True)
        ]

    return score


def production_stack() -> Score:
    """production-stack `loadaware`: matched / prompt - (load - mean) / max(1, mean)."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        loads = [load(backend) for backend in candidates]
        mean = statistics.fmean(loads)
        return [
            held(backend) / max(1, request.prompt_tokens) - (there - mean) / max(1.0, mean)
            for backend, there in zip(candidates, loads, strict=True)
        ]

    return score


def least_requests() -> Score:
    return lambda _, candidates: ranked([-float(load(backend)) for backend in candidates])


def sent_at_once(name: str, score: Score) -> Policy:
    """A peer's policy: it sends at once, and the backend queues."""
    kept = (("healthy", filters.healthy()), ("serves_model", filters.serves_model()))
    return Policy(
        name, (*kept, ("fits_context", filters.fits_context())), (WeightedScore(name, 1.0, score),), picks.best()
    )


def policies(machine: Machine) -> dict[str, Policy]:
    """All compared policies, by their names in the table."""
    peers = {
        "SMG, SGLang: cache_aware": sglang(),
        "Dynamo: KV cost": dynamo(machine.kv_tokens),
        "llm-d: scorers 3:2:2": llm_d(machine.kv_tokens),
        "production stack: loadaware": production_stack(),
        "least requests": least_requests(),
        "in turn": scores.turn(),
    }
    ours = builtin_catalogue().policies["default"]
    return {"Pointsman: default": ours, **{name: sent_at_once(name, score) for name, score in peers.items()}}


def a_config(kind: str, policy: Policy) -> Config:
    """One class without a target, one pool, and `policy` as the default."""
    config = parse(FILE if kind == "shard" else FILE.replace("kind: shard, at: ['", f"kind: {kind}, at: ['http://"))
    return replace(config, policies={**config.policies, "default": policy})


def row(calls: Iterable[Call], hit_rate: float, busy: Sequence[float], wall_s: float) -> str:
    done = [call for call in calls if call.outcome is Outcome.FINISHED]
    ttft = sorted(call.ttft_s for call in done if call.ttft_s is not None)
    tpot = sorted(call.tpot_s for call in done if call.tpot_s is not None)
    whole = sorted(call.ended_s - call.arrival.at_s for call in done if call.ended_s is not None)

    def at(values: Sequence[float], share: float) -> float:
        return values[int(share * (len(values) - 1))] if values else float("nan")

    return (
        f"{len(done):6}  {statistics.fmean(ttft):8.3f} {at(ttft, 0.5):8.3f} {at(ttft, 0.95):8.3f} {at(ttft, 0.99):8.3f}"
        f"  {1000 * at(tpot, 0.5):7.1f} {1000 * at(tpot, 0.95):7.1f}  {at(whole, 0.5):7.2f} {at(whole, 0.95):7.2f}"
        f"  {hit_rate:6.1%}  {min(busy):4.0%} {max(busy):4.0%}  {wall_s:5.0f}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", type=Path)
    options.add_argument("--requests", type=int, default=4000)
    options.add_argument("--speed", type=float, nargs="+", default=[4.0])
    options.add_argument("--backends", type=int, default=8)
    options.add_argument("--kind", default="shard", help="how the machines plan: shard, or vllm")
    options.add_argument("--only", help="only policies with this in their name")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    machine = Machine() if chosen.kind == "shard" else Machine(ranks=False)
    coming: list[Arrival] = list(read_trace(chosen.trace, most=chosen.requests))
    print(
        f"{len(coming)} requests, {chosen.backends} machines that plan as {chosen.kind}; seconds, TPOT in ms",
        flush=True,
    )
    for speed in chosen.speed:
        print(f"\nspeed {speed:g}: {HEADS}", flush=True)
        for name, policy in policies(machine).items():
            if chosen.only and chosen.only not in name:
                continue
            config = a_config(chosen.kind, policy)
            fleet = Fleet({"own": chosen.backends}, {"own": machine}, ())
            models = fleet.models(config)
            usual = usual_of(config, models)
            arrivals = [settled(request, config, models, usual) for request in sped_up(coming, speed)]
            began = time.monotonic()
            run = simulate(config, fleet, arrivals, seed=chosen.seed)
            works = [backend.work for backend in run.backends]
            cached, computed = sum(work.cached_tokens for work in works), sum(work.prompt_tokens for work in works)
            busy = [work.busy_s / run.seconds for work in works]
            words = row(run.calls, cached / max(1, cached + computed), busy, time.monotonic() - began)
            print(f"{name:30}{words}", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
