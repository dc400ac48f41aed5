from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from shards.gpu.dense import MOST_PLANNING_S, Timing, fastest


def test_the_fastest_attention_is_taken() -> None:
    assert fastest({"flash": Timing(2e-3, 2e-3), None: Timing(3e-3, 3e-3)}) == "flash"
    assert fastest({"flash": Timing(2e-3, 2e-3), None: Timing(1e-3, 1e-3)}) is None


def test_one_that_plans_anew_for_every_length_of_context_is_not() -> None:
    planning = Timing(1e-3 + 2 * MOST_PLANNING_S, 1e-3)
    assert fastest({"cudnn": planning, "flash": Timing(2e-3, 2e-3), None: Timing(3e-3, 3e-3)}) == "flash"
    assert fastest({"cudnn": planning, None: Timing(3e-3, 3e-3)}) is None


def test_where_nothing_dense_runs_the_paged_kernel_does() -> None:
    assert fastest({}) is None
