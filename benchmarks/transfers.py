"""Placement with KV transfer: fetching and separate prefill against the best rule without them, in the simulator.

    python benchmarks/transfers.py [--workload agents] [--load 60 90] [--gb-s 10 100] [--seeds 1 3] [--json FILE]

Workloads, loads, machines and targets are those of `benchmarks/placement.py`: eight L40S with Llama-3.1-8B, and 128 KiB
of KV for each token. `placed` is our default without transfer, and the best of all rules there: that with the most
requests within their targets, and of equals that with the least TTFT P95. `fetch` is our default where all machines
exchange KV at so many GB/s in each direction. `prefill k+n` has k machines that only compute prompts, and n that answer
and fetch from all; `n machines` has only those, without transfer. `fetched` is the share of requests with KV from
another cache, and `apart` that of requests with a prompt that was computed at another machine for them. Columns are
means over the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_rules import policies
from benchmarks.placement import FILE, L40S, Figures, a_config, asked, figures_of, machines_of, mean_of
from policies.compose import Policy
from policies.sla.config import Config
from policies.sla.parse import parse
from simulation.arrivals import settled, usual_of
from simulation.fleet import Fleet
from simulation.run import Run, simulate
from simulation.speed import Machine
from simulation.workloads import WORKLOADS, ScaledLoad, load_of

CHOSEN = ("conversations", "documents", "agents", "long prompts")
DEFAULT = "Pointsman: default"
PLACED = "placed, "
SPLITS = (1, 2)
"""Machines that only compute prompts."""

APART = (
    FILE[: FILE.index("pools:")]
    + """
pools:
  own:     {kind: vllm, at: ['http://a:1'], models: {m: m}, prefill: prompts}
  prompts: {kind: vllm, at: ['http://b:1'], models: {m: m}}
rules:
"""
    + FILE.split("rules:\n")[1]
)


class Row(msgspec.Struct, frozen=True):
    """One run: its figures, and the shares of requests that fetched KV and that had their prompts computed apart."""

    workload: str
    load: int
    seed: int
    how: str
    gb_s: int
    figures: Figures
    fetched: float
    apart: float


def run_of(config: Config, fleet: Fleet, load: ScaledLoad, seed: int) -> Run:
    """One simulation."""
    models = fleet.models(config)
    usual = usual_of(config, models)
    arrivals = [settled(arrival, config, models, usual) for arrival in load.arrivals]
    return simulate(config, fleet, arrivals, seed=seed, changes=load.changes)


def alike(policy: Policy, machine: Machine, count: int) -> tuple[Config, Fleet]:
    """So many machines that do everything."""
    return a_config(policy), Fleet(
        {"own": count, "half": 0, "other": 0}, dict.fromkeys(("own", "half", "other"), machine), ()
    )


def apart(policy: Policy, machine: Machine, count: int, prompts: int) -> tuple[Config, Fleet]:
    """So many machines, of which `prompts` compute prompts for the others."""
    config = parse(APART)
    config = replace(config, policies={**config.policies, "default": policy})
    return config, Fleet({"own": count - prompts, "prompts": prompts}, {"own": machine, "prompts": machine}, ())


def shares_of(run: Run) -> tuple[float, float]:
    """The shares of requests with KV from another cache, and with a prompt that was computed apart."""
    fetched, legs = (sum(getattr(call, name) is not None for call in run.calls) for name in ("fetch", "prefill"))
    return fetched / len(run.calls), legs / len(run.calls)


def cases(chosen: argparse.Namespace) -> Iterator[tuple[str, int, Config, Fleet]]:
    """What is compared: its name, GB/s, the file and the machines."""
    count, default = 8, policies(L40S)[DEFAULT]
    for name, policy in policies(L40S).items():
        yield f"{PLACED}{name}", 0, *alike(policy, L40S, count)
    for prompts in SPLITS:
        yield f"{count - prompts} machines", 0, *alike(default, L40S, count - prompts)
    for gb_s in chosen.gb_s:
        linked = replace(L40S, link_bytes_s=gb_s * 1e9)
        yield "fetch", gb_s, *alike(default, linked, count)
        for prompts in SPLITS:
            yield f"prefill {prompts}+{count - prompts}", gb_s, *apart(default, linked, count, prompts)


def rows(chosen: argparse.Namespace, done: dict[tuple[str, int, int, str, int], Row]) -> Iterator[Row]:
    """All runs that were asked for, those that are `done` and the others."""
    for name in CHOSEN:
        if not asked(name, chosen.workload):
            continue
        workload = WORKLOADS[name]
        for percent in chosen.load:
            for seed in chosen.seeds:
                load = load_of(workload, machines_of(workload), share=percent / 100, seed=seed)
                for how, gb_s, config, fleet in cases(chosen):
                    known = done.get((name, percent, seed, how, gb_s))
                    if known is None and asked(how, chosen.how):
                        run = run_of(config, fleet, load, seed)
                        known = Row(name, percent, seed, how, gb_s, figures_of(run), *shares_of(run))
                    if known is not None:
                        yield known


def best_of(some: dict[tuple[str, int], list[Row]]) -> tuple[str, int]:
    """The best rule without transfer."""

    def rank(key: tuple[str, int]) -> tuple[float, float]:
        mean = mean_of([row.figures for row in some[key]])
        return -round(mean.targets, 3), mean.ttft_p95

    return min((key for key in some if key[0].startswith(PLACED)), key=rank)


def lines(found: dict[tuple[str, int], dict[tuple[str, int], list[Row]]]) -> Iterator[str]:
    """The table."""
    for (workload, percent), some in found.items():
        yield f"{workload}, {percent} %"
        best = best_of(some) if any(how.startswith(PLACED) for how, _ in some) else None
        yield f"  {'':44}" + "".join(f"{head:>11}" for head in ("TTFT P95", "TPOT P95", "targets", "fetched", "apart"))
        for key, of in some.items():
            how, gb_s = key
            if how.startswith(PLACED) and key != best and DEFAULT not in how:
                continue
            mean = mean_of([row.figures for row in of])
            fetched, legs = (sum(getattr(row, name) for row in of) / len(of) for name in ("fetched", "apart"))
            label = f"{how}, {gb_s} GB/s" if gb_s else f"{how}{' (best)' if key == best else ''}"
            yield (
                f"  {label:44}{mean.ttft_p95:>10.2f}s{mean.tpot_p95_ms:>9.1f}ms{mean.targets:>11.1%}"
                f"{fetched:>11.1%}{legs:>11.1%}"
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workload", nargs="+", help="only workloads with one of these in their names")
    options.add_argument("--how", nargs="+", help="only rows with one of these in their names")
    options.add_argument("--load", type=int, nargs="+", default=[60, 90], help="percent of the fleet's capacity")
    options.add_argument("--gb-s", type=int, nargs="+", default=[10, 100], help="GB/s of each machine's link")
    options.add_argument("--seeds", type=int, nargs="+", default=[1])
    options.add_argument("--json", type=Path, help="file of runs, which are not repeated")
    chosen = options.parse_args()
    done: dict[tuple[str, int, int, str, int], Row] = {}
    if chosen.json and chosen.json.exists():
        for line in chosen.json.read_text().splitlines():
            row = msgspec.json.decode(line, type=Row)
            done[row.workload, row.load, row.seed, row.how, row.gb_s] = row
    found: dict[tuple[str, int], dict[tuple[str, int], list[Row]]] = {}
    for row in rows(chosen, done):
        if chosen.json and (row.workload, row.load, row.seed, row.how, row.gb_s) not in done:
            with chosen.json.open("a") as file:
                file.write(msgspec.json.encode(row).decode() + "\n")
        found.setdefault((row.workload, row.load), {}).setdefault((row.how, row.gb_s), []).append(row)
    for line in lines(found):
        print(line)


if __name__ == "__main__":
    main()
