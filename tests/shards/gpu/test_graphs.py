from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from shards.gpu.graphs import Graphs, Replay


class Work:
    """Counts how often it is computed in earnest."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def __call__(self, bucket: int) -> torch.Tensor:
        self.computed.append(bucket)
        return torch.zeros(bucket, 3)


def capture(compute: Callable[[], torch.Tensor]) -> Replay:
    """As a GPU does: what is captured is not asked again."""
    computed = compute()
    return lambda: computed


def test_a_bucket_is_computed_once_before_it_is_captured_and_never_after() -> None:
    work = Work()
    graphs = Graphs(work, capture)
    for bucket in (4, 4, 8, 4, 8):
        assert graphs.run(bucket).shape == (bucket, 3)
    # once for the result and once under capture
    assert work.computed == [4, 4, 8, 8]
    assert graphs.captured == (4, 8)


def test_where_capturing_fails_work_goes_on_without_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def fails(compute: Callable[[], torch.Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    work = Work()
    graphs = Graphs(work, fails)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert graphs.run(4).shape == (4, 3)
    assert work.computed == [4, 4, 4]
    # the first one would have been computed directly anyway
    assert graphs.uncaptured_steps == 2
    assert graphs.captured == ()
    (line,) = caplog.messages
    assert "not permitted when stream is capturing" in line


def test_without_capture_every_step_is_computed() -> None:
    work = Work()
    graphs = Graphs(work, None)
    graphs.run(2)
    graphs.run(2)
    assert work.computed == [2, 2]
    assert graphs.uncaptured_steps == 0
