"""Steps with chunks at fixed addresses and of fixed sizes, beside the same steps in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shards.exec.drawing import GREEDY, Drawing, Sample
from shards.gpu.cache import GpuCache
from shards.gpu.decoder import GpuDecoder
from shards.gpu.graphs import Replay
from shards.gpu.layout import Size
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.step import StepOptions, Steps
from shards.gpu.weights import moved
from shards.network.config import NetworkConfig, Rope
from shards.network.loading import random_weights
from tests.shards.gpu.conftest import INTERPRETED
from tests.shards.tiny_checkpoints import some_tokens

BLOCKS = 16
# the interpreter multiplies the bits of bf16
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# and takes a second for each layer of a padded step
WINDOWS = (20,) if INTERPRETED else (20, None)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

FIRST, SECOND = (9, 2, 5), (11, 0)
"""The blocks of two sequences."""


def again(compute: Replay) -> Replay:
    """A capture for the interpreter: what a graph would do, computed each time."""
    return compute


def some_steps(
    device: torch.device,
    *,
    windows: tuple[int | None, ...] = (None,),
    dtype: torch.dtype = torch.float32,
    graphs: bool = True,
    pages: int | None = None,
) -> Steps:
    config = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), windows)
    weights = moved(random_weights(config, seed=1), config, device=device, dtype=dtype)
    cache = GpuCache(config, BLOCKS, dtype=dtype, device=device, pages=pages)
    # memory that was not written spoils its reader
    cache.data.view(torch.uint8).fill_(0xFF)
    options = StepOptions(rows=6, graph_tokens=64, graphs=graphs)
    capture = again if graphs and INTERPRETED else None
    steps = Steps(GpuDecoder(config, weights), cache, options, capture=capture)
    steps.warm_up_mixed(6)
    return steps


def tokens_in(samples: list[Sample | None]) -> list[int | None]:
    return [None if sample is None else sample.token_id for sample in samples]


def histories() -> list[list[Span]]:
    """Steps that follow each other: a chunk alone, beside decoding, several, with draws and without, beyond a page."""
    first, second = some_tokens(150), some_tokens(20, seed=1)
    return [
        [Span(0, first[:40], 0, FIRST)],
        [Span(0, first[40:90], 40, FIRST), Span(1, second[:7], 0, SECOND, GREEDY)],
        [Span(1, second[7:8], 7, SECOND, GREEDY), Span(0, first[90:130], 90, FIRST, GREEDY)],
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_padded_step_gives_what_a_step_of_its_own_size_gives(device: torch.device, dtype: torch.dtype) -> None:
    padded, exact = (some_steps(device, windows=WINDOWS, dtype=dtype, graphs=graphs) for graphs in (True, False))
    assert [size.tokens for size in padded._mixed.captured] == [64]
    assert exact._mixed.captured == ()
    for spans in histories():
        step = step_of_spans(spans)
        drawn = tokens_in(padded.collect(padded.submit(step)))
        expected = exact.logits(step)
        ours = padded._static.logits[: len(step.wanted)]
        torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if dtype == torch.float32:
            assert drawn == expected.argmax(1).tolist()
    # padding has written to no block but its own
    kept = [steps.cache.data[:BLOCKS].float().cpu() for steps in (padded, exact)]
    torch.testing.assert_close(kept[0], kept[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


def drawn_after(steps: Steps, prompts: Sequence[Sequence[int]], new: int) -> list[list[int | None]]:
    """The tokens drawn after each of `prompts`, one step ahead; the last comes when the first have begun to decode."""
    drawn: list[list[int | None]] = [[] for _ in prompts]
    due = []

    def collect() -> None:
        spans, ticket = due.pop(0)
        for span, token in zip(spans, tokens_in(steps.collect(ticket)), strict=True):
            drawn[span.row].append(token)

    for at in range(new + 1):
        spans = []
        for row, prompt in enumerate(prompts):
            number = at - (row == len(prompts) - 1)
            if number < 0:
                continue
            computed = len(prompt) + number - 1 if number else 0
            known = prompt if not number else None
            drawing = Drawing(temperature=1.5, top_p=0.9, seed=row, position=len(prompt) + number)
            spans.append(Span(row, known, computed, [2 * row, 2 * row + 1], drawing))
        due.append((spans, steps.submit(step_of_spans(spans))))
        if len(due) > 1:
            collect()
    while due:
        collect()
    steps.check()
    return drawn


def test_graphs_change_no_drawn_token(device: torch.device) -> None:
    prompts = [some_tokens(3), some_tokens(50, seed=1), some_tokens(40, seed=2)]
    answers = [drawn_after(some_steps(device, graphs=graphs), prompts, 2) for graphs in (True, False)]
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [3, 3, 2]


def test_steps_without_a_size_are_computed_in_their_own(device: torch.device) -> None:
    steps, exact = some_steps(device), some_steps(device, graphs=False)
    taken: list[Size] = []
    run = steps._mixed.run
    steps._mixed.run = lambda size: (taken.append(size), run(size))[1]  # type: ignore[method-assign]
    prompt = some_tokens(140)
    long = [Span(0, prompt[:65], 0, FIRST, GREEDY)]
    # four sequences have room
    many = [Span(row, prompt[:3], 0, [row], GREEDY) for row in range(6)] + [Span(6, prompt[:4], 0, [6])]
    for spans in (long, many):
        step = step_of_spans(spans)
        assert steps.collect(steps.submit(step)) == exact.collect(exact.submit(step))
    assert taken == []
    steps.collect(steps.submit(step_of_spans([Span(0, prompt[:5], 0, FIRST, GREEDY)])))
    assert [size.tokens for size in taken] == [64]


def test_pages_of_layers_with_a_window_are_found_in_a_padded_step(device: torch.device) -> None:
    results = []
    for graphs in (True, False):
        steps = some_steps(device, windows=WINDOWS, graphs=graphs, pages=3)
        page_of = np.full(BLOCKS + 1, 3, dtype=np.int32)
        page_of[[9, 2, 11]] = (1, 0, 2)
        drawn = []
        for spans in histories()[:2]:
            step = replace(step_of_spans(spans), page_of=page_of)
            drawn.append(steps.collect(steps.submit(step)))
        results.append(drawn)
    assert results[0] == results[1]
