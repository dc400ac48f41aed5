from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from shards.exec.batch import Row
from shards.gpu.sharing import fill_sharing, sharing_of
from shards.kernels import paged_decode as module
from shards.kernels.paged_decode import (
    DecodePlan,
    SharedSplits,
    most_readers,
    paged_decode,
    paged_decode_reference,
    plan_decode,
    splits_of,
)

Close = Callable[[torch.Tensor, torch.Tensor], None]


def decode(
    query: torch.Tensor, cache: Any, window: int | None = None, readers: int | None = None, **more: Any
) -> torch.Tensor:
    """Splits are shared by up to `readers` sequences, None shares none."""
    (sequences, heads, dim), contexts = query.shape, cache.context_tokens
    splits = splits_of(contexts.tolist(), window=window)
    size: dict[str, Any] = {"heads": heads, "dim": dim, "device": query.device, "window": window}
    plan = DecodePlan.with_room(sequences, splits, readers=readers or 1, **size)
    plan_decode(plan, contexts, contexts=contexts.tolist(), shared=None if readers is None else shared_in(cache))
    assert plan.first_splits[-1] == splits
    assert plan.item_count == splits if readers in (None, 1) else plan.item_count < splits
    more |= {"tables": cache.tables, "context_tokens": contexts, "scales": cache.scales}
    return paged_decode(query, cache.kv, plan=plan, **more)


def shared_in(cache: Any) -> SharedSplits:
    """What the sequences of a cache have in common."""
    tables, contexts = cache.tables.cpu().numpy(), cache.context_tokens.tolist()
    rows = [Row(0, 1, context, tuple(table.tolist())) for table, context in zip(tables, contexts, strict=True)]
    shapes = {"spans": (len(rows), 4), "readers": (len(rows),), "own": (len(rows),)}
    arrays = {name: np.empty(shape, dtype=np.int32) for name, shape in shapes.items()}
    fill_sharing(arrays, sharing_of(rows, tables, split_pages=module.SPLIT_TOKENS // 64))
    return SharedSplits(**{name: torch.from_numpy(array).to(cache.tables.device) for name, array in arrays.items()})


def share(cache: Any, pages: int, sequences: list[int]) -> None:
    """Let `sequences` begin with the same pages, those of the first of them."""
    for sequence in sequences[1:]:
        cache.tables[sequence, :pages] = cache.tables[sequences[0], :pages]


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that the interpreter can take have several splits, and more than are merged at once."""
    monkeypatch.setattr(module, "SPLIT_TOKENS", 64)
    # four splits of heads of 32
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 128)


CASES = [
    (3, 3, 32, [1, 63, 330], None),
    (8, 2, 48, [64, 0, 65], None),
    (5, 1, 128, [65], None),
    (8, 2, 32, [200, 60, 1], 70),
    (5, 1, 64, [129, 70], 1),
]


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "contexts", "window"), CASES)
def test_a_token_attends_to_its_context(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    a_cache: Callable[..., Any],
    heads: int,
    kv_heads: int,
    dim: int,
    contexts: list[int],
    window: int | None,
) -> None:
    cache = a_cache(contexts, kv_heads=kv_heads, dim=dim, stored=dtype)
    query = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    shared = {"tables": cache.tables, "context_tokens": cache.context_tokens, "window": window}
    close(decode(query, cache, window), paged_decode_reference(query, cache.kv, **shared))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("contexts", "window"), [([1, 130, 64], None), ([200, 20], 70)])
def test_a_sink_takes_its_share_once(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    a_cache: Callable[..., Any],
    contexts: list[int],
    window: int | None,
) -> None:
    cache = a_cache(contexts, kv_heads=2, dim=32, stored=dtype)
    query = torch.randn(len(contexts), 6, 32, device=device).to(dtype)
    more: dict[str, Any] = {"scale": 0.3, "sinks": torch.linspace(-2, 3, 6, device=device).to(dtype)}
    shared = {"tables": cache.tables, "context_tokens": cache.context_tokens, "window": window, **more}
    close(decode(query, cache, window, **more), paged_decode_reference(query, cache.kv, **shared))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_token_attends_to_what_is_kept_of_its_context(
    device: torch.device, dtype: torch.dtype, close: Close, a_cache: Callable[..., Any], stored: torch.dtype
) -> None:
    cache = a_cache([65, 20], kv_heads=2, dim=32, stored=stored)
    query = torch.randn(2, 8, 32, device=device).to(dtype)
    shared = {"tables": cache.tables, "context_tokens": cache.context_tokens, "scales": cache.scales}
    close(decode(query, cache), paged_decode_reference(query, cache.kv, **shared))


def test_a_split_has_several_pages(device: torch.device, close: Close, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([200], kv_heads=1, dim=32, stored=torch.float16)
    query = torch.randn(1, 2, 32, device=device).half()
    shared = {"tables": cache.tables, "context_tokens": cache.context_tokens}
    close(decode(query, cache), paged_decode_reference(query, cache.kv, **shared))


@pytest.mark.usefixtures("short_splits")
def test_a_result_does_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, a_cache: Callable[..., Any]
) -> None:
    cache = a_cache([1, 130, 64, 65], kv_heads=1, dim=32, stored=dtype)
    query = torch.randn(4, 2, 32, device=device).to(dtype)
    together = decode(query, cache)
    cache.tables, cache.context_tokens = cache.tables[1:2], cache.context_tokens[1:2]
    assert torch.equal(decode(query[1:2], cache), together[1:2])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "readers"), [(4, 1, None), (6, 2, None), (2, 2, None), (40, 2, None), (4, 1, 16)]
)
def test_splits_that_are_read_once_for_several_sequences_change_no_bit(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    a_cache: Callable[..., Any],
    heads: int,
    kv_heads: int,
    readers: int | None,
) -> None:
    # six with one beginning, of which three go on alike; one alone, one without a context, two that are one answer
    contexts = [130, 200, 260, 129, 70, 193, 100, 0, 150, 149]
    cache = a_cache(contexts, kv_heads=kv_heads, dim=32, stored=dtype)
    share(cache, 2, [2, 0, 1, 3, 5])
    share(cache, 3, [2, 1, 5])
    share(cache, 1, [2, 4])
    share(cache, 3, [8, 9])
    query = torch.randn(len(contexts), heads, 32, device=device).to(dtype)
    together = decode(query, cache, readers=readers or most_readers(heads // kv_heads))
    if readers is None:
        assert torch.equal(together, decode(query, cache))
    close(together, paged_decode_reference(query, cache.kv, tables=cache.tables, context_tokens=cache.context_tokens))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("stored", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_sinks_and_what_is_kept_of_a_context_are_the_same_for_several_sequences(
    device: torch.device, a_cache: Callable[..., Any], stored: torch.dtype
) -> None:
    cache = a_cache([130, 200, 129], kv_heads=2, dim=32, stored=stored)
    share(cache, 2, [1, 0, 2])
    query = torch.randn(3, 6, 32, device=device).half()
    more: dict[str, Any] = {"scale": 0.3, "sinks": torch.linspace(-2, 3, 6, device=device).half()}
    assert torch.equal(decode(query, cache, readers=5, **more), decode(query, cache, **more))


def test_a_plan_lists_the_readers_of_each_split(
    device: torch.device, a_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(module, "PLANNED_AT_ONCE", 4)
    contexts = [190, 130, 300, 140, 70]
    cache = a_cache(contexts, kv_heads=1, dim=16, stored=torch.float16)
    share(cache, 2, [2, 1, 3])
    share(cache, 1, [2, 4])
    plan = DecodePlan.with_room(5, 20, heads=1, dim=16, device=device, readers=2)
    plan_decode(plan, cache.context_tokens, contexts=contexts, shared=shared_in(cache))
    read: dict[int, list[list[int]]] = {}
    for split, *readers in plan.items[: int(plan.item_count)].tolist():
        read.setdefault(split, []).append([reader for reader in readers if reader >= 0])
    everyone = [sorted(chain.from_iterable(read[split])) for split in range(5)]
    assert everyone == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3], [2], [2]]
    # four have the first split in common, and three the second
    sizes = [sorted(map(len, read[split])) for split in range(5)]
    assert sizes == [[1, 2, 2], [1, 1, 1, 2], [1, 1, 1, 1], [1], [1]]


def test_a_plan_with_a_window_shares_no_splits(device: torch.device, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([3, 4], kv_heads=1, dim=16, stored=torch.float16)
    plan = DecodePlan.with_room(2, 2, heads=1, dim=16, device=device, window=5)
    with pytest.raises(ValueError, match="a plan with a window shares no splits"):
        plan_decode(plan, cache.context_tokens, shared=shared_in(cache))


def test_a_window_leaves_old_splits_out() -> None:
    assert splits_of([1, 512, 513, 0]) == 4
    assert splits_of([2000, 100], window=512) == 3


def test_other_shapes_are_refused(device: torch.device, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([3, 4], kv_heads=2, dim=32, stored=torch.float16)
    with pytest.raises(ValueError, match="3 heads are no groups of 2"):
        decode(torch.ones(2, 3, 32, device=device).half(), cache)
    with pytest.raises(ValueError, match="16 dimensions"):
        decode(torch.ones(2, 4, 16, device=device).half(), cache)
    with pytest.raises(ValueError, match=r"context_tokens is \[2\], not \[3\]"):
        decode(torch.ones(3, 4, 32, device=device).half(), cache)


def test_the_result_goes_where_it_is_wanted(device: torch.device, a_cache: Callable[..., Any]) -> None:
    cache = a_cache([3, 70], kv_heads=2, dim=32, stored=torch.float16)
    query, room = torch.randn(2, 4, 32, device=device).half(), torch.zeros(5, 4, 32, device=device).half()
    decode(query, cache, out=room[1:3])
    assert torch.equal(room[1:3], decode(query, cache))
    assert not room[0].any()
    assert not room[3:].any()
    with pytest.raises(ValueError, match="out is not contiguous, or not like query"):
        decode(query, cache, out=room[::2][:2])


def test_a_plan_without_room_is_refused_before_anything_is_launched(device: torch.device) -> None:
    plan = DecodePlan.with_room(2, 3, heads=2, dim=16, device=device)
    contexts = torch.tensor([1024, 1025], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="these contexts have 5 splits and the plan has room for 3"):
        plan_decode(plan, contexts, contexts=[1024, 1025])
