from collections.abc import Callable

import pytest
import torch

from shards.kernels.norm import rms_norm, rms_norm_reference

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_rows_are_normalised(device: torch.device, dtype: torch.dtype, close: Close, width: int, adds: bool) -> None:
    # rows that lie apart, as slices of a wider tensor do
    hidden = torch.randn(3, 2 * width, device=device).to(dtype)[:, :width]
    weight = torch.rand(width, device=device).to(dtype)
    residual = torch.randn(3, width, device=device).to(dtype) if adds else None
    expected, expected_stream = rms_norm_reference(hidden, weight, epsilon=1e-6, residual=residual)
    actual, stream = rms_norm(hidden, weight, epsilon=1e-6, residual=residual)
    close(actual, expected)
    close(stream, expected_stream)
    assert adds or stream is hidden


def test_the_reference_is_what_torch_computes(device: torch.device) -> None:
    hidden, weight = torch.randn(3, 40, device=device), torch.rand(40, device=device)
    actual, _ = rms_norm_reference(hidden, weight, epsilon=1e-6)
    torch.testing.assert_close(actual, torch.nn.functional.rms_norm(hidden, (40,), weight, eps=1e-6))


def test_other_shapes_are_refused(device: torch.device) -> None:
    hidden, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match="not rows"):
        rms_norm(hidden.mT, weight, epsilon=1e-6)
    with pytest.raises(ValueError, match=r"weight is \[7\], not \[8\]"):
        rms_norm(hidden, weight[:7], epsilon=1e-6)
    with pytest.raises(ValueError, match="laid out"):
        rms_norm(hidden, weight, epsilon=1e-6, residual=hidden.half())
