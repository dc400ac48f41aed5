"""Placement by the default policy is as good as recorded: the short form of benchmarks/placement.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.placement import Cell, Figures, a_config, figures_of, machines_of, read_cells, run_of, worse
from policies.catalogue import builtin_catalogue
from policies.compose import Policy
from simulation.workloads import WORKLOADS, load_of

RECORDED = read_cells(Path(__file__).parents[2] / "benchmarks" / "placement.jsonl")
NAMED = builtin_catalogue().policies


def figures(cell: Cell, policy: Policy) -> Figures:
    workload = WORKLOADS[cell.workload]
    load = load_of(workload, machines_of(workload), share=cell.load / 100, seed=cell.seed)
    return figures_of(run_of(workload, load, policy, cell.seed))


def recorded(workload: str, load: int) -> list[Cell]:
    return [cell for cell in RECORDED if (cell.workload, cell.load) == (workload, load)]


@pytest.mark.parametrize(("workload", "load"), dict.fromkeys((cell.workload, cell.load) for cell in RECORDED))
def test_the_default_places_requests_as_well_as_recorded(workload: str, load: int) -> None:
    cells = recorded(workload, load)
    now = figures(cells[0], NAMED["default"])
    assert worse(now, [cell.figures for cell in cells]) == [], "or record it anew: see benchmarks/placement.py"


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_a_worse_policy_is_noticed(policy: str) -> None:
    cells = recorded("documents", 60)
    found = worse(figures(cells[0], NAMED[policy]), [cell.figures for cell in cells])
    assert any(line.startswith("hits was 0.7") for line in found), found


def test_the_file_of_the_benchmark_has_the_default_of_the_catalogue() -> None:
    assert a_config(NAMED["default"]).policies["default"] is NAMED["default"]
