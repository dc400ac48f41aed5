"""Kernels run where there is a GPU, or in Triton's interpreter, in a process of its own: see test_interpreted."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from shards.kernels.draw import Draw

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEVER_INTERPRETED = {"test_interpreted.py", "test_ahead_of_time.py", "test_launch.py", "test_compiled_once.py"}

if INTERPRETED:
    collect_ignore = sorted(NEVER_INTERPRETED)
elif importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
    collect_ignore = sorted({file.name for file in Path(__file__).parent.glob("test_*.py")} - NEVER_INTERPRETED)

# The interpreter multiplies the bits of bf16 where it is not cast first: it can be held to float32 and float16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(
    params=[torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32], ids=str
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch fills what `empty` gives with NaN, or the largest integer, while it has to be deterministic."""
    torch.manual_seed(0)
    # on a GPU torch's own matrix products, which the references use, would be refused
    torch.set_deterministic_debug_mode("error" if INTERPRETED else "default")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    return compare


@dataclass
class Cache:
    """One layer of a cache with a context per sequence in it; all positions that no context holds are NaN."""

    kv: torch.Tensor
    scales: torch.Tensor | None
    tables: torch.Tensor
    context_tokens: torch.Tensor


@pytest.fixture
def a_cache(device: torch.device) -> Callable[..., Cache]:
    """A layer in the middle of a cache, blocks in no order. `stored` is how KV is stored."""

    def build(contexts: Sequence[int], *, kv_heads: int, dim: int, stored: torch.dtype) -> Cache:
        from shards.kernels.kv_write import quantise_reference

        pages = [-(-context // 64) for context in contexts]
        ids = torch.randperm(2 * sum(pages) + 1)
        tables = torch.zeros(len(contexts), max(1, *pages), dtype=torch.int32)
        written = torch.zeros(len(ids), 64, dtype=torch.bool)
        for sequence, context in enumerate(contexts):
            tables[sequence, : pages[sequence]], ids = ids[: pages[sequence]].int(), ids[pages[sequence] :]
            for page, block in enumerate(tables[sequence, : pages[sequence]].tolist()):
                written[block, : context - 64 * page] = True
        wide = torch.randn(len(written), 3, 2, kv_heads, 64, dim)
        hole = ~written[:, None, None, None].expand(wide.shape[:5])
        kv, scales = wide.to(stored), None
        if stored in (torch.int8, torch.float8_e4m3fn):
            kv, scales = quantise_reference(wide, stored)
            scales = scales.masked_fill(hole, torch.nan).to(device)[:, 1]
        # 0x7f is NaN in e4m3
        kv.view(torch.uint8)[hole] = 0x7F if kv.itemsize == 1 else 0xFF
        counts = torch.tensor(contexts, dtype=torch.int32, device=device)
        return Cache(kv.to(device)[:, 1], scales, tables.to(device), counts)

    return build


DRAWS = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "seed": (0, torch.int64),
    "position": (0, torch.int64),
    "top_logprobs": (-1, torch.int32),
}
"""The parameters of a draw by which nothing is cut off, and their types."""


@pytest.fixture
def a_draw(device: torch.device) -> Callable[..., Draw]:
    """A draw from so many rows. What is not given is off."""

    def build(rows: int, *, truncated: bool = True, **given: list[Any]) -> Draw:
        from shards.kernels.draw import Draw

        return Draw(
            **{
                name: torch.tensor(given.get(name, [off] * rows), dtype=dtype, device=device)
                for name, (off, dtype) in DRAWS.items()
            },
            truncated=truncated,
        )

    return build
