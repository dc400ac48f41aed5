"""The least logits that may be drawn, against the reference, which sorts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shards.kernels.draw import Draw
from shards.kernels.launch import Gpu, Launch, gpu_of
from shards.kernels.threshold import threshold, threshold_reference

A = Callable[..., Draw]


def left(logits: torch.Tensor, least: torch.Tensor) -> list[list[int]]:
    return [(row >= at).nonzero()[:, 0].tolist() for row, at in zip(logits.float(), least, strict=True)]


def require_same(logits: torch.Tensor, draw: Draw) -> list[int]:
    """The numbers of tokens that are left in each row, which are those that the reference leaves."""
    found, expected = (left(logits, each(logits, draw)) for each in (threshold, threshold_reference))
    assert [len(row) for row in found] == [len(row) for row in expected]
    assert found == expected
    return [len(row) for row in expected]


def test_thresholds_leave_what_the_reference_leaves(device: torch.device, dtype: torch.dtype, a_draw: A) -> None:
    logits = (torch.randn(5, 200, device=device) * 3).to(dtype)
    draw = a_draw(
        5,
        temperature=[0.0, 0.7, 1.3, 1.0, 2.0],
        top_k=[5, 50, 0, 1, 600],
        top_p=[0.5, 0.9, 0.5, 1.0, 0.0],
        min_p=[0.5, 0.0, 0.05, 0.0, 0.0],
    )
    assert require_same(logits, draw)[::4] == [200, 1]


@pytest.mark.parametrize("seed", range(3))
def test_any_combination_leaves_what_the_reference_leaves(
    device: torch.device, dtype: torch.dtype, a_draw: A, seed: int
) -> None:
    rng, rows = random.Random(seed), 4
    torch.manual_seed(seed)
    # 4200 tokens are more than a tile of 4096; flat rows, usual ones and steep ones
    logits = torch.randn(rows, 4200) * torch.tensor([rng.choice([0.02, 1.0, 3.0, 20.0]) for _ in range(rows)])[:, None]
    logits += torch.tensor([rng.choice([0.0, 0.0, 30.0, -30.0]) for _ in range(rows)])[:, None]
    logits[torch.rand(rows, 4200) < rng.choice([0.0, 0.0, 0.01])] += 15
    given: dict[str, list[Any]] = {
        "temperature": [rng.choice([0.01, 0.3, 1.0, 1.0, 2.0, 100.0]) for _ in range(rows)],
        "top_k": [rng.choice([0, 0, 1, 20, 50, 700, 3000, 4199]) for _ in range(rows)],
        "top_p": [rng.choice([1.0, 0.9999, 0.95, 0.9, 0.5, 0.01]) for _ in range(rows)],
        "min_p": [rng.choice([0.0, 0.0, 0.05]) for _ in range(rows)],
    }
    require_same(logits.to(dtype).to(device), a_draw(rows, **given))


def test_ties_are_all_kept(device: torch.device, a_draw: A) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0]], device=device)
    for draw, kept in (
        (a_draw(1, top_k=[1]), [1, 2]),
        (a_draw(1, top_p=[0.3]), [1, 2]),
        (a_draw(1, top_k=[4]), [0, 1, 2, 3, 4]),
        (a_draw(1, top_k=[4], top_p=[0.3]), [1, 2]),
        (a_draw(1), [0, 1, 2, 3, 4]),
    ):
        for least in (threshold(logits, draw), threshold_reference(logits, draw)):
            assert left(logits, least) == [kept]
    equal = torch.full((3, 300), -7.25, device=device)
    assert require_same(equal, a_draw(3, top_k=[5, 0, 5], top_p=[1.0, 0.2, 0.2])) == [300] * 3


def test_rows_with_more_near_the_threshold_than_is_gathered_are_read_whole(device: torch.device, a_draw: A) -> None:
    # one logit far away makes the interval wide: 81 times narrower it still has all others, and there is room for 256
    logits = torch.rand(6, 2500, device=device)
    logits[:, 77] = -1000.0
    logits[5, 78] = 1000.0
    top_k, top_p = [2000, 1000, 0, 0, 1500, 17], [1.0, 0.5, 0.9, 0.001, 0.3, 1.0]
    assert require_same(logits, a_draw(6, top_k=top_k, top_p=top_p))[0] == 2000
    require_same(logits[1:3].half(), a_draw(2, top_k=top_k[1:3], top_p=top_p[1:3]))


# the difference of the largest numbers
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_thresholds_are_found_far_from_zero_and_between_the_largest_numbers(device: torch.device, a_draw: A) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0] = logits[0] * 1e37
    logits[1, :2] = torch.tensor([3.3e38, -3.3e38])
    logits[2] = logits[2] * 1e-37
    logits[3] = 5000 + logits[3] / 100
    assert require_same(logits, a_draw(4, top_k=[7, 9, 11, 13])) == [7, 9, 11, 13]


def test_what_a_mask_forbids_is_never_left_and_counts_for_nothing(device: torch.device, a_draw: A) -> None:
    logits = torch.randn(4, 4200, device=device) * 2
    masked = torch.rand(4, 4200, device=device) < 0.9
    masked[0] = torch.arange(4200) >= 3
    masked[1] = torch.arange(4200) < 4097
    logits = logits.masked_fill(masked, -torch.inf)
    draw = a_draw(4, top_k=[20, 20, 0, 40], top_p=[1.0, 0.9, 0.9, 0.9])
    found, expected = threshold(logits, draw)[:, None], threshold_reference(logits, draw)[:, None]
    assert torch.equal(~masked & (logits >= found), ~masked & (logits >= expected))
    none = threshold(torch.full((3, 300), -torch.inf, device=device), a_draw(3, top_k=[5, 0, 5], top_p=[1.0, 0.5, 0.5]))
    assert none.shape == (3,), "rows without any token end too"


def test_neither_neighbours_nor_the_number_of_programs_change_a_bit(device: torch.device, a_draw: A) -> None:
    # three tiles, in one program for each row and in three
    logits, gpu = torch.randn(3, 8300, device=device), gpu_of(device)
    how = {"temperature": [0.8, 1.0, 1.2], "top_p": [0.9, 0.8, 0.95], "top_k": [0, 100, 0]}
    few, many = (threshold(logits, a_draw(3, **how), gpu=replace(gpu, processors=count)) for count in (1, 1000))
    assert torch.equal(few, many)
    for row in (0, 1):
        alone = threshold(logits[row : row + 1], a_draw(1, **{name: [values[row]] for name, values in how.items()}))
        assert alone[0] == few[row]


def test_rows_without_truncation_are_not_read_and_steps_without_it_start_nothing(
    device: torch.device, a_draw: A
) -> None:
    from shards.kernels.sampling import sample

    logits = torch.full((3, 300), torch.nan, device=device)
    draw = a_draw(3, temperature=[0.0, 1.0, 0.0], top_k=[4, 0, 0], top_p=[0.5, 1.0, 1.0], min_p=[0.1, 0.0, 0.0])
    assert threshold(logits, draw).tolist() == [-torch.inf] * 3
    started: list[str] = []

    class Noting(Gpu):
        def start(self, launch: Launch) -> None:
            started.append(launch.kernel.fn.__name__)
            Gpu.start(self, launch)

    gpu = gpu_of(device)
    noting = Noting(gpu.chip, gpu.processors)
    sample(logits, replace(draw, truncated=False), gpu=noting)
    without = list(started)
    started.clear()
    sample(logits, draw, gpu=noting)
    assert started == ["_survey", "_measure", "_measure", "_gather", "_settle", *without]


def test_vocabularies_that_float32_cannot_count_are_refused(device: torch.device, a_draw: A) -> None:
    with pytest.raises(ValueError, match="float32 cannot count 16777216 tokens"):
        threshold(torch.empty(1, 2**24, device="meta"), a_draw(1, top_k=[3]), gpu=gpu_of(device))
