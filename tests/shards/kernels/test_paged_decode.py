from collections.abc import Callable
from typing import Any

import pytest
import torch

from shards.kernels import paged_decode as module
from shards.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference, plan_decode, splits_of

Close = Callable[[torch.Tensor, torch.Tensor], None]


def decode(query: torch.Tensor, cache: Any, window: int | None = None, **more: Any) -> torch.Tensor:
    (sequences, heads, dim), contexts = query.shape, cache.context_tokens
    splits = splits_of(contexts.tolist(), window=window)
    plan = DecodePlan.with_room(sequences, splits, heads=heads, dim=dim, device=query.device, window=window)
    plan_decode(plan, contexts, contexts=contexts.tolist())
    assert plan.first_splits[-1] == splits
    more |= {"tables": cache.tables, "context_tokens": contexts, "scales": cache.scales}
    return paged_decode(query, cache.kv, plan=plan, **more)


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
