"""Steps as CUDA graphs: one launch instead of some hundred, in buffers at fixed addresses."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from shards.gpu.layout import Size

log = logging.getLogger(__name__)

T = TypeVar("T")

Bucket = TypeVar("Bucket", bound=int | Size)
"""The number of rows of a decoding step, or the size of another one."""

Replay = Callable[[], T]
"""Computes the part again from the buffers' present contents; the result is at a fixed address too."""


class Capture(Protocol):
    """Captures a computation, without computing it."""

    def __call__(self, compute: Callable[[], T], /) -> Replay[T]:
        """What computes it again."""
        ...


def cuda_capture() -> Capture:
    """A capture for a GPU. The kernels must have run once: they cannot be compiled or loaded during a capture."""
    # all graphs share memory, because no two of them run at once
    pools: list[Any] = []

    def capture(compute: Callable[[], T]) -> Replay[T]:
        graph = torch.cuda.CUDAGraph()
        if not pools:
            pools.append(torch.cuda.graph_pool_handle())
        # a garbage collection could free device memory, which ends the capture
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pools[0], capture_error_mode="thread_local"):
                computed = compute()
        finally:
            if was_enabled:
                gc.enable()

        def replay() -> T:
            graph.replay()
            return computed

        return replay

    return capture


class Graphs(Generic[Bucket, T]):
    """Runs `compute` by bucket: captured at the first run if possible, and directly if not.

    `capture` None never captures. Both ways compute the same rows, padding included, so their results are equal.
    """

    def __init__(self, compute: Callable[[Bucket], T], capture: Capture | None) -> None:
        self._compute, self._capture = compute, capture
        self._replays: dict[Bucket, Replay[T]] = {}
        self._has_failed = False
        self.uncaptured_steps = 0
        """Steps that were computed directly since a capture failed."""

    def __repr__(self) -> str:
        return f"Graphs({sorted(self._replays)} captured, {'off' if self._capture is None else 'on'})"

    @property
    def captured(self) -> tuple[Bucket, ...]:
        """The buckets that have a captured graph."""
        return tuple(sorted(self._replays))

    def run(self, bucket: Bucket) -> T:
        """One step of a bucket's size from the buffers' contents; valid until the next step."""
        replay = self._replays.get(bucket)
        if replay is None:
            return self._first(bucket)
        return replay()

    def _first(self, bucket: Bucket) -> T:
        # computed before the capture: this compiles the kernels, and a capture computes nothing
        computed = self._compute(bucket)
        self.uncaptured_steps += self._has_failed
        if self._capture is not None:
            try:
                self._replays[bucket] = self._capture(lambda: self._compute(bucket))
            except (RuntimeError, ValueError) as error:
                log.warning("steps continue without graphs: capturing %s failed: %s", bucket, error)
                self._capture, self._has_failed = None, True
        return computed
