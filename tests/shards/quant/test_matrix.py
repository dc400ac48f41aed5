"""The form that all quantised matrices are read into."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shards.network.layers import DenseLinear
from shards.quant.int4 import Int4Linear
from shards.quant.int8 import Int8Linear
from shards.quant.linear import QuantisedLinear, RoundedLinear, cpu_linear, int8_linear, stored_linear
from shards.quant.matrix import QuantisedMatrix, ordered_by_group, pack_four_bits, stacked, unpack_four_bits


def four_bits(outputs: int = 32, inputs: int = 64, *, group: int = 32, has_zeros: bool = True) -> QuantisedMatrix:
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // group)
    zeros = torch.randint(0, 17, (outputs, groups), dtype=torch.int16) if has_zeros else None
    return QuantisedMatrix(pack_four_bits(numbers), torch.rand(outputs, groups) + 0.5, group, zeros)


def eight_bits(outputs: int = 16, inputs: int = 24) -> QuantisedMatrix:
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return QuantisedMatrix(numbers, torch.rand(outputs, 1) + 0.5, inputs)


def fp8(outputs: int = 16, inputs: int = 24) -> QuantisedMatrix:
    return replace(eight_bits(outputs, inputs), numbers=torch.randn(outputs, inputs).to(torch.float8_e4m3fn))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_number_less_its_zero_times_its_scale_is_the_weight() -> None:
    matrix = QuantisedMatrix(
        torch.tensor([[0x21, 0x43]], dtype=torch.uint8),
        torch.tensor([[2.0, 10.0]]),
        group=2,
        zeros=torch.tensor([[0, 16]], dtype=torch.int16),
    )
    assert matrix.shape == (1, 4)
    assert matrix.dequantised(torch.float32).tolist() == [[2.0, 4.0, -130.0, -120.0]]
    assert replace(matrix, zeros=None).dequantised(torch.float32).tolist() == [[-14.0, -12.0, -50.0, -40.0]]


def test_packing_is_undone_by_unpacking() -> None:
    numbers = torch.randint(0, 16, (5, 12), dtype=torch.uint8)
    assert torch.equal(unpack_four_bits(pack_four_bits(numbers)), numbers)


@pytest.mark.parametrize("make", [four_bits, eight_bits, fp8])
def test_rows_and_columns_of_a_matrix_are_those_of_the_dense_one(make: type) -> None:
    matrix: QuantisedMatrix = make(64, 64)
    dense = matrix.dequantised(torch.float32)
    chosen = torch.tensor([5, 0, 33])
    assert torch.equal(matrix.rows(chosen).dequantised(torch.float32), dense[chosen])
    assert torch.equal(matrix.rows(slice(16, 48)).dequantised(torch.float32), dense[16:48])
    assert torch.equal(matrix.columns(32, 64).dequantised(torch.float32), dense[:, 32:])


@pytest.mark.parametrize("inputs", [96, 100])
@pytest.mark.parametrize("bounds", [(0, 48), (48, 100), (20, 68), (34, 36), (0, 100)])
def test_groups_that_are_cut_become_smaller_ones(bounds: tuple[int, int], inputs: int) -> None:
    start, stop = bounds[0], min(bounds[1], inputs)
    matrix = four_bits(8, inputs)
    own = matrix.columns(start, stop)
    assert torch.equal(own.dequantised(torch.float32), matrix.dequantised(torch.float32)[:, start:stop])
    assert own.shape == (8, stop - start)
    assert not matrix.group % own.group


def test_columns_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole bytes"):
        four_bits(group=64).columns(3, 64)
    ordered = replace(four_bits(), order=torch.randperm(64))
    with pytest.raises(ValueError, match="desc_act"):
        ordered.columns(0, 32)


def test_a_stack_of_like_matrices_stays_quantised_and_another_one_does_not() -> None:
    first, second = four_bits(), four_bits(16, has_zeros=False)
    expected = torch.cat([part.dequantised(torch.float32) for part in (first, second)])
    both = stacked([first, second], torch.float32)
    assert isinstance(both, QuantisedMatrix)
    assert torch.equal(both.dequantised(torch.float32), expected)
    plain = torch.randn(8, 64)
    for other in (plain, four_bits(group=64), replace(second, order=torch.randperm(64)), eight_bits(16, 64)):
        assert isinstance(stacked([first, other], torch.float32), Tensor)


def test_columns_of_a_group_are_put_beside_each_other() -> None:
    numbers = torch.arange(8, dtype=torch.uint8).view(1, 8)
    moved, order = ordered_by_group(numbers, torch.tensor([1, 0, 1, 0, 0, 1, 0, 1]), 4)
    assert moved.tolist() == [[1, 3, 4, 6, 0, 2, 5, 7]]
    assert order is not None
    assert order.tolist() == [1, 3, 4, 6, 0, 2, 5, 7]
    assert ordered_by_group(numbers, torch.arange(8) // 4, 4)[1] is None
    with pytest.raises(ValueError, match="not in groups of 4"):
        ordered_by_group(numbers, torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), 4)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 256, 512])
@pytest.mark.parametrize("has_order", [False, True])
def test_torchs_product_of_four_bits_is_near_the_dequantised_one(has_zeros: bool, group: int, has_order: bool) -> None:
    matrix = four_bits(48, 512, group=group, has_zeros=has_zeros)
    matrix = replace(matrix, order=torch.randperm(512)) if has_order else matrix
    bias, hidden = torch.randn(48).bfloat16(), torch.randn(2, 3, 512).bfloat16()
    layer = cpu_linear([matrix], bias, torch.bfloat16)
    assert isinstance(layer, Int4Linear)
    expected = hidden.float() @ matrix.dequantised(torch.float32).mT + bias.float()
    result = layer(hidden)
    assert (result.dtype, result.shape) == (torch.bfloat16, (2, 3, 48))
    assert (result.float() - expected).norm() / expected.norm() < 0.01


def test_a_cpu_multiplies_each_kind_in_its_fastest_way() -> None:
    bfloat16 = torch.bfloat16
    rounded = cpu_linear([replace(eight_bits(), quantises_inputs=True)], None, bfloat16)
    assert isinstance(rounded, RoundedLinear)
    assert rounded(torch.randn(2, 24).bfloat16()).dtype == bfloat16
    for part in (fp8(), eight_bits(), torch.randn(3, 4), four_bits(33), four_bits(group=24, inputs=48)):
        assert isinstance(cpu_linear([part], None, bfloat16), DenseLinear)
    # torch has no fast product of four bits with float32
    assert isinstance(cpu_linear([four_bits()], None, torch.float32), DenseLinear)


def test_numbers_in_int8_are_not_rounded_again() -> None:
    matrix = eight_bits()
    layer = int8_linear([matrix, matrix], None, torch.float32)
    hidden = torch.randn(4, 24)
    assert isinstance(layer, Int8Linear)
    exact = Int8Linear(matrix.numbers, matrix.scales.flatten())(hidden)
    assert torch.equal(layer(hidden), torch.cat([exact, exact], 1))
    again = int8_linear(iter([fp8(), torch.randn(2, 24)]), None, torch.float32)
    assert again(hidden).shape == (4, 18)


def test_a_matrix_for_a_gpu_stays_as_it_is_stored() -> None:
    matrix, hidden = four_bits(), torch.randn(3, 64)
    layer = stored_linear([matrix], None, torch.float32)
    assert isinstance(layer, QuantisedLinear)
    assert layer.matrix is matrix
    assert torch.equal(layer(hidden), hidden @ matrix.dequantised(torch.float32).mT)
    assert isinstance(stored_linear([torch.randn(3, 4)], None, torch.float32), DenseLinear)
