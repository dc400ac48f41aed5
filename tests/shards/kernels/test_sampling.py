import math
from collections.abc import Callable

import pytest
import torch

from shards.kernels.draw import Draw
from shards.kernels.sampling import gumbel_reference, sample, sample_reference

A = Callable[..., Draw]


def tokens(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    drawn = sample(logits, draw)
    assert drawn.tokens[1].all(), "a row is not sound"
    return drawn.tokens[0].long()


def test_what_is_drawn_is_what_the_reference_draws(device: torch.device, dtype: torch.dtype, a_draw: A) -> None:
    # 5000 tokens are more than a tile of 4096
    logits = (torch.randn(4, 5000, device=device) * 3).to(dtype)
    draw = a_draw(
        4,
        truncated=False,
        temperature=[0.0, 1.0, 0.7, 2.0],
        seed=[1, -2, 1 << 40, 3],
        position=[0, 1, 1 << 33, 7],
    )
    assert torch.equal(tokens(logits, draw), sample_reference(logits, draw))


def test_only_what_is_left_is_drawn(device: torch.device, a_draw: A) -> None:
    logits = torch.tensor([[2.0, 2.5, 0.0]], device=device).expand(8, 3)
    position = list(range(8))
    drawn = tokens(logits, a_draw(8, min_p=[0.5] * 8, position=position))
    free = tokens(logits, a_draw(8, position=position, truncated=False))
    assert set(drawn.tolist()) == {0, 1}
    assert 2 in free.tolist()
    assert tokens(logits[:1], a_draw(1, top_k=[1])).tolist() == [1]


def test_the_lowest_of_equal_tokens_wins(device: torch.device, a_draw: A) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0]], device=device)
    assert tokens(logits, a_draw(1, temperature=[0.0])).tolist() == [1]


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, a_draw: A) -> None:
    logits = torch.randn(3, 300, device=device) / 100
    together = tokens(logits, a_draw(3, seed=[5, 6, 7], position=[9, 9, 9], truncated=False))
    alone = tokens(logits[1:2], a_draw(1, seed=[6], position=[9], truncated=False))
    assert together[1] == alone[0]
    repeated = tokens(logits[[1] * 3], a_draw(3, seed=[6, 6, 7], position=[9, 10, 9], truncated=False))
    assert repeated[0] == alone[0]
    assert len(set(repeated.tolist())) == 3


def test_draws_are_spread_as_the_softmax_is(device: torch.device, a_draw: A) -> None:
    share = torch.tensor([0.5, 0.3, 0.15, 0.05], device=device)
    rows = 20_000
    draw = a_draw(rows, top_k=[0] * rows, position=list(range(rows)), truncated=False)
    drawn = (share.log() + gumbel_reference(draw.seed, draw.position, 4)).argmax(dim=1)
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / rows, share, atol=0.012, rtol=0)


def test_noise_has_the_moments_of_gumbels_distribution(device: torch.device) -> None:
    noise = gumbel_reference(torch.arange(40, device=device), torch.arange(40, device=device), 5000)
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    assert torch.isfinite(noise).all()


def test_other_shapes_are_refused(device: torch.device, a_draw: A) -> None:
    with pytest.raises(ValueError, match="not rows"):
        sample(torch.ones(3, device=device), a_draw(3))
    with pytest.raises(ValueError, match=r"temperature is \[2\], not \[3\]"):
        sample(torch.ones(3, 4, device=device), a_draw(2))
