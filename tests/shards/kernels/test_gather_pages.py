from collections.abc import Callable
from typing import Any

import pytest
import torch

from shards.kernels.gather_pages import gather_pages, gather_pages_reference


@pytest.mark.parametrize("stored", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 48), (64, 32), (130, 32)])
def test_pages_lie_side_by_side(
    device: torch.device,
    close: Callable[[torch.Tensor, torch.Tensor], None],
    a_cache: Callable[..., Any],
    stored: torch.dtype,
    tokens: int,
    dim: int,
) -> None:
    cache = a_cache([3, tokens], kv_heads=2, dim=dim, stored=stored)
    asked = {"tokens": tokens, "dtype": torch.float16, "scales": cache.scales}
    actual = gather_pages(cache.kv, cache.tables[1], **asked)
    close(actual, gather_pages_reference(cache.kv, cache.tables[1], **asked))


def test_a_table_that_is_too_short_is_refused(a_cache: Callable[..., Any]) -> None:
    cache = a_cache([64], kv_heads=1, dim=32, stored=torch.float16)
    with pytest.raises(ValueError, match="65 tokens need 2 pages"):
        gather_pages(cache.kv, cache.tables[0], tokens=65, dtype=torch.float16)
    with pytest.raises(ValueError, match="not \\[pages\\]"):
        gather_pages(cache.kv, cache.tables, tokens=1, dtype=torch.float16)
