from collections.abc import Callable

import pytest
import torch

from shards.kernels.gate import gate, gate_reference
from shards.network.mlp import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inner", [24, 1100])
def test_the_gate_opens_for_the_rest(
    device: torch.device,
    dtype: torch.dtype,
    close: Callable[[torch.Tensor, torch.Tensor], None],
    inner: int,
    activation: str,
) -> None:
    # wide enough that some numbers are clamped
    gate_up = (4 * torch.randn(3, 2 * inner + 5, device=device)).to(dtype)[:, : 2 * inner]
    close(gate(gate_up, activation), gate_reference(gate_up, activation))


def test_other_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="inner"):
        gate(torch.ones(3, 7, device=device))
    with pytest.raises(ValueError, match="one piece"):
        gate(torch.ones(8, 4, device=device).mT)
    with pytest.raises(ValueError, match="activation is relu"):
        gate(torch.ones(3, 8, device=device), "relu")
