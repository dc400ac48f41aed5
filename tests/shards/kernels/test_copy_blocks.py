import pytest
import torch

from shards.kernels.copy_blocks import copy_blocks, copy_blocks_reference


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_blocks_move_bit_for_bit_into_another_cache(device: torch.device, stored: torch.dtype) -> None:
    source = torch.randint(0, 256, (6, 2, 3, 52), dtype=torch.uint8, device=device).view(stored)
    pairs = torch.tensor([[5, 0], [1, 3], [1, 2]], device=device)
    expected, actual = (torch.zeros(4, *source.shape[1:], device=device).to(stored) for _ in range(2))
    copy_blocks_reference(source, expected, pairs)
    copy_blocks(source, actual, pairs)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_blocks_move_within_a_cache(device: torch.device) -> None:
    # 5000 words are more than one program copies
    cache = torch.randn(4, 5000, device=device)
    before = cache.clone()
    copy_blocks(cache, cache, torch.tensor([[0, 3], [2, 1]], dtype=torch.int32, device=device))
    assert torch.equal(cache, before[[0, 2, 2, 0]])


def test_no_pairs_are_nothing_to_do(device: torch.device) -> None:
    cache = torch.ones(2, 4, device=device)
    copy_blocks(cache, cache, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert torch.equal(cache, torch.ones(2, 4, device=device))


def test_blocks_of_other_shapes_are_refused(device: torch.device) -> None:
    pairs = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        copy_blocks(torch.ones(2, 4, device=device), torch.ones(2, 5, device=device), pairs)
    with pytest.raises(ValueError, match="do not fit"):
        copy_blocks(torch.ones(2, 4, device=device), torch.ones(2, 4, device=device).half(), pairs)
    with pytest.raises(ValueError, match="not contiguous"):
        copy_blocks(torch.ones(2, 2, 2, device=device).mT, torch.ones(2, 2, 2, device=device), pairs)
    with pytest.raises(ValueError, match="pairs"):
        copy_blocks(torch.ones(2, 4, device=device), torch.ones(2, 4, device=device), pairs[0])
