"""This engine. usage: PYTHON -m benchmarks.cpu_parts.ours_worker FOLDER DTYPE THREADS"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from benchmarks.cpu_parts.worker import Prompts, serve
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.threads import use_threads


class Ours:
    """Implements `benchmarks.cpu_parts.worker.Engine`."""

    def __init__(self, folder: str, dtype: str) -> None:
        model = Model.load(Path(folder), dtype=dtype)
        # as in the other engines, a step is bounded by tokens and not by time
        limits = EngineOptions(
            kv_bytes=3 * 2**30, max_running=64, step_s=1e3, chunk_tokens=2048, batch_tokens=2048, speculate="off"
        )
        self._engine = Engine(model, limits)
        self._count, self._keys = 0, list[int]()

    def start(self, prompts: Prompts) -> None:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        for ids in prompts:
            self._count += 1
            self._keys.append(self._count)
            self._engine.submit(Submission(self._count, len(ids), 512, sampling=sampling))
            self._engine.extend(self._count, np.asarray(ids, dtype="<u4").tobytes())
        waiting = set(self._keys)
        while waiting:
            waiting -= {int(str(drawn.key)) for drawn in self._engine.step().drawn}

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            assert len(self._engine.step().drawn) == len(self._keys), "a sequence was not computed"

    def end(self) -> None:
        for key in self._keys:
            self._engine.cancel(key)
        self._keys.clear()
        while self._engine.has_work:
            self._engine.step()


if __name__ == "__main__":
    use_threads(int(sys.argv[3]))
    with contextlib.redirect_stdout(sys.stderr):
        ours = Ours(*sys.argv[1:3])
    serve(ours)
