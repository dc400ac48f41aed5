"""Placement: the shipped policy against those of other routers, on real conversations and one virtual clock.

    python benchmarks/routing.py TRACE [--requests 4000] [--speed 2 4] [--backends 8] [--kind shard]

TRACE is Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl), replayed
at `--speed` times its speed. Everything but the policy is the same for all: the pipeline, the prefix index
with exact events, the shards' scheduler, machines with an 8B model on an H200. So the figures compare decisions, not
programs: `benchmarks/peer_rules.py` has each peer's rule.
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

from benchmarks.peer_rules import policies
from policies.compose import Policy
from policies.nouns import Outcome
from policies.sla.config import Config
from policies.sla.parse import parse
from simulation.arrivals import Arrival, settled, sped_up, usual_of
from simulation.client import Call
from simulation.fleet import Fleet
from simulation.run import simulate
from simulation.speed import Machine
from simulation.trace import read_trace

FILE = """
classes: {chat: {}}
tenants: {all: {keys: ["sha256:5ef5ef0364b6939c4ca61f34b393f7b368d1be8619647aaf83d5b395919ab629"]}}
pools: {own: {kind: shard, at: ['a:1'], models: {m: m}}}
rules: [{class: chat}]
"""

HEADS = "answered; TTFT mean, P50, P95, P99; ms a token P50, P95; whole P50, P95; hits; busy least, most; run"


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
