from __future__ import annotations

import pytest
import torch

from shards.quant.mxfp4 import GROUP, dequantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, GROUP // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    # transformers returns [experts, in, out]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantise(blocks, scales, dtype), expected)


def test_the_low_bits_come_first() -> None:
    blocks = torch.tensor([[[[0x21] + [0] * 15]]], dtype=torch.uint8)
    numbers = dequantise(blocks, torch.tensor([[[128]]], dtype=torch.uint8), torch.float32)
    assert numbers[0, 0, :3].tolist() == [1.0, 2.0, 0.0]
