from collections.abc import Callable

import pytest
import torch

from shards.kernels.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize("inner", [24, 1100])
def test_the_gate_opens_for_the_rest(
    device: torch.device, dtype: torch.dtype, close: Callable[[torch.Tensor, torch.Tensor], None], inner: int
) -> None:
    gate_up = torch.randn(3, 2 * inner + 5, device=device).to(dtype)[:, : 2 * inner]
    close(silu_mul(gate_up), silu_mul_reference(gate_up))


def test_other_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="inner"):
        silu_mul(torch.ones(3, 7, device=device))
    with pytest.raises(ValueError, match="one piece"):
        silu_mul(torch.ones(8, 4, device=device).mT)
