from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shards.network.config import Experts
from shards.network.layers import DenseLinear
from shards.network.mlp import GatedMlp
from shards.network.moe import ExpertRouter, MixtureOfExperts

HIDDEN, COUNT = 12, 8


def some_experts(**changes: object) -> Experts:
    return Experts(count=COUNT, chosen=3, inner=6, layers=frozenset({0}), **changes)  # type: ignore[arg-type]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_mixture(experts: Experts, *, has_shared: bool = False) -> MixtureOfExperts:
    def mlp(seed: int) -> GatedMlp:
        return GatedMlp(DenseLinear(drawn(12, HIDDEN, seed=seed)), DenseLinear(drawn(HIDDEN, 6, seed=seed + 100)))

    correction = drawn(COUNT, seed=7) if experts.has_correction else None
    router = ExpertRouter(experts, drawn(COUNT, HIDDEN, seed=3), correction=correction)
    return MixtureOfExperts(router, tuple(mlp(seed) for seed in range(COUNT)), mlp(50) if has_shared else None)


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_tokens_grouped_by_expert_get_the_sum_that_each_gets_alone(tokens: int, has_shared: bool) -> None:
    mixture, hidden = a_mixture(some_experts(), has_shared=has_shared), drawn(tokens, HIDDEN, seed=9)
    weights, chosen = mixture.router(hidden)
    expected = torch.stack(
        [
            sum((share * mixture.experts[number](token[None])[0] for share, number in pairs), torch.zeros(HIDDEN))
            for token, pairs in (
                (token, list(zip(shares, numbers.tolist(), strict=True)))
                for token, shares, numbers in zip(hidden, weights, chosen, strict=True)
            )
        ]
    )
    if mixture.shared is not None:
        expected += mixture.shared(hidden)
    torch.testing.assert_close(mixture(hidden), expected, rtol=1e-5, atol=1e-4)


def test_the_result_has_the_type_of_its_input() -> None:
    class Wide:
        def __call__(self, hidden: Tensor) -> Tensor:
            return hidden.float()

    mixture = a_mixture(some_experts())
    wide = MixtureOfExperts(mixture.router, (Wide(),) * COUNT)
    assert wide(drawn(3, HIDDEN).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("scoring", ["softmax", "softmax_chosen", "sigmoid"])
def test_the_weights_of_a_token_add_up_to_the_scale(scoring: str) -> None:
    weights, chosen = a_mixture(some_experts(scoring=scoring, scale=2.5)).router(drawn(6, HIDDEN, seed=1))
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5))
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_experts_outside_the_best_groups_are_not_chosen() -> None:
    experts = some_experts(scoring="sigmoid", groups=4, chosen_groups=2, has_correction=True)
    router = a_mixture(experts).router
    _, chosen = router(drawn(50, HIDDEN, seed=1))
    assert all(len({number // 2 for number in row}) <= 2 for row in chosen.tolist())


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    experts = some_experts(scoring="sigmoid", is_normalised=False, has_correction=True)
    hidden, weight = drawn(4, HIDDEN, seed=1), drawn(COUNT, HIDDEN, seed=3)
    pushed = torch.zeros(COUNT)
    pushed[5] = 10.0
    weights, chosen = ExpertRouter(experts, weight, correction=pushed)(hidden)
    assert all(5 in row for row in chosen.tolist())
    expected = (hidden @ weight.T).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, expected)
