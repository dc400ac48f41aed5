from __future__ import annotations

import torch

from shards.network.layers import normalize, normalize_heads_in_place


def test_normalized_rows_have_a_root_mean_square_of_the_weight() -> None:
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 7
    square = normalize(hidden, torch.full((16,), 3.0), 1e-6).square().mean(-1)
    torch.testing.assert_close(square, torch.full((5,), 9.0))


def test_heads_are_normalized_one_by_one_and_in_place() -> None:
    whole = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(4, 16, generator=torch.Generator().manual_seed(1))
    before = whole.clone()
    normalize_heads_in_place(whole[:, :4], weight, 1e-6)
    for head in range(4):
        torch.testing.assert_close(whole[:, head], normalize(before[:, head], weight[head], 1e-6))
    assert torch.equal(whole[:, 4:], before[:, 4:])
