"""Shadow: a second SLA file decides the same request, without effect; differences are reported."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from policies.compose import Policy, are_equal
from policies.errors import ExpectedError
from policies.nouns import ClusterView, Decision, Request, Tenant
from policies.rules import Facts, Rulebook, Ruling, classify


class Shadowing(Rulebook, Protocol):
    """The part of a Config that `differences` needs."""

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """All tenants by name."""
        ...

    @property
    def policies(self) -> Mapping[str, Policy]:
        """All policies by name."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference of the shadow's decision: `tenant`, `refused`, `class`, `pools`, `policy` or `backend`."""

    what: str
    decided: str
    shadow: str


def differences(
    request: Request, facts: Facts, ruling: Ruling, decision: Decision, *, view: ClusterView, shadow: Shadowing
) -> tuple[Difference, ...]:
    """The differences between `shadow` and `ruling` with `decision`, for `request` on the same `view`.

    Backends with equal scores in the shadow count as the same. A tenant that it does not have, and a request
    that it refuses, end the comparison.
    """
    tenant = shadow.tenants.get(facts.tenant.name)
    if tenant is None:
        return (Difference("tenant", facts.tenant.name, "none"),)
    try:
        theirs = classify(replace(facts, tenant=tenant), shadow)
    except ExpectedError as refusal:
        return (Difference("refused", ruling.service_class.name, refusal.code),)
    asked = _under(request, ruling, theirs)
    return (*_ruled(ruling, theirs), *_placed(asked, decision, shadow.policies[theirs.policy], view))


def _ruled(ours: Ruling, theirs: Ruling) -> Iterator[Difference]:
    pairs = (
        ("class", ours.service_class.name, theirs.service_class.name),
        ("pools", _listed(ours.pools), _listed(theirs.pools)),
        ("policy", ours.policy, theirs.policy),
    )
    return (Difference(what, mine, other) for what, mine, other in pairs if mine != other)


def _placed(request: Request, decision: Decision, policy: Policy, view: ClusterView) -> Iterator[Difference]:
    # a random choice among equals is no difference, so the random draw need not be the same
    theirs = policy.decide(request, view, random.Random(0))
    totals = dict(theirs.scores)
    # what waits for a backend will most likely go there
    mine, other = decision.chosen or decision.awaits, theirs.chosen or theirs.awaits
    if mine == other:
        return
    if mine in totals and other and are_equal(totals[mine], totals[other]):
        return
    yield Difference("backend", mine or "none", other or "none")


def _under(request: Request, ours: Ruling, ruling: Ruling) -> Request:
    given = ruling.service_class
    return replace(
        request,
        service_class=given.name,
        rank=ruling.rank,
        # of the same pools it has the same share
        pools=request.pools if ours.pools == ruling.pools else ruling.pools,
        policy=ruling.policy,
        preemptible=given.preemptible,
        prefill_slice_tokens=given.prefill_slice_tokens,
    )


def _listed(pools: tuple[str, ...] | None) -> str:
    return "any" if pools is None else ", ".join(pools)
