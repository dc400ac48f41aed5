"""Steps of rows that begin with the same blocks, beside the same steps without sharing: bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shards.exec.drawing import GREEDY
from shards.gpu.cache import GpuCache
from shards.gpu.decoder import GpuDecoder
from shards.gpu.graphs import Replay
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.step import StepOptions, Steps
from shards.gpu.weights import moved
from shards.network.config import NetworkConfig, Rope
from shards.network.loading import random_weights
from tests.shards.gpu.conftest import INTERPRETED
from tests.shards.tiny_checkpoints import some_tokens

BLOCKS = 14
# the interpreter takes a second for each layer of a step
WINDOWS: tuple[int | None, ...] = (None,) if INTERPRETED else (None, 100)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
COMMON = (9, 2, 5, 11, 0, 7, 3, 12)
"""The blocks of a prompt of 512 tokens: one split."""


def again(compute: Replay) -> Replay:
    """A capture for the interpreter: what a graph would do, computed each time."""
    return compute


def some_steps(device: torch.device, *, shares: bool, graphs: bool, chunks: bool = False) -> Steps:
    config = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 4, 1, 16, 1024, 1e-6, Rope(), WINDOWS)
    weights = moved(random_weights(config, seed=1), config, device=device, dtype=DTYPE)
    cache = GpuCache(config, BLOCKS, dtype=DTYPE, device=device)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3)))
    options = StepOptions(rows=4, graph_tokens=64, graphs=graphs, shares=shares)
    steps = Steps(GpuDecoder(config, weights), cache, options, capture=again if graphs and INTERPRETED else None)
    if graphs and chunks:
        steps.warm_up_mixed(4)
    return steps


def decoding(*contexts: int, blocks: Sequence[Sequence[int]]) -> list[Span]:
    return [
        Span(row, [row], context - 1, table, GREEDY)
        for row, (context, table) in enumerate(zip(contexts, blocks, strict=True))
    ]


THREE = decoding(520, 514, 560, blocks=[(*COMMON, 1), (*COMMON, 4), (*COMMON, 6)])
DRAFTS = decoding(513, 514, blocks=[(*COMMON, 1)] * 2)
BESIDE_A_CHUNK = [*THREE[:2], Span(2, some_tokens(5), 0, (6,), GREEDY)]


def items_of(steps: Steps) -> int:
    return int(steps._static.plans(1)[None].item_count)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("spans", "items"), [(THREE, 4), (DRAFTS, 3), (BESIDE_A_CHUNK, 3)], ids=["decode", "drafts", "mixed"]
)
def test_reading_shared_blocks_once_changes_no_bit(
    device: torch.device, graphs: bool, spans: list[Span], items: int
) -> None:
    step = step_of_spans(spans)
    together, apart = (
        some_steps(device, shares=shares, graphs=graphs, chunks=not step.is_decode) for shares in (True, False)
    )
    logits = together.logits(step)
    assert torch.equal(logits, apart.logits(step))
    assert logits.isfinite().all()
    if graphs:
        # the common split is one item, and each row has one of its own
        assert items_of(together) == items
        assert items_of(apart) == 2 * (items - 1)


def test_what_is_shared_changes_from_step_to_step_in_one_graph(device: torch.device) -> None:
    together, apart = (some_steps(device, shares=shares, graphs=True) for shares in (True, False))
    others = decoding(520, 514, 3, blocks=[(*COMMON, 1), (*COMMON[:7], 4, 6), (13,)])
    for spans, items in ((THREE, 4), (others, 5), (THREE[:1], 2), (THREE, 4)):
        step = step_of_spans(spans)
        assert torch.equal(together.logits(step), apart.logits(step))
        assert items_of(together) == items
