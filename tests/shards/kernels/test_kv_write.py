from collections.abc import Callable

import numpy as np
import pytest
import torch

from shards.kernels.cache import QUANTISED
from shards.kernels.gather_pages import gather_pages
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write, kv_write_reference

Close = Callable[[torch.Tensor, torch.Tensor], None]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def a_projection(heads: int, kv_heads: int, dim: int, *, tokens: int = 3, like: torch.Tensor) -> QKV:
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=like.device).to(like.dtype)
    query, key, value = torch.split(fused.view(tokens, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    return query, key, value


def a_rotation(dim: int, device: torch.device) -> Rotation:
    angle = torch.rand(100, dim // 2, device=device) * 6
    return Rotation(angle.cos(), angle.sin())


def empty_layer(
    blocks: int, kv_heads: int, dim: int, *, stored: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    kv = torch.zeros(blocks, 2, 2, kv_heads, 64, dim, device=device).to(stored)
    return [kv[:, 1], torch.full(kv.shape[:5], torch.nan, device=device)[:, 1]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "stored"),
    [
        (4, 4, 32, None),
        (8, 2, 64, None),
        (10, 9, 128, None),
        (5, 1, 48, torch.int8),
        (8, 2, 32, torch.float8_e4m3fn),
    ],
)
def test_keys_and_values_are_where_they_belong(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    heads: int,
    kv_heads: int,
    dim: int,
    stored: torch.dtype | None,
) -> None:
    qkv = a_projection(heads, kv_heads, dim, like=torch.empty(0, dtype=dtype, device=device))
    qkv[2][0] = 0
    places = (torch.tensor([0, 99, 7], device=device), torch.tensor([64, 4 * 64 + 63, 2], device=device))
    query_weight, key_weight = (torch.rand(dim, device=device).to(dtype) for _ in range(2))
    norm = None if dim == 64 else HeadNorm(query_weight, key_weight, 1e-6)
    (expected, expected_scales), (actual, scales) = (
        empty_layer(5, kv_heads, dim, stored=stored or dtype, device=device) for _ in range(2)
    )
    rotation = a_rotation(dim, device)
    quantised = stored in QUANTISED
    close(
        kv_write(qkv, places, kv=actual, rotation=rotation, norm=norm, scales=scales if quantised else None),
        kv_write_reference(
            qkv, places, kv=expected, rotation=rotation, norm=norm, scales=expected_scales if quantised else None
        ),
    )
    torch.testing.assert_close(scales, expected_scales, equal_nan=True)
    # a quotient half way between two steps may fall either way
    step = {torch.int8: 1.0, torch.float8_e4m3fn: 32.0}.get(actual.dtype, 2e-3)
    assert torch.equal(actual.float() != 0, expected.float() != 0)
    torch.testing.assert_close(actual.float(), expected.float(), atol=step, rtol=step / 32)


def test_a_quantised_value_is_within_half_a_step(device: torch.device) -> None:
    query, key, value = a_projection(1, 1, 32, tokens=5, like=torch.empty(0, device=device))
    places = (torch.zeros(5, dtype=torch.int64, device=device), torch.arange(5, device=device))
    for stored, half_step in ((torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 16 / 448)):
        kv, scales = empty_layer(1, 1, 32, stored=stored, device=device)
        kv_write((query, key, value), places, kv=kv, rotation=a_rotation(32, device), scales=scales)
        read = gather_pages(
            kv, torch.zeros(1, dtype=torch.int32, device=device), tokens=5, dtype=key.dtype, scales=scales
        )
        error = (read[1, 0] - value[:, 0]).abs().amax(dim=-1) / value[:, 0].abs().amax(dim=-1)
        assert error.max() <= half_step * 1.001


def test_a_block_beyond_the_reach_of_int32_is_written_and_read(device: torch.device) -> None:
    # 2 GiB that are asked for and, but for two pages, never touched
    blocks, stride = 3, 1 << 30
    storage = torch.from_numpy(np.empty((blocks - 1) * stride + 2 * 64 * 32, dtype=np.int8)).to(device)
    kv = storage.as_strided((blocks, 2, 1, 64, 32), (stride, 64 * 32, 64 * 32, 32, 1))
    scales = torch.full((blocks, 2, 1, 64), torch.nan, device=device)
    query, key, value = a_projection(1, 1, 32, tokens=1, like=torch.empty(0, device=device))
    zero, slot = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([2 * 64], device=device)
    kv_write((query, key, value), (zero, slot), kv=kv, rotation=a_rotation(32, device), scales=scales)
    table = torch.tensor([2], dtype=torch.int32, device=device)
    read = gather_pages(kv, table, tokens=1, dtype=torch.float32, scales=scales)
    torch.testing.assert_close(read[1, 0], value[0], atol=0.02, rtol=0)


def test_other_shapes_are_refused(device: torch.device) -> None:
    query, key, value = a_projection(2, 1, 32, like=torch.empty(0, device=device))
    kv, scales = empty_layer(2, 1, 32, stored=torch.float32, device=device)
    places = (torch.zeros(3, dtype=torch.int64, device=device), torch.arange(3, device=device))
    rotation = a_rotation(32, device)
    with pytest.raises(ValueError, match=r"key is \[3, 2, 32\], not \[3, 1, 32\]"):
        kv_write((query, query, value), places, kv=kv, rotation=rotation)
    with pytest.raises(ValueError, match="scales go with int8"):
        kv_write((query, key, value), places, kv=kv, rotation=rotation, scales=scales)
    with pytest.raises(ValueError, match=r"slots is \[2\], not \[3\]"):
        kv_write((query, key, value), (places[0], places[1][:2]), kv=kv, rotation=rotation)
    with pytest.raises(ValueError, match=r"cos is \[100, 8\], not \[100, 16\]"):
        kv_write((query, key, value), places, kv=kv, rotation=a_rotation(16, device))
    with pytest.raises(ValueError, match="kv has 4 dimensions"):
        kv_write((query, key, value), places, kv=kv[0], rotation=rotation)
