"""Blending on a network with real layers: where nothing is approximate, answers are the exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import Blend, DocumentSpan, SamplingParams, Submission
from tests.shards.tiny_checkpoints import save_checkpoint, some_tokens


@pytest.fixture(scope="module", params=["llama", "mistral, window", "qwen3, yarn with mscale"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, request.param)
    return path


@contextmanager
def an_engine(folder: Path, **options: object) -> Iterator[Engine]:
    engine = Engine(Model.load(folder), EngineOptions(**{"kv_blocks": 64, "window_kv": "all", **options}))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def answered(
    engine: Engine, tokens: list[int], spans: list[tuple[int, int]] | None = None, budget: float = 0.0
) -> tuple[list[float], int]:
    """The logprobs of the 20 likeliest first tokens, by token, and the number of blended tokens."""
    blend = None if spans is None else Blend(tuple(DocumentSpan(*span) for span in spans), budget)
    engine.submit(Submission("a", len(tokens), 1, sampling=SamplingParams(top_logprobs=20), blend=blend))
    engine.extend("a", np.array(tokens, dtype="<u4").tobytes())
    logprobs: list[float] = []
    while True:
        report = engine.step()
        engine.check()
        for drawn in report.drawn:
            logprobs = [logprob for _, logprob in sorted(drawn.logprobs[0].top)]
        for end in report.finished:
            return logprobs, end.blended_tokens


def test_at_the_same_place_behind_the_same_tokens_a_chunk_is_exact(folder: Path) -> None:
    sink, document, other, question = some_tokens(4), some_tokens(100, 1), some_tokens(70, 2), some_tokens(9, 3)
    spans = [(4, 104), (104, 174)]
    with an_engine(folder) as engine:
        exact, _ = answered(engine, [*sink, *document, *question])
        engine.clear_cache()
        answered(engine, [*sink, *document, *other, *question], spans)
        engine.clear_cache("")
        answered(engine, [*sink, *other, *document, *question], [(4, 74), (74, 174)])
        blended, tokens = answered(engine, [*sink, *document, *question], spans[:1])
        assert tokens == 100
        assert blended == pytest.approx(exact, abs=1e-5)


def test_with_everything_computed_again_an_answer_is_bit_for_bit_the_exact_one(folder: Path) -> None:
    sink, document, other, question = some_tokens(4), some_tokens(100, 1), some_tokens(70, 2), some_tokens(9, 3)
    first, second = [*sink, *document, *other, *question], [*sink, *other, *document, *question]
    with an_engine(folder) as engine:
        exact, _ = answered(engine, second)
        engine.clear_cache()
        answered(engine, first, [(4, 104), (104, 174)], 0.5)
        assert answered(engine, second, [(4, 74), (74, 174)], 1.0) == (exact, 0)


def test_the_more_is_computed_again_the_nearer_an_answer_comes(folder: Path) -> None:
    sink, document, other, question = some_tokens(4), some_tokens(100, 1), some_tokens(70, 2), some_tokens(9, 3)
    first, second = [*sink, *document, *other, *question], [*sink, *other, *document, *question]
    distances = []
    with an_engine(folder) as engine:
        exact, _ = answered(engine, second)
        for budget in (0.0, 0.5, 0.9, 0.99):
            engine.clear_cache()
            answered(engine, first, [(4, 104), (104, 174)], 0.5)
            near, tokens = answered(engine, second, [(4, 74), (74, 174)], budget)
            assert tokens > 0
            distances.append(float(np.abs(np.array(near) - np.array(exact)).max()))
    assert distances[-1] < distances[0]
    assert distances[-1] < 0.5


def test_blended_in_one_step_or_in_many_an_answer_is_the_same(folder: Path) -> None:
    sink, documents, question = some_tokens(40), [some_tokens(90, seed) for seed in range(1, 4)], some_tokens(9, 9)
    spans = [(40, 130), (130, 220), (220, 310)]
    found = []
    for options in ({}, {"chunk_tokens": 64, "step_s": 1e-9}, {"host_bytes": 2**20, "step_s": 1e-9}):
        with an_engine(folder, **options) as engine:
            answered(engine, [*sink, *documents[0], *documents[1], *documents[2], *question], spans, 0.3)
            given = [*sink, *documents[2], *documents[0], *documents[1], *question]
            found.append(answered(engine, given, spans, 0.3))
    for logprobs, tokens in found[1:]:
        assert tokens == found[0][1] == 3 * 63
        assert logprobs == pytest.approx(found[0][0], abs=1e-3)
