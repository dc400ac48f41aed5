"""Mixtures of experts: a router chooses a few of many MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shards.network.config import Experts
from shards.network.layers import Mlp


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """Chooses the experts of each token. Its `weight` [experts, hidden] and `bias` are float32, as are its results.

    `correction` [experts] is added to the scores for the choice, and not to the weights.
    """

    experts: Experts
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, both [tokens, chosen]."""
        experts = self.experts
        scores = functional.linear(hidden.float(), self.weight, self.bias)
        if experts.scoring == "sigmoid":
            scores = scores.sigmoid()
        elif experts.scoring == "softmax":
            scores = scores.softmax(-1)
        eligible = scores if self.correction is None else scores + self.correction
        chosen = self._of_best_groups(eligible).topk(experts.chosen, -1).indices
        weights = scores.gather(-1, chosen)
        if experts.scoring == "softmax_chosen":
            weights = weights.softmax(-1)
        elif experts.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * experts.scale, chosen

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """The scores, and -inf for experts outside the best groups. A group is as good as its best expert, or as its
        best two together where a correction balances them.
        """
        experts = self.experts
        if experts.groups == experts.chosen_groups:
            return scores
        grouped = scores.view(len(scores), experts.groups, -1)
        worth = grouped.topk(2 if experts.has_correction else 1, -1).values.sum(-1)
        best = worth.topk(experts.chosen_groups, -1).indices
        outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The weighted sum of the chosen experts, plus the `shared` one that computes all tokens.

    `experts` are those of number `first` on; what other experts would add, other processes add.
    """

    router: ExpertRouter
    experts: tuple[Mlp, ...]
    shared: Mlp | None = None
    first: int = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape. Each expert computes all of its tokens at once; sums are float32."""
        weights, chosen = self.router(hidden)
        order = chosen.flatten().argsort(stable=True)
        rows, shares = order // chosen.shape[1], weights.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.experts.count).tolist()
        out = torch.zeros(hidden.shape) if self.shared is None else self.shared(hidden).float()
        start, stop = sum(counts[: self.first]), self.first + len(self.experts)
        for expert, count in zip(self.experts, counts[self.first : stop], strict=True):
            if count:
                own = rows.narrow(0, start, count)
                out.index_add_(0, own, expert(hidden[own]) * shares.narrow(0, start, count))
                start += count
        return out.to(hidden.dtype)
