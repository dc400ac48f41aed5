"""Values that change from step to step compile nothing anew: a compilation takes seconds, while requests wait."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

META = torch.device("meta")


def asked_of(ask: Callable[..., object]) -> set[tuple[object, ...]]:
    """The kernels that Triton would compile for these launches, with their specialised arguments."""
    ahead = _compile_ahead()
    recorder = ahead.Recorder(ahead.CHIPS["sm_90"], processors=132)
    ask(recorder)
    sources = [(launch, ahead.source_of(launch)) for launch in recorder.launches]
    return {
        (launch.kernel.fn.__name__, *source.signature.items(), *map(str, source.constants.items()), str(source.attrs))
        for launch, source in sources
    }


def _compile_ahead() -> Any:
    spec = importlib.util.find_spec("tests.shards.kernels.compile_ahead")
    assert spec is not None
    return importlib.import_module("tests.shards.kernels.compile_ahead")


def a_step(sequences: int, pages: int, gpu: Any) -> None:
    from shards.kernels.gather_pages import gather_pages
    from shards.kernels.paged_decode import DecodePlan, SharedSplits, paged_decode, plan_decode
    from shards.kernels.paged_prefill import Tile, paged_prefill, plan_prefill

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    kv = empty(100, 4, 2, 2, 64, 128)[:, 1]
    tables, contexts = empty(sequences, pages, dtype=torch.int32), empty(sequences, dtype=torch.int32)
    plan = DecodePlan.with_room(sequences, sequences * pages, heads=8, dim=128, device=META, readers=4)
    shared = SharedSplits(empty(sequences, 4, dtype=torch.int32), contexts, contexts)
    plan_decode(plan, contexts, shared=shared, gpu=gpu)
    paged_decode(empty(sequences, 8, 128), kv, tables=tables, context_tokens=contexts, plan=plan, gpu=gpu)
    tile = Tile.of(gpu, group=4, dim=128, dtype=torch.bfloat16)
    chunks = plan_prefill([7] * sequences, [64 * pages] * sequences, tile=tile, device=META)
    paged_prefill(empty(7 * sequences, 8, 128), kv, tables=tables, plan=replace(chunks, cut=sequences), gpu=gpu)
    gather_pages(kv, tables[-1], tokens=64 * pages - 1, dtype=torch.bfloat16, gpu=gpu)


def adapted_rows(count: int, tiles: int, gpu: Any) -> None:
    from shards.kernels.low_rank import AdaptedRows, LowRankSlots, add_low_rank

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    int32 = torch.int32
    matrices = empty(8, 3, 16, 2048), empty(8, 4096, 16)
    slots = LowRankSlots(*matrices, empty(8, 3, dtype=int32), empty(4, dtype=int32), 2048)
    rows = AdaptedRows(empty(count, dtype=int32), empty(tiles, 3, dtype=int32), 16)
    add_low_rank(empty(count, 4096), empty(count, 2048), slots, rows, gpu=gpu)


@pytest.mark.parametrize(("count", "tiles"), [(1, 1), (8, 8), (16, 9), (200, 21)])
def test_the_rows_with_adapters_compile_no_kernel_anew(count: int, tiles: int) -> None:
    assert asked_of(lambda gpu: adapted_rows(count, tiles, gpu)) == asked_of(lambda gpu: adapted_rows(3, 3, gpu))


@pytest.mark.parametrize(("sequences", "pages"), [(1, 1), (1, 16), (16, 1), (16, 32), (3, 7), (16, 1000)])
def test_neither_the_batch_nor_the_contexts_compile_a_kernel_anew(sequences: int, pages: int) -> None:
    assert asked_of(lambda gpu: a_step(sequences, pages, gpu)) == asked_of(lambda gpu: a_step(2, 5, gpu))
