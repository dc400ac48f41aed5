from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shards.kernels.launch import Gpu, gpu_of
from shards.kernels.quantised import columns_of, has_kernel, multiply_quantised, multiply_quantised_reference
from shards.kernels.targets import CHIPS
from tests.shards.quantised_matrices import KINDS, a_matrix

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 64), (70, 24, 96), (3, 130, 48)])
def test_rows_are_multiplied_by_the_dequantised_matrix(
    device: torch.device, dtype: torch.dtype, close: Close, kind: str, rows: int, outputs: int, inputs: int
) -> None:
    matrix = a_matrix(kind, outputs, inputs, device)
    # neighbours in memory that are not read
    hidden = torch.randn(rows, inputs + 5, device=device).to(dtype)[:, :inputs] / inputs**0.5
    bias = torch.randn(outputs, device=device).to(dtype) if rows > 1 else None
    close(multiply_quantised(hidden, matrix, bias), multiply_quantised_reference(hidden, matrix, bias))


def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    matrix = a_matrix("int4 with zeros", 48, 64, device)
    hidden = torch.randn(9, 64, device=device).to(dtype)
    together = multiply_quantised(hidden, matrix)
    for row in range(9):
        assert torch.equal(multiply_quantised(hidden[row : row + 1], matrix)[0], together[row])


def test_there_are_at_least_two_programs_for_each_processor_if_tiles_can_be_as_small() -> None:
    gpu = Gpu(CHIPS["sm_90"], processors=132)
    assert [columns_of(outputs, 1, gpu) for outputs in (53248, 28672, 14336, 4096, 1024)] == [128, 64, 32, 16, 16]
    assert [columns_of(4096, tiles, gpu) for tiles in (2, 8, 32)] == [16, 64, 128]


def test_what_the_kernel_cannot_read_is_refused(device: torch.device) -> None:
    rows, matrix = torch.ones(2, 64, device=device), a_matrix("int8", 8, 64, device)
    with pytest.raises(ValueError, match=r"rows is \[2, 64\], not \[2, 32\]"):
        multiply_quantised(rows, a_matrix("int8", 8, 32, device))
    with pytest.raises(ValueError, match=r"bias is \[3\], not \[8\]"):
        multiply_quantised(rows, matrix, torch.ones(3, device=device))
    with pytest.raises(ValueError, match="a row is not in one piece"):
        multiply_quantised(torch.ones(64, 2, device=device).t(), matrix)
    with pytest.raises(ValueError, match="the matrix is not in one piece"):
        multiply_quantised(rows, replace(matrix, numbers=torch.ones(64, 8, dtype=torch.int8, device=device).t()))
    with pytest.raises(ValueError, match=r"zeros is \[8, 2\]"):
        multiply_quantised(rows, replace(matrix, zeros=torch.ones(8, 2, dtype=torch.int16, device=device)))
    odd = replace(a_matrix("int4", 8, 64, device), group=24, scales=torch.ones(8, 3, device=device))
    assert not has_kernel(odd, device)
    with pytest.raises(ValueError, match="groups of 24 columns are no multiple of 16"):
        multiply_quantised(rows, odd)
    old = Gpu(CHIPS["sm_80"], gpu_of(device).processors)
    with pytest.raises(ValueError, match="sm_80 has no e4m3"):
        multiply_quantised(rows, a_matrix("fp8", 8, 64, device), gpu=old)
