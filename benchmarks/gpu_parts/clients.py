"""Jobs for an engine, and a client that submits them and records when tokens arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shards.engine import Engine
from shards.network.config import NetworkConfig
from shards.nouns import FinishReason, SamplingParams, Submission

PIECE_TOKENS = 16384
"""Tokens of a prompt that are submitted at once; the engine accepts this much ahead of the computed tokens."""

GREEDY = SamplingParams(ignore_eos=True)


@dataclass
class Job:
    prompt: np.ndarray
    new_tokens: int
    sampling: SamplingParams = GREEDY
    submitted_s: float = 0.0
    handed_tokens: int = 0
    cached_tokens: int = 0
    drawn_s: list[float] = field(default_factory=list)
    answer: list[int | None] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.drawn_s[0] - self.submitted_s

    @property
    def gaps_s(self) -> list[float]:
        return np.diff(self.drawn_s).tolist()


class Clients:
    """Submits jobs to an engine, at most `concurrency` at once, and records when each token came."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._names = engine, 0
        self._live: dict[object, Job] = {}

    def run(self, jobs: Sequence[Job], concurrency: int) -> float:
        """Seconds from the first submission to the last token."""
        waiting, started = deque(jobs), time.perf_counter()
        while waiting or self._live:
            while waiting and len(self._live) < concurrency:
                self.submit(waiting.popleft())
            self.step()
        return time.perf_counter() - started

    def submit(self, job: Job) -> None:
        self._names += 1
        self._live[self._names] = job
        job.submitted_s = time.perf_counter()
        self.engine.submit(Submission(self._names, len(job.prompt), job.new_tokens, sampling=job.sampling))
        self._hand_over(self._names, 2 * PIECE_TOKENS)

    def step(self) -> None:
        report = self.engine.step()
        now = time.perf_counter()
        for drawn in report.drawn:
            self._live[drawn.key].drawn_s += [now] * len(drawn.token_ids)
            self._live[drawn.key].answer += drawn.token_ids
        for moved in report.progress:
            if moved.key in self._live:
                self._hand_over(moved.key, moved.computed_tokens + 2 * PIECE_TOKENS)
        for finished in report.finished:
            self._live.pop(finished.key).cached_tokens = finished.cached_tokens
            if finished.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"a request was {finished.reason.value}: {finished.message}")

    def _hand_over(self, name: object, up_to: int) -> None:
        job = self._live[name]
        while job.handed_tokens < min(up_to, len(job.prompt)):
            piece = job.prompt[job.handed_tokens : job.handed_tokens + PIECE_TOKENS]
            self.engine.extend(name, piece.tobytes())
            job.handed_tokens += len(piece)


def a_job(config: NetworkConfig, prompt_tokens: int, new_tokens: int, rng: np.random.Generator) -> Job:
    return Job(rng.integers(0, config.vocab_size, prompt_tokens).astype("<u4"), new_tokens)
