"""The catalogue: the filters, scores, picks and whole policies that the SLA file can name, and their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from policies import compose, predict, scores
from policies.compose import Filter, Pick, Policy, Score, WeightedScore
from policies.quantities import read_count, read_seconds, read_tokens

T = TypeVar("T")
V = TypeVar("V")

Reader = Callable[[str], Any]
"""Reads an option's value from the file's text. Raises ValueError with a sentence."""

WEIGHT = "weight"
"""Key of a score's weight in the file, beside the score's options."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part that the file can name. `make` builds it from the given options, each read by its reader.

    A ValueError of `make` is reported as a mistake in the file. Raises ValueError here if `make` does not take one of
    the options, or requires an argument that is no option.

    `allows_shortlist`: in a large fleet it chooses nearly as well on a shortlist: the backends that hold most of the
    prompt, the ones with least to do, and some at random. A policy with a part that does not is given all backends.
    """

    make: Callable[..., T]
    options: Mapping[str, Reader] = field(default_factory=dict)
    allows_shortlist: bool = False

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.make).parameters.values()
        taken = {each.name for each in parameters}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            for option in self.options.keys() - taken:
                raise ValueError(f"{self.summary} takes no argument '{option}', but this is one of its options")
        for argument in self.required - self.options.keys():
            raise ValueError(f"{self.summary} requires '{argument}', but this is none of its options")

    @property
    def required(self) -> frozenset[str]:
        """The options without a default."""
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(self.make).parameters.values()
        return frozenset(each.name for each in parameters if each.default is each.empty and each.kind not in variadic)

    @property
    def summary(self) -> str:
        """The first line of its docstring; without a docstring the name of `make`."""
        return (inspect.getdoc(self.make) or str(getattr(self.make, "__name__", "it"))).split("\n")[0]


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
        filters={
            "healthy": Part(compose.healthy, {"fresh": read_seconds}, allows_shortlist=True),
            "serves_model": Part(compose.serves_model, allows_shortlist=True),
            "fits_context": Part(compose.fits_context, allows_shortlist=True),
            "has_room": Part(compose.has_room, {"tokens": read_tokens}, allows_shortlist=True),
            "under_limit": Part(compose.under_limit, allows_shortlist=True),
        },
        scores={
            "expected_ttft": Part(scores.expected_ttft, allows_shortlist=True),
            "balance": Part(scores.balance, allows_shortlist=True),
            "cache_thrift": Part(scores.cache_thrift, allows_shortlist=True),
            predict.MARGINAL_COST: Part(predict.marginal_cost, allows_shortlist=True),
            "cache_overlap": Part(scores.cache_overlap, allows_shortlist=True),
            "turn": Part(scores.turn),
            "session": Part(scores.session),
        },
        picks={
            "best": Part(compose.best, allows_shortlist=True),
            "best_of": Part(compose.best_of, {"sample": read_count}),
        },
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
