"""The life of a request, top to bottom."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count, repeat

from msgspec.structs import replace

from backends.base import Backend
from policies.errors import (
    BackendFailed,
    BackendLacks,
    BeyondAsked,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    IdleLost,
    InvalidRequest,
    NoBackend,
    Overloaded,
    PrefillFailed,
    QuotaExceeded,
    UnknownModel,
)
from policies.nouns import Delta, Usage
from policies.on_miss import Step
from policies.predict import answer_s
from policies.quota.tags import tags_of
from policies.rules import with_targets, yielding
from router.call.admission import Permit, Stay
from router.call.admitted import AdmittedCall
from router.call.bid import Bid, Placed
from router.call.bodies import Held
from router.call.caller import Caller, CallerGone, Placement
from router.call.carrier import Carrier, Delivery, Ourselves
from router.call.charges import completed, most_new_tokens, used, within_asked
from router.call.disclosure import public_message_of
from router.call.documents import uses_of
from router.call.edges import together, unplanned, within
from router.call.gateway import Gateway
from router.call.hedging import LOOK_S, Race
from router.call.identify import Identity
from router.call.lookup import LookedUp
from router.call.mirrors import Mirrored
from router.call.observer import Spent, UsageDoubt
from router.call.placing import Placer
from router.call.prefill import Fetching, Meeting, with_lent, without_transfer
from router.call.prepare import facts_of, require_allowed
from router.call.prompts import beyond_shards
from router.call.splits import How, has_missed
from router.call.tracing import NO_SPAN, PromptTrace
from router.fleet.cluster.served_model import ServedModel

NO_LIMIT = nullcontext()
"""A call without a deadline may take any time."""

YIELDING = "yielding"
"""In place of a class, for telemetry: a call that no client asked for keeps no promise and breaks none."""

_log = logging.getLogger("pointsman.pipeline")


async def serve(
    caller: Caller,
    gateway: Gateway,
    carrier: Carrier | None = None,
    *,
    known: Identity | None = None,
    address: str = "",
) -> None:
    """Answer one call: identify, read, tokenize, classify, admit, choose, stream, settle. Reads in the order it runs.

    Tries another backend only while the client has seen nothing of that answer. Raises ExpectedError or CallerGone;
    however it ends, the Outcome is counted once and every permit is settled. Without a `carrier` the router itself
    goes to the backends. `known` is the call's identity, where that was found before. `address` is the client's.
    """
    carrier = carrier or Ourselves()
    failure: BaseException | None = None
    permit: Permit | None = None
    account, held = gateway.observer.account(caller.id, caller.trace), Held(gateway.bodies)
    try:
        with Stay(gateway.doors):
            config = gateway.config
            identity = known or gateway.identities.find(caller.key, config)
            identity = identity or await gateway.identities.identified(caller.key, config, address)
            tenant, account.key = identity.tenant, identity.key_id
            account.tenant = held.tenant = tenant.name
            if gateway.shedding.share is not None and known is None:
                gateway.shedding.refuse_beyond_share(tenant.name)
            account.team = None if identity.team is None else identity.team.name
            ask = await caller.read(held)
            if identity.user is not None:
                # what the issuer says counts, not what the client says
                ask = replace(ask, user=identity.user)
            account.user = ask.user
            if tenant.tag_limits:
                account.tags = tags_of(tenant, ask.headers, ask.metadata)
            if tenant.needs_user or ask.media_urls:
                require_allowed(ask, tenant, config)
            async with NO_LIMIT if ask.deadline_s is None else within(ask.deadline_s):
                common = gateway.prepared.ready(ask.model, tenant, config)
                if common is None:
                    model = await gateway.models.started(ask, tenant, config)
                    common = gateway.prepared.of(model, tenant.domain, config)
                model, prompts, documents, reader = common.model, [], gateway.documents, gateway.prompts
                account.model, account.path, account.inputs = model.name, ask.path, ask.inputs
                ask = beyond_shards(ask) if model.speaks_tokens and model.speaks_text else ask
                if ask.documents is not None:
                    ask = await documents.written(ask, model, tenant, config, held)
                inputs = reader.estimated_at_once(ask, common) or await reader.tokens(ask, model, tenant, config)
                for tokens, body in zip(inputs, ask.bodies, strict=True):
                    chunks = documents.chunks_of(ask, tokens, model, tenant, config) if ask.document_spans else ()
                    prompts.append(gateway.lookup.of(tokens, body, common, chunks=chunks))
                facts = facts_of(ask, prompts, tenant=tenant, model=model)
                kept = identity.rulings.get(ask.model)
                # found once for each tenant, model and file, if no rule asks for more
                ruling = kept[1] if kept is not None and kept[0] is config and ask.priority is None else None
                ruling = ruling or identity.ruled(facts, config)
                account.service_class, account.rule = ruling.service_class.name, ruling.rule
                if ask.yields:
                    ruling, account.service_class = yielding(ruling, config), ask.counted_as or YIELDING
                hoped = ask.targets
                ruling = ruling if hoped is None else with_targets(ruling, hoped.ttft_s, hoped.tpot_s)
                prices = config.prices
                if prices.later:
                    prices = prices.at(gateway.unix_time())
                asked = gateway.charges.of_call(
                    caller.id, ask, prompts, facts, model, identity, account.tags, prices, ruling
                )
                admitted = gateway.admission.admit(asked, caller.limited)
                permit = admitted if isinstance(admitted, Permit) else await admitted
                call = _Call(caller, ask, facts, ruling, config, prices, gateway, permit, account, carrier, [])
                if len(prompts) == 1:
                    await call.answer(0, model, prompts[0])
                else:
                    await together([*map(call.answer, count(), repeat(model), prompts)])
    except (ExpectedError, CallerGone) as error:
        failure = error
        raise
    except Exception as error:
        failure = unplanned(error, gateway.observer)
        raise failure from error
    except BaseException as error:
        failure = error
        raise
    finally:
        # none of these steps is skipped because another one failed: as an ExitStack, which costs more
        try:
            held.give_back()
        finally:
            try:
                if permit is not None:
                    permit.settle(failure)
            finally:
                account.on_end(account, failure)
                # a failure that refers to this frame, and is referred to by it, would wait for the garbage collector
                failure = None


class _Others(ExitStack):
    """The `permits` of one prompt at models that it was degraded to, which are settled when this is left."""

    def __init__(self) -> None:
        super().__init__()
        self.permits: dict[str, Permit] = {}

    def keep(self, model: str, permit: Permit) -> None:
        """Have the `permit` for `model` from now on."""
        self.permits[model] = self.enter_context(permit)


class _Call(AdmittedCall, frozen=True):
    """Answers the prompts of an admitted call, and settles what they used."""

    async def answer(self, at: int, model: ServedModel, prompt: LookedUp) -> None:
        """Answer `prompt`, number `at`, on another backend if one fails before the client has seen anything."""
        gateway, service_class = self.gateway, self.ruling.service_class
        trace = None
        if self.account.wants_prompts:
            trace = gateway.observer.prompt(self.account, config_version=self.config.version)
        steps = () if self.ask.yields else self.config.on_miss.get(service_class.name, ())
        others = _Others() if steps else None
        with trace or NO_SPAN, others or NO_SPAN:
            bid = self.bid(at, model, prompt, trace=trace)
            if bid.request.tenant in gateway.blaming.blame.by_tenant:
                gateway.blaming.require_harmless(bid)
            placer, dispatcher = gateway.placer, gateway.dispatcher
            with NO_SPAN if trace is None else trace.queue():
                if others is None:
                    found = dispatcher.look(bid)
                    placed = dispatcher.take(bid, found) if found.is_free else await dispatcher.waited(bid, found)
                else:
                    placer = self._placer(at, steps, trace, others)
                    placed = await placer.place(bid)
            rule = self.config.rules[self.ruling.rule - 1]
            mirrored = None if rule.mirror is None else self._mirrored(placed)
            race, is_hedged = None, service_class.hedge_quantile is not None
            try:
                while True:
                    race = self._race(at, placed, trace) if is_hedged else None
                    failure = await (self._failed(at, trace, placed, None) if race is None else race.run())
                    if failure is None:
                        return
                    gateway.observer.event("retried")
                    try:
                        with NO_SPAN if trace is None else trace.queue():
                            placed, race = await placer.elsewhere((placed if race is None else race.placed).bid), None
                    except (NoBackend, Overloaded, InvalidRequest):
                        # the last backend's error tells more than that no other is left, or can continue the answer
                        raise failure from None
            except ExpectedError as failure:
                if not isinstance(failure, DeadlineExceeded):
                    self.failed.append(failure)
                raise
            finally:
                placed = placed if race is None else race.placed
                try:
                    self._settle(placed, others)
                finally:
                    if mirrored is not None:
                        gateway.mirrors.ended(mirrored, placed.flight, sys.exception())

    def _placer(self, at: int, steps: Sequence[Step], trace: PromptTrace | None, others: _Others) -> Placer:
        """What finds a backend for prompt number `at` by the `steps` of its class."""
        gateway = self.gateway
        return Placer(
            gateway.dispatcher,
            gateway.clock,
            steps=tuple(steps),
            degraded=lambda other, name: self._degraded(at, other, name, trace, others),
            on_step=partial(gateway.observer.missed, self.ruling.service_class.name),
            on_shed=lambda shed, found: self.record(at, shed.request, found.view, found.decision, is_late=True),
        )

    def _race(self, at: int, placed: Placed, trace: PromptTrace | None) -> Race | None:
        """The backend of `placed` and a second one once that is late; None where it is to have no second."""
        bid, gateway = placed.bid, self.gateway
        tenant, service_class = self.facts.tenant.name, self.ruling.service_class
        quantile = service_class.hedge_quantile
        if quantile is None or not bid.is_new or not self.carrier.continues or self.ask.yields:
            return None
        gateway.hedges.earn(tenant, service_class)
        flight, leg = placed.flight, placed.found.decision.prefill
        if flight.is_silent:
            return None
        leg_s = 0.0 if leg is None else leg.seconds
        late_s = gateway.cluster.late_s(flight, quantile)

        def find_second(within_s: float) -> Placed | None:
            if late_s is None:
                # its pool may have learnt of its times since it was sent
                learnt_s = gateway.cluster.late_s(flight, quantile)
                if learnt_s is None or gateway.clock() - flight.sent_at < leg_s + learnt_s:
                    return None
            if not gateway.hedges.allows(tenant, service_class):
                return None
            second = gateway.dispatcher.second(bid, placed, within_s=within_s)
            if second is not None:
                gateway.hedges.spend(tenant, service_class)
                gateway.observer.event("hedged")
            return second

        attempt, on_won = partial(self._failed, at, trace), partial(self._lead, at)
        first_look_s = leg_s + (LOOK_S if late_s is None else late_s)
        return Race(placed, attempt, find_second=find_second, on_won=on_won, late_s=first_look_s)

    async def _failed(
        self, at: int, trace: PromptTrace | None, placed: Placed, race: Race | None
    ) -> ExpectedError | None:
        """Stream the answer from where it was placed; why that failed, if another backend may be tried.

        The client gets it from the backend that begins its answer first in the `race`, if there is one.
        """
        bid, gateway = placed.bid, self.gateway
        flight, cluster, has_other = placed.flight, gateway.cluster, True
        leg, fetch = placed.found.decision.prefill, placed.found.decision.fetch
        if bid.failed:
            gateway.blaming.sent(bid, flight)
        try:
            try:
                backend = cluster.on_the_way[flight].backend
                if race is None or placed is race.first:
                    self._announce(at, placed, backend, waited_s=flight.sent_at - bid.arrived_at)
                attempt = None if trace is None else trace.sent(placed, backend)
                with attempt or NO_SPAN:
                    prompt = bid.prompt if fetch is None else with_lent(placed, fetch, cluster)
                    if attempt is not None:
                        prompt = attempt.stamped(prompt)
                    carrier: Carrier | Fetching | Meeting = self.carrier
                    if leg is not None:
                        carrier, prompt = await gateway.first_legs.before(self.carrier, placed, leg, prompt)
                        # only from here on can this backend be late
                        flight.fetch(gateway.clock())
                        has_other = cluster.has_other(flight)
                        gateway.observer.event("prefilled_elsewhere")
                    delivery = Delivery(
                        flight,
                        caller=self.caller,
                        ask=self.ask,
                        at=at,
                        placed=placed,
                        race=race,
                        account=self.account,
                        attempt=attempt,
                        clock=gateway.clock,
                    )
                    if self.ask.max_new_tokens is not None and self.carrier.continues:
                        delivery.most_tokens = most_new_tokens(self.ask, bid)
                    try:
                        with delivery:
                            await carrier.carry(placed, backend, prompt, delivery)
                    finally:
                        if delivery.pending is not None:
                            delivery.close()
                if bid.failed or bid.request.tenant in gateway.blaming.blame.by_tenant:
                    gateway.blaming.answered(bid, flight)
            except BaseException as failure:
                cluster.end(flight, failure)
                raise
            cluster.end(flight)
        except ExpectedError as failure:
            return await self._after(failure, at, placed, race, has_other=has_other)
        return None

    async def _after(
        self, failure: ExpectedError, at: int, placed: Placed, race: Race | None, *, has_other: bool
    ) -> ExpectedError | None:
        """`failure`, by which the backend of `placed` ended, if another one may be tried; None if the answer is whole.

        Raises it otherwise. `has_other`: is there another backend that could take it?
        """
        bid, gateway, decision = placed.bid, self.gateway, placed.found.decision
        failure.public_message = public_message_of(failure)
        if isinstance(failure, BeyondAsked):
            await self._cut(at, placed, failure)
            return None
        leader = placed if race is None else race.leader
        if leader is placed and bid.so_far is not None and bid.so_far.has_ended:
            await self._end(at, placed, failure)
            return None
        if decision.prefill is not None or decision.fetch is not None:
            bid.request = without_transfer(bid.request)
        if isinstance(failure, PrefillFailed):
            _log.warning("request %s: %s", bid.request.id, failure)
            gateway.observer.event("prefill_failed")
            failed = placed.chosen.name if decision.prefill is None else decision.prefill.backend
            gateway.beliefs.failed(failed)
            await gateway.blaming.require_innocent(placed, failure)
            if placed.chosen.needs_prefill and not bid.may_retry_prefill(failed):
                raise failure
            return failure
        await gateway.blaming.require_innocent(placed, failure)
        if isinstance(failure, BackendFailed | Overloaded):
            _log.warning("request %s: %s", bid.request.id, failure)
            gateway.beliefs.failed(placed.chosen.name)
            if isinstance(failure, BackendFailed):
                self._note_split(placed, has_failed=True)
        if isinstance(failure, BackendFailed | Overloaded | BackendLacks):
            # the other pools of a split may take over
            bid.request = replace(bid.request, pools=self.ruling.pools)
        if not bid.may_retry(placed, failure, gateway.clock()):
            raise failure
        if not has_other or isinstance(failure, IdleLost):
            # what it could not fetch it may compute, and the next connection is a new one
            bid.avoiding -= {placed.chosen.name}
        if leader is not None and leader is not placed:
            # it was about to be cancelled
            return failure
        if self.caller.has_seen(at):
            if not bid.resume():
                raise failure
            gateway.observer.event("continued")
        else:
            bid.start_over()
        return failure

    async def _end(self, at: int, placed: Placed, failure: ExpectedError) -> None:
        """End an answer that its client has whole, though its backend failed before it reported the usage."""
        bid, flight, gateway = placed.bid, placed.flight, self.gateway
        _log.warning("request %s, when its answer was whole: %s", bid.request.id, failure)
        gateway.observer.event("cut_at_the_end")
        gateway.beliefs.failed(placed.chosen.name)
        if flight.usage is None:
            written = self.caller.write(at, Delta(usage=used(placed)))
            if written is not None:
                await written

    async def _cut(self, at: int, placed: Placed, failure: BeyondAsked) -> None:
        """End an answer that has all tokens that were asked for. Raises `failure` where it cannot be ended so."""
        bid, gateway = placed.bid, self.gateway
        _log.warning("request %s: %s", bid.request.id, failure)
        gateway.observer.event("beyond_asked")
        if self.ask.stream:
            beginning = bid.beginning()
            if beginning is None or bid.request.sampling.choices > 1:
                raise failure
            # the events that end it are as those before
            self.caller.place(at, Placement(bid.request, placed.chosen.pool, placed.chosen.name, beginning))
        for delta in (Delta(finish_reason="length"), Delta(usage=used(placed))):
            written = self.caller.write(at, delta)
            if written is not None:
                await written

    def _believed(self, usage: Usage, placed: Placed) -> Usage:
        """`usage`, as far as it may be true, and what the backend did not count."""
        if usage.is_guess:
            self.gateway.observer.doubted(placed.chosen.name, UsageDoubt.UNCOUNTED)
            usage = completed(usage, placed)
        found = within_asked(usage, self.ask, placed)
        if found is not usage:
            name, told = placed.chosen.name, (usage.prompt_tokens, usage.completion_tokens)
            charged = (found.prompt_tokens, found.completion_tokens)
            request = placed.bid.request.id
            _log.warning("request %s: %s counts %s tokens, and %s are charged", request, name, told, charged)
            self.gateway.observer.event("usage_beyond_asked")
            self.gateway.observer.doubted(name, UsageDoubt.BEYOND_ASKED)
        return found

    def _announce(self, at: int, placed: Placed, backend: Backend, *, waited_s: float | None = None) -> None:
        """Tell log and client that `backend` answers a request that was in the router for `waited_s` before; None: the
        second one of a race takes the lead."""
        bid, view, decision = placed.bid, placed.found.view, placed.found.decision
        version = self.config.version
        self.gateway.observer.decided(bid.request, decision, placed.chosen, config_version=version, waited_s=waited_s)
        if self.gateway.decider.shadow is not None or self.ask.explain:
            self._compare(at, bid.request, view, decision, decision)
        self.caller.place(at, Placement(bid.request, backend.pool, backend.name, bid.prompt.beginning))

    def _lead(self, at: int, placed: Placed) -> None:
        """The backend of `placed`, the second one of a race, begins its answer first."""
        self.gateway.observer.event("hedge_won")
        self._announce(at, placed, self.gateway.cluster.backend_of(placed.flight))

    def _settle(self, placed: Placed, others: _Others | None) -> None:
        """Charge what was used, and put right what the queue charged: nothing where nothing was answered, unless the
        caller left before it was.

        Backends that were tried before are not paid for: the caller has seen nothing of theirs.
        """
        bid, flight, gateway = placed.bid, placed.flight, self.gateway
        actual_s = 0.0
        gateway.later(bid.ended, flight, placed.chosen)
        rule = self.config.rules[self.ruling.rule - 1]
        if rule.split is not None and flight.answered and placed.chosen.name not in bid.failed:
            self._note_split(placed)
        drawn_tokens = flight.drawn_tokens if bid.so_far is None else bid.so_far.tokens
        if flight.answered or drawn_tokens or self._was_left(placed):
            # a caller that left gets no usage from the backend
            at_backend_s = max(0.0, gateway.clock() - flight.sent_at)
            usage = self._believed(flight.usage or used(placed), placed)
            usage = replace(usage, images=bid.images, backend_ms=round(1000 * at_backend_s))
            model, pool = bid.request.model, placed.chosen.pool
            prices = self.prices.usual if self.prices.are_usual else self.prices.of(model, pool)
            cost = self.permit.spend(usage, prices)
            flight.charged = usage, cost
            if others is not None and (beside := others.permits.get(model)) is not None:
                beside.spend(usage, prices)
            self.account.usage = self.permit.usage or Usage()
            self.account.spent += (Spent(model, pool, usage, cost),)
            if (spans := self.ask.spans) is not None:
                uses = uses_of(spans, usage, placed.chosen.latency, prices, gateway.unix_time())
                gateway.document_sets.used(bid.request.tenant, spans.of_set, uses)
            uncached = max(1, usage.prompt_tokens - usage.cached_tokens - usage.blended_tokens)
            used_s = answer_s(bid.request, placed.chosen, new_tokens=usage.completion_tokens, uncached=uncached)
            # whatever a backend counts, no request has more of its time than it was there
            actual_s = min(used_s, at_backend_s)
            if not self.ask.yields and usage.completion_tokens:
                each = min(bid.request.max_new_tokens, usage.completion_tokens // bid.request.sampling.choices)
                gateway.lengths.learn(bid.request.tenant, bid.request.service_class, each)
        gateway.dispatcher.correct(bid, actual_s)

    def _was_left(self, placed: Placed) -> bool:
        """Did the caller end the call while the backend of `placed` had the prompt? It computes that all the same."""
        end = sys.exception()
        is_left = isinstance(end, CallerGone | DeadlineExceeded | asyncio.CancelledError)
        return is_left and placed.chosen.name not in placed.bid.failed and not self.failed

    async def _degraded(self, at: int, bid: Bid, name: str, trace: PromptTrace | None, others: _Others) -> Bid:
        """`bid` as one for the model `name`; itself where the tenant has no such model, or may not have more of it now,
        or the prompt does not fit.

        The rule's pools hold for it too if one of them has that model; else any pool that has it will do.
        """
        gateway, tenant = self.gateway, self.facts.tenant
        try:
            model = gateway.models.find(name, tenant, self.config)
            inputs = await gateway.prompts.tokens(self.ask, model, tenant, self.config)
            common = gateway.prepared.of(model, tenant.domain, self.config)
            prompt = gateway.lookup.of(inputs[at], self.ask.bodies[at], common)
            other = self.bid(at, model, prompt, trace=trace)
            if other.request.pools is not None and model.pools.isdisjoint(other.request.pools):
                other.request = replace(other.request, pools=None)
            highest = self.prices.highest(model.name, other.request.pools or ())
            asked = gateway.charges.at_other(model.name, self.permit.asked, other, tenant=tenant, prices=highest)
            if asked is not None:
                admitted = gateway.admission.admit(asked)
                others.keep(model.name, admitted if isinstance(admitted, Permit) else await admitted)
            return other
        except (UnknownModel, NoBackend, ContextExceeded, QuotaExceeded):
            return bid

    def _mirrored(self, placed: Placed) -> Mirrored | None:
        """The mirror of the request of `placed`, if its rule has one and this request is in its share."""
        rule = self.config.rules[self.ruling.rule - 1]
        if rule.mirror is None or self.ask.yields or not self.carrier.continues or len(self.ask.inputs) > 1:
            return None
        last = max(self.config.classes.values(), key=lambda service_class: service_class.rank)
        return self.gateway.mirrors.begin(rule, rule.mirror, placed.bid, placed, last)

    def _note_split(self, placed: Placed, *, has_failed: bool = False) -> None:
        """Count how the request of `placed` ended, if its rule has a split."""
        rule = self.config.rules[self.ruling.rule - 1]
        if rule.split is None:
            return
        flight, service_class = placed.flight, self.ruling.service_class
        is_late = not has_failed and has_missed(flight, placed.bid.arrived_at, service_class)
        how: How = "failed" if has_failed else "missed" if is_late else "kept"
        self.gateway.splits.ended(rule, placed.chosen.pool, how, service_class)
