"""The catalogue: the filters, scores, picks and whole policies that the SLA file can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from policies import compose, predict, scores
from policies.compose import Filter, Pick, Policy, Score, WeightedScore
from policies.part import Part

V = TypeVar("V")

WEIGHT = "weight"
"""Key of a score's weight in the file, beside the score's options."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All parts by name, and the names of all kinds of backends, where they are known. A score has no option `weight`.

    It is passed as a value, so a program can extend it.

    Other distributions can extend it too: an entry point of the group `pointsman.policies` is a callable that takes a
    Catalogue and returns an extended one, for instance `catalogue.with_parts(scores={"mine": Part(my_score)})`.
    """

    filters: Mapping[str, Part[Filter]]
    scores: Mapping[str, Part[Score]]
    picks: Mapping[str, Part[Pick]]
    policies: Mapping[str, Policy]
    kinds: tuple[str, ...] | None = None
    """None: a file may name any; the router gives those that it can make."""

    def __post_init__(self) -> None:
        for name, part in self.scores.items():
            if isinstance(part, Part) and WEIGHT in part.options:
                raise ValueError(f"the score '{name}' has an option '{WEIGHT}': in the file this is its weight")

    def with_parts(
        self,
        *,
        filters: Mapping[str, Part[Filter]] | None = None,
        scores: Mapping[str, Part[Score]] | None = None,
        picks: Mapping[str, Part[Pick]] | None = None,
        policies: Mapping[str, Policy] | None = None,
    ) -> Catalogue:
        """This catalogue with these parts added. Raises ValueError for a name that is taken."""
        return replace(
            self,
            filters=_joined(self.filters, filters or {}),
            scores=_joined(self.scores, scores or {}),
            picks=_joined(self.picks, picks or {}),
            policies=_joined(self.policies, policies or {}),
        )


def builtin_catalogue() -> Catalogue:
    """The parts that come with Pointsman."""
    return Catalogue(
        filters=compose.FILTERS,
        scores=scores.SCORES,
        picks=compose.PICKS,
        policies=_named_policies(),
    )


def _joined(known: Mapping[str, V], more: Mapping[str, V]) -> dict[str, V]:
    if taken := known.keys() & more.keys():
        raise ValueError(f"'{min(taken)}' is defined already")
    return {**known, **more}


def _named_policies() -> dict[str, Policy]:
    balance = WeightedScore("balance", 1.0, scores.balance())
    cost = WeightedScore(predict.MARGINAL_COST, 1.0, predict.marginal_cost())
    policies = (
        Policy("default", usual_filters(), (cost,), compose.best(), allows_shortlist=True, waits_for_best=True),
        _policy("round_robin", (WeightedScore("turn", 1.0, scores.turn()),)),
        _policy("least_load", (balance,), allows_shortlist=True),
        _policy("power_of_two", (balance,), compose.best_of(sample=2)),
        _policy("session_hash", (WeightedScore("session", 1.0, scores.session()),)),
    )
    return {policy.name: policy for policy in policies}


def _policy(
    name: str, weighted: tuple[WeightedScore, ...], pick: Pick | None = None, *, allows_shortlist: bool = False
) -> Policy:
    return Policy(name, usual_filters(), weighted, pick or compose.best(), allows_shortlist)


def usual_filters() -> tuple[tuple[str, Filter], ...]:
    """The filters of every named policy, and of a policy in the file that names none.

    The last two make requests wait in the router while a backend has no room, so that a better rank can overtake.
    """
    return (
        ("healthy", compose.healthy()),
        ("serves_model", compose.serves_model()),
        ("fits_context", compose.fits_context()),
        ("under_limit", compose.under_limit()),
        ("has_room", compose.has_room()),
    )
