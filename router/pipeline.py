"""The life of a request, top to bottom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from backends.base import Backend
from policies.config import Config
from policies.errors import (
    BackendFailed,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    NoBackend,
    Overloaded,
    UnknownModel,
)
from policies.explain import explain, without_secrets
from policies.filters import is_worth_waiting
from policies.nouns import BackendView, Capability, ClusterView, Decision, Delta, Prompt, Request, Tenant, Usage
from policies.rules import Facts, Ruling, classify
from policies.suggest import did_you_mean
from router.admission import Permit
from router.ask import Ask
from router.caller import Caller, CallerGone, Placement
from router.cluster import Flight, ServedModel
from router.gateway import Gateway
from router.identify import identify
from router.telemetry import Account, Telemetry
from router.tokenize import Tokens, estimated
from router.tool_calls import heard
from shards.kv.keys import BLOCK_TOKENS, root_key

MOST_TRIES = 3
"""Backends that one prompt may be tried on."""

UNKNOWN_ROOM_TOKENS = 4096
"""The answer that is planned for where neither client nor backend says how long it may be."""

FORWARDED = ("traceparent", "tracestate")
"""Headers of the client that backends see."""

WANTED = {
    Capability.STRUCTURED_OUTPUT: (
        "shape its answers",
        "response_format",
        "leave `response_format` out, or describe the shape in the prompt",
    ),
    Capability.TOKEN_IDS: ("take token ids", "prompt", "send the prompt as text"),
    Capability.LOGPROBS: ("tell log-probabilities", "logprobs", "leave `logprobs` out"),
    Capability.EMBEDDINGS: ("make embeddings", "model", "ask for a model that embeds"),
    Capability.CHOICES: ("give several answers at once", "n", "leave `n` out and ask several times"),
}
"""Capability -> what a backend without it cannot do, the field that asked for it, and what to do instead."""

_log = logging.getLogger("pointsman.pipeline")


async def serve(caller: Caller, gateway: Gateway) -> None:
    """Answer one call: identify, read, tokenize, classify, admit, choose, stream, settle. Reads in the order it runs.

    Tries another backend only while the client has seen nothing of that answer. Raises ExpectedError or CallerGone;
    however it ends, the Outcome is counted once and every permit is settled.
    """
    with gateway.telemetry.account(caller.id) as account, outer_edge(gateway.telemetry), gateway.doors.entered():
        config = gateway.config
        tenant = identify(caller.key, config)
        account.tenant = tenant.name
        ask = await caller.read()
        async with within(ask.deadline_s):
            model = find_model(ask.model, tenant, gateway)
            account.model = model.name
            inputs = await tokenize(ask, model, tenant, gateway)
            held = [believed(tokens, gateway) for tokens in inputs]
            facts = facts_of(ask, inputs, held, tenant=tenant, model=model, gateway=gateway)
            ruling = classify(facts, config)
            account.service_class = ruling.service_class.name
            async with gateway.admission.permit(tenant, most=config.server.max_concurrent) as permit:
                call = _Call(caller, ask, model, facts, ruling, config, gateway, permit, account)
                pairs = enumerate(zip(inputs, held, strict=True))
                await together([call.answer(at, tokens, matched) for at, (tokens, matched) in pairs])


@contextmanager
def outer_edge(telemetry: Telemetry) -> Iterator[None]:
    """Turn what nobody planned for into an ExpectedError that tells the client nothing, and log it whole."""
    try:
        yield
    except (ExpectedError, CallerGone):
        raise
    except Exception as error:
        _log.exception("a request failed in a way that nobody planned for")
        telemetry.event("unplanned_failure")
        raise ExpectedError("the router made a mistake", hint="its log says more") from error


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceeded if the body takes longer; None: it may take any time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            hint = "give the request more time"
            raise DeadlineExceeded(f"the deadline of {seconds:.3f} s has passed", hint=hint) from error
        raise


def find_model(name: str, tenant: Tenant, gateway: Gateway) -> ServedModel:
    """The model that `tenant` means by `name`. Raises UnknownModel, or NoBackend while its backends are away."""
    allowed = not tenant.models or name in tenant.models
    model = gateway.cluster.model(name)
    if model is not None and allowed:
        return model
    known = gateway.models_for(tenant)
    if allowed and (not known or _is_configured(name, gateway.config)) and gateway.cluster.unreached():
        hint = "try again when /readyz says 200"
        raise NoBackend(f"no backend of model '{name[:80]}' was reached yet", hint=hint, retry_after_s=1.0)
    hint = did_you_mean(name, known) or "GET /v1/models lists the models"
    raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")


async def tokenize(ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway) -> list[Tokens]:
    """Every input of `ask` as tokens with its block keys; only their estimated lengths where nobody has a tokenizer."""
    if not model.assets:
        return estimated(ask)
    text = await gateway.tokenizers.model(model.name, model.assets)
    root = root_key(_backends_name(model, gateway.config), tenant.domain)
    return await gateway.tokenizers.tokens(ask, text, root=root, vocabulary=model.vocabulary)


def believed(tokens: Tokens, gateway: Gateway) -> dict[str, int]:
    """Backend -> how many tokens of this prompt's beginning it is believed to hold. The one walk through the index."""
    return {
        name: min(blocks * BLOCK_TOKENS, tokens.count) for name, blocks in gateway.index.longest(tokens.keys).items()
    }


def facts_of(
    ask: Ask,
    inputs: Sequence[Tokens],
    held: Sequence[Mapping[str, int]],
    *,
    tenant: Tenant,
    model: ServedModel,
    gateway: Gateway,
) -> Facts:
    """What rules may look at of this call; its longest prompt speaks for all. Raises ContextExceeded."""
    longest, matched = max(zip(inputs, held, strict=True), key=lambda pair: pair[0].count)
    return Facts(
        tenant,
        model.name,
        prompt_tokens=longest.count,
        max_new_tokens=room(ask, longest, model),
        uncached_tokens=max(1, longest.count - gateway.cluster.most_held(model.name, matched)),
        priority=ask.priority,
        headers=ask.headers,
    )


def room(ask: Ask, tokens: Tokens, model: ServedModel) -> int:
    """How many tokens the answer to `tokens` may have. Raises ContextExceeded if prompt and answer do not fit.

    A length that is only estimated is never refused: the backend knows better.
    """
    wanted = ask.max_new_tokens or ask.usual_new_tokens
    if model.context_tokens is None:
        return wanted or UNKNOWN_ROOM_TOKENS
    left = model.context_tokens - tokens.count
    if tokens.token_ids and left < (ask.max_new_tokens or 1):
        asked = "" if ask.max_new_tokens is None else f" and {ask.max_new_tokens} for the answer"
        raise ContextExceeded(
            f"{tokens.count} tokens of prompt{asked} do not fit the {model.context_tokens} tokens of '{model.name}'",
            hint=f"ask for at most {left} tokens" if left > 0 else "shorten the prompt",
            param="max_tokens" if left > 0 else ask.subject,
        )
    return ask.max_new_tokens or max(1, min(left, wanted or left))


def decide(
    request: Request, held: Mapping[str, int], *, config: Config, gateway: Gateway, avoiding: Collection[str]
) -> tuple[ClusterView, Decision]:
    """What the policy decides now, recorded, and the view that it decided on; `held` is what backends hold of it."""
    view = gateway.cluster.view(gateway.clock(), held)
    decision = config.policies[request.policy].decide(request, view, gateway.rng, avoiding=avoiding)
    chosen = next((backend for backend in view.backends if backend.name == decision.chosen), None)
    gateway.telemetry.decided(request, decision, chosen, config_version=config.version)
    return view, decision


async def together(answers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all `answers`; the first failure ends the others and is raised by itself."""
    if len(answers) == 1:
        return await answers[0]
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(answer)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures


@dataclass(frozen=True, slots=True)
class _Call:
    """One admitted call, with all that its prompts share."""

    caller: Caller
    ask: Ask
    model: ServedModel
    facts: Facts
    ruling: Ruling
    config: Config
    gateway: Gateway
    permit: Permit
    account: Account

    async def answer(self, at: int, tokens: Tokens, held: Mapping[str, int]) -> None:
        """Answer prompt number `at`, on another backend if one fails before the client has seen anything."""
        request = self._request(at, tokens)
        headers = {name: self.ask.headers[name] for name in FORWARDED if name in self.ask.headers}
        prompt = Prompt(tokens.token_ids, self.ask.bodies[at], self.ask.path, headers, self.ask.anthropic_body)
        tried: set[str] = set()
        failure: ExpectedError | None = None
        while True:
            try:
                backend = self._choose(at, request, held, tried)
            except (NoBackend, Overloaded) as nobody:
                # what the last one said tells more than that nobody else is left
                raise failure or nobody from None
            try:
                await self.caller.place(at, Placement(request, backend.pool, backend.name))
                uncached_tokens = request.prompt_tokens - held.get(backend.name, 0)
                with self.gateway.cluster.sending(backend.name, uncached_tokens) as flight:
                    await self._relay(at, request, heard(backend, request, prompt, tokens.tools), flight, tokens.echo)
                return
            except (BackendFailed, Overloaded) as error:
                failure = error
                tried.add(backend.name)
                if self.caller.has_seen(at) or len(tried) == MOST_TRIES:
                    raise
                self.gateway.telemetry.event("retried")

    def _choose(self, at: int, request: Request, held: Mapping[str, int], tried: Collection[str]) -> Backend:
        """The backend for prompt number `at`. Raises NoBackend, or Overloaded where a backend may have room soon."""
        config, gateway = self.config, self.gateway
        view, decision = decide(request, held, config=config, gateway=gateway, avoiding=tried)
        if self.ask.explain:
            why = explain(request, self.facts, self.ruling, config=config, view=view, decision=decision)
            self.caller.explain(at, without_secrets(why))
        if decision.chosen is None:
            raise _incapable(request, view.backends) or _nobody(decision, view.backends)
        return gateway.cluster.backend(decision.chosen)

    async def _relay(self, at: int, request: Request, deltas: AsyncIterator[Delta], flight: Flight, echo: str) -> None:
        """Pass `deltas` on and charge what they used, also if they break off."""
        drawn, usage = 0, None
        unechoed = set(range(request.sampling.choices)) if echo else set()
        try:
            async with aclosing(cast("AsyncGenerator[Delta]", deltas)):
                async for delta in deltas:
                    if delta.computed_tokens is None:
                        flight.answered = True
                        drawn += len(delta.token_ids)
                        usage = delta.usage or usage
                        self.account.heard(self.gateway.clock())
                        if delta.choice in unechoed:
                            unechoed.remove(delta.choice)
                            delta = replace(delta, text=echo + delta.text)  # noqa: PLW2901
                    await self.caller.write(at, delta)
        finally:
            if flight.answered:
                self.permit.spend(usage or Usage(request.prompt_tokens, drawn))
                self.account.usage = self.permit.usage

    def _request(self, at: int, tokens: Tokens) -> Request:
        ask, ruling = self.ask, self.ruling
        return Request(
            id=self.caller.id if len(ask.inputs) == 1 else f"{self.caller.id}-{at}",
            tenant=self.facts.tenant.name,
            model=self.model.name,
            domain=self.facts.tenant.domain,
            prompt_tokens=tokens.count,
            max_new_tokens=room(ask, tokens, self.model),
            service_class=ruling.service_class.name,
            rank=ruling.rank,
            priority=ask.priority,
            block_keys=tokens.keys,
            pools=ruling.pools,
            policy=ruling.policy,
            session=ask.session,
            deadline_s=ask.deadline_s,
            prefill_slice_tokens=ruling.service_class.prefill_slice_tokens,
            preemptible=ruling.service_class.preemptible,
            stream=ask.stream,
            needs=ask.needs,
            sampling=ask.sampling,
        )


def _backends_name(model: ServedModel, config: Config) -> str:
    """What the backends of `model` call it: block keys are made of their name, whatever clients say."""
    pools = (config.pools[name] for name in sorted(model.pools) if name in config.pools)
    return next((pool.models[model.name] for pool in pools if model.name in pool.models), model.name)


def _is_configured(name: str, config: Config) -> bool:
    return any(name == pool.model or name in pool.models for pool in config.pools.values())


def _incapable(request: Request, backends: Sequence[BackendView]) -> InvalidRequest | None:
    """The error if no backend of the model can ever do what the request needs."""
    serving = [backend for backend in backends if request.model in backend.models]
    if not serving or any(request.needs <= backend.capabilities for backend in serving):
        return None
    missing = sorted(need for need in request.needs if not any(need in one.capabilities for one in serving))
    what, param, hint = WANTED[(missing or sorted(request.needs))[0]]
    return InvalidRequest(f"no backend of '{request.model}' can {what}", hint=hint, param=param)


def _nobody(decision: Decision, backends: Sequence[BackendView]) -> NoBackend | Overloaded:
    reasons = ", ".join(f"{name}: {reason}" for name, reason in decision.dropped[:8])
    more = f" and {len(decision.dropped) - 8} more" if len(decision.dropped) > 8 else ""
    kind = Overloaded if is_worth_waiting(decision) else NoBackend
    return kind(
        f"none of {len(backends)} backends can take this request",
        hint=f"dropped by policy '{decision.policy}': {reasons}{more}" if reasons else "the cluster is empty",
        retry_after_s=1.0,
    )
