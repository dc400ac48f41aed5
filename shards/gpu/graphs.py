"""Decoding steps as CUDA graphs: one launch instead of some hundred, in buffers that stay where they are."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Compute = Callable[[int], Tensor]
"""Computes one step of a bucket's size from buffers that stay where they are."""

Replay = Callable[[], Tensor]
"""Computes it again from what these buffers hold now; the result stays where it is too."""

Capture = Callable[[Callable[[], Tensor]], Replay]


def cuda_capture() -> Capture:
    """Captures on a GPU. The kernels must have run once: they cannot be compiled or loaded while one captures."""
    # all graphs share memory: no two of them run at once
    pools: list[Any] = []

    def capture(compute: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        if not pools:
            pools.append(torch.cuda.graph_pool_handle())
        # what is collected meanwhile could free memory of the device, which ends the capture
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pools[0], capture_error_mode="thread_local"):
                computed = compute()
        finally:
            if was_enabled:
                gc.enable()

        def replay() -> Tensor:
            graph.replay()
            return computed

        return replay

    return capture


class Graphs:
    """Runs `compute` by bucket: captured the first time where it can be, and as it is where it cannot.

    `capture` None never captures. Both ways compute the same rows, padding included, so they give the same.
    """

    def __init__(self, compute: Compute, capture: Capture | None) -> None:
        self._compute, self._capture = compute, capture
        self._replays: dict[int, Replay] = {}

    def __repr__(self) -> str:
        return f"Graphs({sorted(self._replays)} captured, {'off' if self._capture is None else 'on'})"

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that are replayed."""
        return tuple(sorted(self._replays))

    def run(self, bucket: int) -> Tensor:
        """One step of `bucket` rows from what the buffers hold; valid until the next step."""
        replay = self._replays.get(bucket)
        if replay is None:
            return self._first(bucket)
        return replay()

    def _first(self, bucket: int) -> Tensor:
        # computed before it is captured: this compiles the kernels, and a capture computes nothing
        computed = self._compute(bucket)
        if self._capture is not None:
            try:
                self._replays[bucket] = self._capture(lambda: self._compute(bucket))
            except (RuntimeError, ValueError) as error:
                log.warning("decoding goes on without graphs: capturing %d rows failed: %s", bucket, error)
                self._capture = None
        return computed
