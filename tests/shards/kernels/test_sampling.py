import math
from typing import Any

import pytest
import torch

from shards.kernels.sampling import Draw, gumbel_reference, sample, sample_reference, threshold, threshold_reference

DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
    "top_logprobs": torch.int32,
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, "top_logprobs": -1}


def a_draw(rows: int, device: torch.device, *, truncated: bool = True, **given: list[Any]) -> Draw:
    values = {name: given.get(name, [OFF[name]] * rows) for name in OFF}
    tensors = {name: torch.tensor(values[name], dtype=DTYPES[name], device=device) for name in OFF}
    return Draw(**tensors, truncated=truncated)


def tokens(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    drawn = sample(logits, draw)
    assert drawn.tokens[1].all(), "a row is not sound"
    return drawn.tokens[0].long()


def test_what_is_drawn_is_what_the_reference_draws(device: torch.device, dtype: torch.dtype) -> None:
    # 5000 tokens are more than a tile of 4096
    logits = (torch.randn(4, 5000, device=device) * 3).to(dtype)
    draw = a_draw(
        4,
        device,
        truncated=False,
        temperature=[0.0, 1.0, 0.7, 2.0],
        seed=[1, -2, 1 << 40, 3],
        position=[0, 1, 1 << 33, 7],
    )
    assert torch.equal(tokens(logits, draw), sample_reference(logits, draw))


def test_thresholds_leave_what_the_reference_leaves(device: torch.device) -> None:
    logits = (torch.randn(5, 200, device=device) * 3).half()
    draw = a_draw(
        5,
        device,
        temperature=[0.0, 0.7, 1.3, 1.0, 2.0],
        top_k=[5, 50, 0, 1, 600],
        top_p=[0.5, 0.9, 0.5, 1.0, 0.0],
        min_p=[0.5, 0.0, 0.05, 0.0, 0.0],
    )
    expected = logits.float() >= threshold_reference(logits, draw)[:, None]
    assert torch.equal(logits.float() >= threshold(logits, draw)[:, None], expected)
    assert expected.sum(dim=1).tolist()[::4] == [200, 1]


def test_only_what_is_left_is_drawn(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 2.5, 0.0]], device=device).expand(8, 3)
    position = list(range(8))
    drawn = tokens(logits, a_draw(8, device, min_p=[0.5] * 8, position=position))
    free = tokens(logits, a_draw(8, device, position=position, truncated=False))
    assert set(drawn.tolist()) == {0, 1}
    assert 2 in free.tolist()
    assert tokens(logits[:1], a_draw(1, device, top_k=[1])).tolist() == [1]


def test_ties_are_all_kept_and_the_lowest_token_wins(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0]], device=device)
    for draw, kept in (
        (a_draw(1, device, top_k=[1]), [1, 2]),
        (a_draw(1, device, top_p=[0.3]), [1, 2]),
        (a_draw(1, device, top_k=[4]), [0, 1, 2, 3, 4]),
        (a_draw(1, device), [0, 1, 2, 3, 4]),
    ):
        for least in (threshold(logits, draw), threshold_reference(logits, draw)):
            assert (logits[0] >= least[0]).nonzero()[:, 0].tolist() == kept
    assert tokens(logits, a_draw(1, device, temperature=[0.0])).tolist() == [1]


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits = torch.randn(3, 300, device=device) / 100
    together = tokens(logits, a_draw(3, device, seed=[5, 6, 7], position=[9, 9, 9], truncated=False))
    alone = tokens(logits[1:2], a_draw(1, device, seed=[6], position=[9], truncated=False))
    assert together[1] == alone[0]
    repeated = tokens(logits[[1] * 3], a_draw(3, device, seed=[6, 6, 7], position=[9, 10, 9], truncated=False))
    assert repeated[0] == alone[0]
    assert len(set(repeated.tolist())) == 3


def test_draws_are_spread_as_the_softmax_is(device: torch.device) -> None:
    share = torch.tensor([0.5, 0.3, 0.15, 0.05], device=device)
    rows = 20_000
    draw = a_draw(rows, device, top_k=[0] * rows, position=list(range(rows)), truncated=False)
    drawn = (share.log() + gumbel_reference(draw.seed, draw.position, 4)).argmax(dim=1)
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / rows, share, atol=0.012, rtol=0)


def test_noise_has_the_moments_of_gumbels_distribution(device: torch.device) -> None:
    noise = gumbel_reference(torch.arange(40, device=device), torch.arange(40, device=device), 5000)
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    assert torch.isfinite(noise).all()


def test_other_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="not rows"):
        sample(torch.ones(3, device=device), a_draw(3, device))
    with pytest.raises(ValueError, match=r"temperature is \[2\], not \[3\]"):
        sample(torch.ones(3, 4, device=device), a_draw(2, device))
