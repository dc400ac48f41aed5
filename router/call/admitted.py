"""What the prompts of an admitted call ask of the dispatcher."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import msgspec
from msgspec.structs import replace

from policies.errors import ExpectedError
from policies.explain import explain, without_secrets
from policies.nouns import ClusterView, Decision, Prompt, Request, Reuse
from policies.quota.prices import PriceList
from policies.rules import Facts, Ruling, classify
from policies.shadow import differences
from policies.sla.config import Config
from router.ask import Ask, Chat
from router.call.admission import Permit
from router.call.bid import Bid, Look
from router.call.caller import Caller
from router.call.carrier import Carrier
from router.call.disclosure import shown_name
from router.call.documents import EXACT
from router.call.gateway import Gateway
from router.call.lookup import LookedUp
from router.call.observer import Account
from router.call.prefill import may_transfer
from router.call.prepare import room, wishes
from router.call.refusal import refusal_of
from router.call.so_far import SoFar
from router.call.tracing import PromptTrace
from router.fleet.cluster.served_model import ServedModel
from router.text.tokenize import Tokens


class AdmittedCall(msgspec.Struct, frozen=True):
    """One admitted call, with all that its prompts share: requests to the dispatcher, listeners for decisions."""

    caller: Caller
    ask: Ask
    facts: Facts
    ruling: Ruling
    config: Config
    prices: PriceList
    gateway: Gateway
    permit: Permit
    account: Account
    carrier: Carrier
    failed: list[BaseException]
    """What any of its prompts failed with, which ends the others."""

    def bid(self, at: int, model: ServedModel, prompt: LookedUp, *, trace: PromptTrace | None) -> Bid:
        """What `prompt`, number `at`, asks of the dispatcher, as one for `model`."""
        ask, gateway, (tokens, keys, held, _) = self.ask, self.gateway, prompt
        reuse = self._reuse() if ask.document_spans else None
        request = self._request(at, model, tokens, is_exact=reuse is None)
        is_single, given = ask.sampling.choices == len(ask.inputs) == 1, ask.inputs[at]
        beliefs, native = iter([held]), ask.natives[at] if ask.natives else None
        untranslated = None if native is None else native.untranslated

        def decide(asked: Request, avoiding: Collection[str], look: Look) -> tuple[ClusterView, Decision]:
            began_at, latest = gateway.clock(), next(beliefs, None)
            if gateway.config is not self.config:
                asked = self._in_present_pools(asked)
            # a request that waited or comes back asks the index again
            latest = gateway.lookup.believed(tokens, keys) if latest is None else latest
            policy, seen = self.config.policies[asked.policy], None if self.carrier.way is None else self.carrier.seen
            waited_s = began_at - self.account.started_at
            view, decision = gateway.decider.decide(
                asked, policy, latest, avoiding=avoiding, look=look, waited_s=waited_s, seen=seen
            )
            if trace is not None:
                trace.decided(asked, view, decision, began_at=began_at)
            return view, decision

        def refusal(asked: Request, view: ClusterView, decision: Decision) -> ExpectedError:
            self.record(at, asked, view, decision)
            return refusal_of(asked, view, decision, gateway.cluster.trouble, untranslated=untranslated)

        return Bid(
            request,
            prompt=Prompt(
                tokens.token_ids,
                ask.bodies[at],
                ask.path,
                {**ask.passed_headers, **self.account.headers},
                native,
                reuse=reuse,
            ),
            echo=tokens.echo,
            tools=tokens.tools,
            thoughts=tokens.thoughts,
            # another backend may go on with it
            so_far=SoFar() if ask.stream and is_single and self.carrier.continues and untranslated is None else None,
            arrived_at=self.account.started_at,
            service_class=self.ruling.service_class,
            new_tokens=request.expected_new_tokens or request.max_new_tokens,
            decide=decide,
            refusal=refusal,
            # a shorter prompt than caches hold changes no belief
            sent=partial(gateway.beliefs.sent, prompt=keys) if keys.keys or keys.token_ids else None,
            ended=partial(gateway.lookup.learn, prompt, model.name),
            way=self.carrier.way,
            images=given.images if isinstance(given, Chat) else 0,
            avoiding=ask.avoiding,
        )

    def record(
        self, at: int, request: Request, view: ClusterView, decision: Decision, *, is_late: bool = False
    ) -> None:
        """Tell the log, the shadow and, if it asked, the client of a `decision` by which no backend gets the request.

        `is_late`: the backend that it names would begin later than promised.
        """
        picked = decision
        if is_late and decision.chosen is not None:
            dropped = (*decision.dropped, (decision.chosen, "late"))
            decision = replace(decision, chosen=None, dropped=dropped, predicted_ttft_s=None)
        self.gateway.observer.decided(request, decision, None, config_version=self.config.version)
        self._compare(at, request, view, decision, picked)

    def _compare(self, at: int, request: Request, view: ClusterView, decision: Decision, picked: Decision) -> None:
        """Tell the shadow what the policy `picked` and, if it asked, the client why the `decision` was made."""
        gateway, config = self.gateway, self.config
        shadow = gateway.decider.shadow
        if shadow is not None:
            found = differences(request, self.facts, self.ruling, picked, view=view, shadow=shadow)
            gateway.observer.shadowed(request, found)
        if self.ask.explain:
            why = explain(request, self.facts, self.ruling, config=config, view=view, decision=decision)
            self.caller.explain(at, without_secrets(why, shown_name))

    def _pools(self, model: ServedModel) -> tuple[str, ...] | None:
        """That of a split which is for this session, user or call, if it serves the model; else those of the rule."""
        rule = self.config.rules[self.ruling.rule - 1]
        key = f"{self.facts.tenant.name} {self.ask.session or self.ask.user or self.caller.id}"
        pool = self.gateway.splits.pool_of(rule, key)
        return (pool,) if self.gateway.cluster.serves(pool, model.name) else self.ruling.pools

    def _in_present_pools(self, asked: Request) -> Request:
        """`asked`; if the file has changed and has none of its pools any more, in those that the new file gives it."""
        present = self.gateway.config
        if asked.pools is None or not present.pools.keys().isdisjoint(asked.pools):
            return asked
        try:
            return replace(asked, pools=classify(self.facts, present).pools)
        except ExpectedError:
            # it may no longer ask so, and its own pools have the last word
            return asked

    def _reuse(self) -> Reuse | None:
        """Whether KV of documents may be approximate: as the client wants it, else the rule, else the tenant."""
        budgets = (self.ask.reuse_budget, self.ruling.reuse_budget, self.facts.tenant.reuse_budget)
        budget = next((budget for budget in budgets if budget is not None), EXACT)
        return Reuse(self.ask.document_spans, budget) if budget < EXACT else None

    def _request(self, at: int, model: ServedModel, tokens: Tokens, *, is_exact: bool) -> Request:
        """The Request of prompt number `at`; `is_exact`: none of its KV may be approximate."""
        ask, ruling, gateway, tenant = self.ask, self.ruling, self.gateway, self.facts.tenant.name
        needs, sampling = (ask.needs, ask.sampling) if tokens.calls is None else wishes(ask, tokens)
        is_single, service_class = len(ask.inputs) == 1, ruling.service_class
        is_first_model = model.name == self.account.model
        most_tokens = self.facts.max_new_tokens if is_single and is_first_model else room(ask, tokens, model)
        rule = self.config.rules[ruling.rule - 1]
        # other backends have exact KV of a prompt's beginning, and it is not known how much of what is held is that
        is_fit, native = self.carrier.continues and is_exact, ask.natives[at] if ask.natives else None
        return Request(
            id=self.caller.id if is_single else f"{self.caller.id}-{at}",
            tenant=tenant,
            model=model.name,
            domain=self.facts.tenant.domain,
            prompt_tokens=tokens.count,
            least_prompt_tokens=tokens.least,
            likely_prompt_tokens=tokens.likely,
            max_new_tokens=most_tokens,
            service_class=service_class.name,
            rank=service_class.rank,
            priority=ask.priority,
            block_keys=tokens.keys,
            pools=ruling.pools if rule.split is None else self._pools(model),
            policy=ruling.policy,
            session=ask.session,
            deadline_s=ask.deadline_s,
            prefill_slice_tokens=service_class.prefill_slice_tokens,
            preemptible=service_class.preemptible,
            stream=ask.stream,
            needs=needs,
            sampling=sampling,
            expected_new_tokens=gateway.lengths.expected(tenant, service_class.name, most=most_tokens),
            promised=service_class,
            may_transfer=is_fit and gateway.cluster.divides and may_transfer(native),
            may_fetch=is_fit,
            documents=ask.document_ids,
        )
