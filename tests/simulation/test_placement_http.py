"""`benchmarks/placement_http.py` at work: prompts as text, and one run with a program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement import Figures, machines_of
from benchmarks.placement_http import (
    ENTRIES,
    HttpCell,
    class_of,
    distances_of,
    orders_of,
    prompt_of,
    report_of,
    run_program,
    sla_at,
)
from shards.kv.keys import block_keys
from simulation.arrivals import Arrival
from simulation.workloads import WORKLOADS, ScaledLoad, load_of


def shared_blocks(token_ids: bytes, other_ids: bytes) -> int:
    pairs = zip(block_keys(token_ids, 0), block_keys(other_ids, 0), strict=False)
    return sum(key == other for key, other in pairs)


def letters_as_ids(text: str) -> bytes:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype("<u4").tobytes()


@pytest.mark.parametrize("name", ["agents", "conversations", "batch beside chat"])
def test_texts_of_prompts_share_as_many_blocks_as_their_tokens_do(name: str) -> None:
    workload = replace(WORKLOADS[name], requests=30)
    arrivals = load_of(workload, machines_of(workload), share=0.6, seed=2).arrivals
    for first in arrivals:
        assert len(prompt_of(first)) == first.prompt_tokens
        for second in arrivals[first.number + 1 :]:
            in_text = shared_blocks(letters_as_ids(prompt_of(first)), letters_as_ids(prompt_of(second)))
            assert in_text == shared_blocks(first.token_ids(), second.token_ids())


def test_classes_are_those_of_the_file_whose_targets_keep_pace() -> None:
    arrivals = [Arrival(0, 0.0, 5999, 1), Arrival(1, 0.0, 6000, 1), Arrival(2, 0.0, 6000, 1, priority="batch")]
    assert [class_of(arrival) for arrival in arrivals] == ["chat", "long", "batch"]
    assert "chat:  {{ttft_p95: 200ms, tpot_p95: 12ms}}" in sla_at(5.0)


async def test_a_run_measures_a_program_by_the_columns_of_the_simulator(tmp_path: Path) -> None:
    arrivals = tuple(Arrival(at, 20.0 * at, 2100, 10, chunks=(1, 2, 3, 4)) for at in range(4))
    load = ScaledLoad(arrivals, (0, 2048, 2048, 2048), ())
    found = await run_program(ENTRIES["Pointsman, default"], load, tmp_path, pace=20.0, on_cores=False)
    figures = found["figures"]
    assert found["failed"] == 0
    assert min(figures.ttft_mean, figures.whole_p95) > 0
    # three of four find the document at the engine that has it; on a slow machine one of them may come too early
    assert 0.4 < figures.hits < 0.75
    assert found["router_cpu"] > 0
    cell = HttpCell("documents", 60, "Pointsman, default", 2, 20.0, simulated=figures, **found)
    assert any("its rule, simulated" in line for line in report_of("documents", 60, {cell.program: [cell]}))
    assert any("0.0% (0.0%)" in line for line in distances_of([{cell.program: [cell]}]))


def test_orders_count_pairs_that_differ_clearly_in_the_simulator() -> None:
    def cell(program: str, simulated_s: float, measured_s: float) -> list[HttpCell]:
        simulated, measured = (Figures(1.0, 1.0, 1.0, whole_s, 1.0, 1.0, 1.0) for whole_s in (simulated_s, measured_s))
        return [HttpCell("chat", 60, program, 1, 3.0, measured, simulated, 0, 0.0, 0.0)]

    table = {"a": cell("a", 10.0, 12.0), "b": cell("b", 10.2, 9.0), "c": cell("c", 20.0, 11.0)}
    # a and b are alike in the simulator; c is worse than both, but over HTTP only worse than b
    assert next(iter(orders_of([table]))) == "whole P95: 1 of 2"
