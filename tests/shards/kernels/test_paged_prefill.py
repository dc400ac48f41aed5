from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from shards.kernels.gather_prefill import gather_prefill
from shards.kernels.launch import gpu_of
from shards.kernels.paged_prefill import (
    LEAST_PAGES,
    PrefillPlan,
    Tile,
    cut_of,
    most_cut,
    paged_prefill,
    paged_prefill_reference,
    plan_prefill,
    tiles_at_once,
    tiles_of,
)
from tests.shards.dense import skipped_where_dense_attention_has_no_float32

Close = Callable[[torch.Tensor, torch.Tensor], None]
Way = Callable[..., torch.Tensor]


def paged(query: torch.Tensor, cache: Any, plan: PrefillPlan, **more: Any) -> torch.Tensor:
    return paged_prefill(query, cache.kv, tables=cache.tables, plan=plan, scales=cache.scales, **more)


def gathered(query: torch.Tensor, cache: Any, plan: PrefillPlan, **more: Any) -> torch.Tensor:
    with skipped_where_dense_attention_has_no_float32():
        return gather_prefill(
            query,
            cache.kv,
            tables=cache.tables,
            plan=plan,
            new_tokens=plan.first_queries.diff().tolist(),
            context_tokens=plan.context_tokens.tolist(),
            scales=cache.scales,
            **more,
        )


def a_tile(query: torch.Tensor, group: int) -> Tile:
    return Tile.of(gpu_of(query.device), group=group, dim=query.shape[2], dtype=query.dtype)


@pytest.fixture(params=[paged, gathered], ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


CASES = [
    (3, 3, 32, [1, 63, 64], [1, 63, 130], None),
    (8, 2, 48, [65, 2], [65, 64], None),
    (5, 1, 64, [40], [200], None),
]
WINDOWED = [
    (8, 2, 32, [70, 1], [150, 64], 66),
    (4, 1, 128, [3], [65], 1),
]


@pytest.mark.parametrize(
    ("way", "heads", "kv_heads", "dim", "new", "contexts", "window"),
    [*((paged, *case) for case in CASES + WINDOWED), *((gathered, *case) for case in CASES)],
)
def test_each_token_attends_to_what_came_before(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    a_cache: Callable[..., Any],
    way: Way,
    heads: int,
    kv_heads: int,
    dim: int,
    new: list[int],
    contexts: list[int],
    window: int | None,
) -> None:
    cache = a_cache(contexts, kv_heads=kv_heads, dim=dim, stored=dtype)
    query = torch.randn(sum(new), heads, dim, device=device).to(dtype)
    plan = plan_prefill(new, contexts, tile=a_tile(query, heads // kv_heads), device=device)
    expected = paged_prefill_reference(query, cache.kv, tables=cache.tables, plan=plan, window=window)
    close(way(query, cache, plan, **({} if window is None else {"window": window})), expected)


def test_a_sink_takes_its_share(
    device: torch.device, dtype: torch.dtype, close: Close, a_cache: Callable[..., Any], way: Way
) -> None:
    cache = a_cache([70, 9], kv_heads=2, dim=32, stored=dtype)
    query = torch.randn(12, 6, 32, device=device).to(dtype)
    plan = plan_prefill([3, 9], [70, 9], tile=a_tile(query, 3), device=device)
    more: dict[str, Any] = {"scale": 0.3, "sinks": torch.linspace(-2, 3, 6, device=device).to(dtype)}
    expected = paged_prefill_reference(query, cache.kv, tables=cache.tables, plan=plan, **more)
    close(way(query, cache, plan, **more), expected)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_each_token_attends_to_what_is_kept(
    device: torch.device, close: Close, a_cache: Callable[..., Any], way: Way, stored: torch.dtype
) -> None:
    cache = a_cache([130], kv_heads=2, dim=32, stored=stored)
    query = torch.randn(70, 4, 32, device=device).half()
    plan = plan_prefill([70], [130], tile=a_tile(query, 2), device=device)
    shared = {"tables": cache.tables, "plan": plan, "scales": cache.scales}
    close(way(query, cache, plan), paged_prefill_reference(query, cache.kv, **shared))


def test_dense_attention_needs_no_mask_for_any_chunk(device: torch.device, a_cache: Callable[..., Any]) -> None:
    """A mask of a chunk of 2048 tokens has 4 MiB, and was made in every layer."""
    called: list[Any] = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cache = a_cache([70], kv_heads=1, dim=32, stored=dtype)
    query = torch.randn(40, 2, 32, device=device).to(dtype)
    with Listening():
        gathered(query, cache, plan_prefill([40], [70], tile=a_tile(query, 2), device=device))
    assert called
    assert torch.nn.functional.scaled_dot_product_attention not in called


def test_a_result_does_not_depend_on_how_a_prompt_is_cut(
    device: torch.device, dtype: torch.dtype, a_cache: Callable[..., Any]
) -> None:
    cache = a_cache([130], kv_heads=1, dim=32, stored=dtype)
    query = torch.randn(130, 2, 32, device=device).to(dtype)
    at_once = paged(query, cache, plan_prefill([130], [130], tile=a_tile(query, 2), device=device))
    for start, end in ((0, 7), (7, 130)):
        chunk = plan_prefill([end - start], [end], tile=a_tile(query, 2), device=device)
        assert torch.equal(paged(query[start:end], cache, chunk), at_once[start:end])


LONG = 64 * LEAST_PAGES


@pytest.mark.parametrize("window", [None, 70, LONG + 300])
def test_a_long_context_is_cut_and_the_parts_are_merged(
    device: torch.device, dtype: torch.dtype, close: Close, a_cache: Callable[..., Any], window: int | None
) -> None:
    """Beside a short one, which is not cut. The first tokens of a chunk see nothing of a part that begins in it."""
    new, contexts = [9, 3], [3 * LONG + 5, 70]
    cache = a_cache(contexts, kv_heads=1, dim=32, stored=dtype)
    query = torch.randn(12, 3, 32, device=device).to(dtype)
    sinks = torch.linspace(-2, 3, 3, device=device).to(dtype)
    plan = plan_prefill(new, contexts, tile=Tile(16, 4, group=3), device=device, at_once=7)
    assert plan.cut == 6
    # as in a graph, which has room for more parts than there are
    padding = torch.tensor([[0, 9, 0, 1]], dtype=torch.int32, device=device)
    plan = PrefillPlan(
        plan.first_queries, plan.context_tokens, torch.cat([plan.tiles, padding]), plan.tile, plan.cut + 1
    )
    out = torch.full_like(query, torch.nan)
    paged(query, cache, plan, window=window, sinks=sinks, out=out)
    close(out, paged_prefill_reference(query, cache.kv, tables=cache.tables, plan=plan, window=window, sinks=sinks))


@pytest.mark.parametrize(
    ("new", "context", "parts"),
    [
        # two tiles, where 33 are computed at a time
        (64, 131072, 16),
        # 16 tiles: with 3 parts each there would be a second round, nearly empty
        (512, 131072, 2),
        # 32 tiles are enough, and so are those of a long chunk
        (1024, 131072, 1),
        (8192, 131072, 1),
        # short contexts are never cut
        (64, 64 * LEAST_PAGES, 1),
    ],
)
def test_tiles_are_cut_where_there_are_too_few_to_keep_all_processors_busy(new: int, context: int, parts: int) -> None:
    tiles = tiles_of([new], [context], tile=Tile(128, 8, group=4), at_once=33)
    assert {of for _, _, _, of in tiles} == {parts}
    assert cut_of(tiles) == (0 if parts == 1 else len(tiles))
    assert cut_of(tiles_of([new], [context], tile=Tile(128, 8, group=4))) == 0


def test_a_batch_of_short_prompts_is_not_cut() -> None:
    assert cut_of(tiles_of([100] * 50, [100] * 50, tile=Tile(128, 8, group=4), at_once=33)) == 0


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 200_000)), min_size=1, max_size=9), st.integers(1, 300))
def test_tiles_that_are_cut_come_first_and_have_a_bound(chunks: list[tuple[int, int]], at_once: int) -> None:
    new, contexts = [new for new, _ in chunks], [new + before for new, before in chunks]
    tiles = tiles_of(new, contexts, tile=Tile(128, 8, group=4), at_once=at_once)
    cut = cut_of(tiles)
    assert all(of > 1 for _, _, _, of in tiles[:cut])
    assert all(of == 1 for _, _, _, of in tiles[cut:])
    assert cut <= most_cut(at_once)
    at = 0
    while at < len(tiles):
        parts_of_tile = [part for _, _, part, _ in tiles[at : at + tiles[at][3]]]
        assert parts_of_tile == list(range(tiles[at][3]))
        at += tiles[at][3]


def test_there_is_work_for_every_processor(device: torch.device) -> None:
    gpu = gpu_of(device)
    assert tiles_at_once(gpu, kv_heads=1) == 2 * gpu.processors
    assert tiles_at_once(gpu, kv_heads=10**6) == 1


def test_the_longest_tiles_come_first(device: torch.device) -> None:
    plan = plan_prefill([100, 70], [100, 500], tile=Tile(128, 8, group=4), device=device)
    assert len(plan.tiles) == 4 + 3
    context = [100 - 100 + at if sequence == 0 else 500 - 70 + at for sequence, at, _, _ in plan.tiles.tolist()]
    assert context == sorted(context, reverse=True)
    assert plan.first_queries.tolist() == [0, 100, 170]


def test_the_result_goes_where_it_is_wanted(way: Way, device: torch.device, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([70], kv_heads=2, dim=32, stored=torch.float16)
    plan = plan_prefill([2], [70], tile=Tile(64, 8, group=2), device=device)
    query, room = torch.randn(2, 4, 32, device=device).half(), torch.zeros(5, 4, 32, device=device).half()
    way(query, cache, plan, out=room[1:3])
    assert torch.equal(room[1:3], way(query, cache, plan))
    assert not room[0].any()
    with pytest.raises(ValueError, match="out is not contiguous, or not like query"):
        way(query, cache, plan, out=room[:3])


@pytest.mark.parametrize("window", [None, 20])
def test_tokens_of_padding_are_zero_and_tiles_of_padding_need_no_page(
    device: torch.device, dtype: torch.dtype, close: Close, a_cache: Callable[..., Any], window: int | None
) -> None:
    """As in a graph: one more sequence without a context has the tokens that are left, and more tiles than these."""
    cache = a_cache([70, 66], kv_heads=1, dim=32, stored=dtype)
    query = torch.randn(100, 2, 32, device=device).to(dtype)
    tile = Tile(16, 4, group=2)
    tiles = [(0, 0, 0, 1), (1, 0, 0, 1), *((2, 8 * at, 0, 1) for at in range(30))]
    tables = torch.cat([cache.tables, torch.full_like(cache.tables[:1], 10**6)])
    sums, contexts, starts = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 5, 7, 100], [70, 66, 0], tiles)
    )
    out = torch.full_like(query, torch.nan)
    plan = PrefillPlan(sums, contexts, starts, tile)
    paged_prefill(query, cache.kv, tables=tables, plan=plan, scales=cache.scales, window=window, out=out)
    known = plan_prefill([5, 2], [70, 66], tile=tile, device=device)
    close(out[:7], paged_prefill_reference(query[:7], cache.kv, tables=cache.tables, plan=known, window=window))
    assert not out[7:].any()


def test_other_shapes_are_refused(device: torch.device, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([3], kv_heads=2, dim=32, stored=torch.float16)
    plan = plan_prefill([2], [3], tile=Tile(64, 8, group=2), device=device)
    with pytest.raises(ValueError, match="6 heads are not 2 groups of 2"):
        paged(torch.ones(2, 6, 32, device=device).half(), cache, plan)
    with pytest.raises(ValueError, match="16 dimensions"):
        paged(torch.ones(2, 4, 16, device=device).half(), cache, plan)
    with pytest.raises(ValueError, match="4 new tokens in a context of 3"):
        plan_prefill([4], [3], tile=Tile(64, 8, group=2), device=device)
    with pytest.raises(ValueError, match="200 heads does not fit"):
        Tile.of(gpu_of(device), group=200, dim=128, dtype=torch.bfloat16)
