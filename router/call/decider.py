"""The decision for a request: a view of backends, all of them or a shortlist, and the policy's choice among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from policies.bursts import held_back
from policies.compose import Policy
from policies.fetch import with_fetch, with_offers
from policies.learning.adapters import Readiness
from policies.nouns import ClusterView, Decision, Request
from policies.predict import will_fit_context
from policies.prefill import with_prefill
from policies.sla.config import Config
from policies.waiting import ABSENT
from router.call.bid import USUAL, Look
from router.fleet.cluster.cluster import Cluster
from router.fleet.pools import PoolsInForce

_SERVED_AT_ONCE = (None, Readiness.READY)
"""Readiness of a backend that loads no LoRA adapter for the request."""


@dataclass(slots=True)
class Decider:
    """Decides on what is known of the backends of `cluster` at that moment. The pools of `fleet` explain refusals.

    `shadow` is a second file that decides beside it without effect, where there is one.
    """

    cluster: Cluster
    fleet: PoolsInForce
    clock: Callable[[], float]
    rng: random.Random
    shadow: Config | None = None

    def decide(
        self,
        request: Request,
        policy: Policy,
        held: Mapping[str, int],
        *,
        avoiding: Collection[str] = (),
        look: Look = USUAL,
        waited_s: float = 0.0,
        seen: Callable[[ClusterView], ClusterView] | None = None,
    ) -> tuple[ClusterView, Decision]:
        """The decision of `policy` for `request`, and the view of the backends that it was made on, changed by `seen`.

        In a large fleet a shortlist is scored, unless `look` asks for all or the policy needs all backends. All
        backends are scored as well

        - if no backend of the shortlist can take the request, so that a refusal has the reasons of all;
        - if the chosen one first has to load the request's LoRA adapter, which another may have ready;
        - if the prompt's length is estimated and may exceed the shortest context: then a backend that surely fits it
          rules out others that may not;
        - beside a shadow file, which chooses among the same backends.

        `held` has the tokens of the prompt that backends are believed to hold; backends in `avoiding` may not have it.
        It has waited for `waited_s`.
        """
        cluster, now = self.cluster, self.clock()
        may_fetch, is_divided = request.may_fetch and bool(cluster.lenders), cluster.divides
        underway = cluster.computing.of(request, now) if cluster.computing.flights else ()

        names: Sequence[str] | None = None
        if cluster.is_large and policy.allows_shortlist and not look.all_backends and self.shadow is None:
            with_full = policy.waits_for_best and not look.takes_any
            names = cluster.shortlist(request, held, avoiding, with_full=with_full)
            if names is not None and not self._fits_all(request):
                names = None
        while True:
            view = cluster.view(now, held, request.rank, request.prompt_tokens, request.model, names)
            if seen is not None:
                view = seen(view)
            if look.awaited:
                backends = (
                    replace(each, awaited=look.awaited[each.name]) if each.name in look.awaited else each
                    for each in view.backends
                )
                view = replace(view, backends=tuple(backends))
            if may_fetch:
                view = with_offers(request, view)
            decision = policy.decide(request, view, self.rng, avoiding=avoiding, takes_any=look.takes_any)
            if may_fetch:
                decision = with_fetch(request, view, decision)
            if is_divided:
                decision = with_prefill(request, view, decision, avoiding)
            if underway:
                decision = held_back(request, view, decision, underway, waited_s=waited_s)
            if names is None or _is_served_at_once(view, decision):
                break
            names = None
        if names is None and decision.chosen is None and decision.awaits is None:
            # that of a new file may join in a moment
            absent = self.fleet.absent(request.pools, {backend.pool for backend in view.backends})
            dropped = (*decision.dropped, *((f"pool {pool}", ABSENT) for pool in absent))
            decision = replace(decision, dropped=dropped) if absent else decision
        return view, decision

    def _fits_all(self, request: Request) -> bool:
        """Is the prompt's length known, or is the context of each backend of its model surely long enough?"""
        if request.least_prompt_tokens is None:
            return True
        model = self.cluster.model(request.model)
        return model is not None and will_fit_context(request, model.shortest_context_tokens)


def _is_served_at_once(view: ClusterView, decision: Decision) -> bool:
    """Does `decision` name a backend of `view`, and has that the LoRA adapter of the request ready?"""
    named = decision.chosen or decision.awaits
    chosen = next((backend for backend in view.backends if backend.name == named), None)
    return chosen is not None and chosen.adapter in _SERVED_AT_ONCE
