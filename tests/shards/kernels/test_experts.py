from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shards.kernels.experts import SortedRows, multiply_by_expert, multiply_by_expert_reference
from tests.shards.quantised_matrices import KINDS, a_matrix

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "inputs", "outputs"), [(1, 4, 24, 40), (7, 5, 80, 20), (40, 2, 17, 70)])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    tokens: int,
    experts: int,
    inputs: int,
    outputs: int,
    has_extras: bool,
) -> None:
    torch.manual_seed(tokens)
    # the last expert has no rows
    chosen = torch.randint(0, experts - 1, (tokens, 2), device=device)
    pairs = SortedRows.of(chosen, experts)
    rows = torch.randn(tokens, inputs + 3, device=device).to(dtype)[:, :inputs]
    matrices = torch.randn(experts, outputs, inputs, device=device).to(dtype)
    more: dict[str, torch.Tensor | None] = {"bounds": pairs.bounds, "sources": pairs.tokens}
    if has_extras:
        more["targets"] = pairs.places
        more["bias"] = torch.randn(experts, outputs, device=device).to(dtype)
        more["shares"] = torch.rand(2 * tokens, device=device)
    expected = multiply_by_expert_reference(rows, matrices, experts=experts, **more)  # type: ignore[arg-type]
    result = multiply_by_expert(rows, matrices, experts=experts, pairs=2 * tokens, **more)  # type: ignore[arg-type]
    close(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_fewer_bits_are_multiplied_alike(
    device: torch.device, dtype: torch.dtype, close: Close, kind: str
) -> None:
    experts, outputs, inputs, tokens = 4, 40, 64, 20
    matrices = a_matrix(kind, experts * outputs, inputs, device)
    pairs = SortedRows.of(torch.randint(0, experts, (tokens, 2), device=device), experts)
    rows = torch.randn(tokens, inputs, device=device).to(dtype)
    more: dict[str, torch.Tensor | None] = {"bounds": pairs.bounds, "sources": pairs.tokens, "targets": pairs.places}
    expected = multiply_by_expert_reference(rows, matrices, experts=experts, **more)  # type: ignore[arg-type]
    result = multiply_by_expert(rows, matrices, experts=experts, pairs=2 * tokens, **more)  # type: ignore[arg-type]
    close(result, expected)


def test_pairs_are_sorted_by_expert_and_know_their_tokens(device: torch.device) -> None:
    pairs = SortedRows.of(torch.tensor([[2, 0], [0, 3], [2, 3]], device=device), 5)
    assert pairs.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert pairs.places.tolist() == [1, 2, 0, 4, 3, 5]
    assert pairs.bounds.tolist() == [0, 2, 2, 4, 6, 6]


def test_other_shapes_are_refused(device: torch.device) -> None:
    rows, matrices = torch.ones(4, 16, device=device), torch.ones(3, 8, 16, device=device)
    bounds = torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"bounds is \[4\], not \[5\]"):
        multiply_by_expert(rows, torch.ones(4, 8, 16, device=device), experts=4, pairs=4, bounds=bounds)
    with pytest.raises(ValueError, match="4 rows are not those of 5 pairs"):
        multiply_by_expert(rows, matrices, experts=3, pairs=5, bounds=bounds)
    with pytest.raises(ValueError, match=r"bias is \[2, 8\]"):
        multiply_by_expert(rows, matrices, experts=3, pairs=4, bounds=bounds, bias=torch.ones(2, 8, device=device))
    with pytest.raises(ValueError, match=r"rows are torch\.float16"):
        multiply_by_expert(rows.half(), matrices, experts=3, pairs=4, bounds=bounds)
    with pytest.raises(ValueError, match="3 matrices for 2 experts"):
        multiply_by_expert(rows, matrices, experts=2, pairs=4, bounds=bounds)
    quantised = a_matrix("int8", 24, 16, device)
    with pytest.raises(ValueError, match="24 rows are not those of 5 experts"):
        multiply_by_expert(rows, quantised, experts=5, pairs=4, bounds=bounds)
    ordered = replace(quantised, order=torch.arange(16, device=device))
    with pytest.raises(ValueError, match="reordered columns"):
        multiply_by_expert(rows, ordered, experts=3, pairs=4, bounds=bounds)
