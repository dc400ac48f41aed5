from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shards.network.errors import BrokenCheckpoint
from shards.network.layers import DenseLinear
from shards.network.loading import has_room
from shards.network.packed import PackedLinear, packed_linear, packs


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_dense_matrix(rows: int, has_bias: bool) -> None:
    weight, bias, hidden = drawn(520, 600), drawn(520, seed=1) if has_bias else None, drawn(rows, 600, seed=2)
    if not packs(weight):
        pytest.skip("oneDNN does not pack bfloat16 on this CPU")
    product = PackedLinear(weight, bias)(hidden)
    exact = hidden.float() @ weight.float().T + (bias.float() if bias is not None else 0)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.float(), exact, rtol=2**-7, atol=2e-3)


def test_leading_dimensions_are_kept() -> None:
    assert PackedLinear(drawn(520, 600))(drawn(2, 3, 600)).shape == (2, 3, 520)


def test_small_and_wide_matrices_stay_dense() -> None:
    assert isinstance(packed_linear([drawn(8, 16), drawn(8, 16)], None, torch.bfloat16), DenseLinear)
    assert isinstance(packed_linear([drawn(600, 600).float()], None, torch.float32), DenseLinear)


def test_nothing_is_packed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(packed_linear([drawn(520, 600)], None, torch.bfloat16), DenseLinear)


def test_matrices_are_kept_twice_only_in_machines_with_room(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(300))
    assert has_room(tmp_path, memory_bytes=1000)
    assert not has_room(tmp_path, memory_bytes=999)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    with pytest.raises(BrokenCheckpoint, match=r"lost\.safetensors cannot be read"):
        has_room(tmp_path)
