"""What is looked up before a call runs: its model, what the calls to that have in common, its tokens and the backends
that hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as replaced
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from backends.base import TextReader, as_text_reader
from policies.errors import ContextExceeded, InvalidRequest, NoBackend, Overflow, UnknownModel
from policies.media_urls import why_refused
from policies.nouns import DIALECTS, BackendView, Capability, Sampling, Tenant
from policies.rules import Facts
from policies.sla.config import Config
from policies.suggest import did_you_mean
from router.ask import Ask, Chat, Reading
from router.call.disclosure import public_trouble, shown_name
from router.call.undone_fields import refuse_undone
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from router.fleet.cluster.served_model import ServedModel
from router.fleet.prompt_keys import NO_DOMAIN, ChunkKeys, PromptKeys
from router.text.cuts import UncuttableError
from router.text.estimates import estimated
from router.text.sources import Sources
from router.text.text_tokenizer import TooManyTokensError
from router.text.tokenize import How, ModelText, Tokens
from shards.kv.keys import root_key

if TYPE_CHECKING:
    # it keeps what is prepared here
    from router.call.gateway import Gateway

UNKNOWN_ROOM_TOKENS = 4096
"""The answer that is planned for where neither client nor backend says how long it may be."""


MOST_READERS = 32
"""Backends among which one is found that is asked for the tokens of a prompt."""

_AS_USUAL = Reading()

_UNREAD = DIALECTS | {Capability.MEDIA}
"""Of prompts that need one of these, only their engine knows the tokens."""

_MOST_SHOWN = 4
"""Backends that a hint names."""


def find_model(name: str, tenant: Tenant, gateway: Gateway) -> ServedModel:
    """The model that `tenant` means by `name`, which may be an alias. Raises UnknownModel, or NoBackend while its
    backends are away."""
    allowed = not tenant.models or name in tenant.models
    alias = gateway.config.aliases.get(name)
    served = name if alias is None else alias.model
    model = gateway.cluster.model(served)
    if model is not None and allowed:
        return model
    known = gateway.models_for(tenant)
    if allowed and (may_come(served, gateway) or (not known and gateway.awaits_backends())):
        hint = f"{_unreached(gateway.cluster)}try again when /readyz says 200"
        raise NoBackend(f"no backend of model '{name[:80]}' was reached yet", hint=hint, retry_after_s=1.0)
    hint = did_you_mean(name, known) or "GET /v1/models lists the models"
    raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")


def may_come(name: str, gateway: Gateway) -> bool:
    """Whether backends that were not reached yet may serve `name`: a pool is to have it, or none serves any model."""
    return (_is_configured(name, gateway.config) or not gateway.cluster.models()) and gateway.awaits_backends()


async def started_model(ask: Ask, tenant: Tenant, gateway: Gateway) -> ServedModel:
    """The model of `ask`, as from `find_model`; if its pool sleeps, once that has started. Raises as `find_model`, and
    NoBackend if it does not start in time."""
    alias = gateway.config.aliases.get(ask.model)
    served, waking = ask.model if alias is None else alias.model, gateway.waking
    try:
        model = find_model(ask.model, tenant, gateway)
        # a backend that the file describes may not have been reached yet, so that its context is unknown
        if model.context_tokens is not None or not waking.asleep(served, waking.within_reach(tenant, ask.model)):
            return model
    except (NoBackend, UnknownModel):
        allowed = not tenant.models or ask.model in tenant.models
        if not allowed or not waking.asleep(served, waking.within_reach(tenant, ask.model)):
            raise
    facts = Facts(
        tenant,
        ask.model,
        prompt_tokens=1,
        max_new_tokens=ask.max_new_tokens or 1,
        uncached_tokens=1,
        priority=ask.priority,
        headers=ask.headers,
        metadata=ask.metadata,
        stream=ask.stream,
    )
    await waking.until_served(ask, served, facts, waking.within_reach(tenant, ask.model))
    return find_model(ask.model, tenant, gateway)


def require_allowed(ask: Ask, tenant: Tenant, config: Config) -> None:
    """Raise InvalidRequest if an engine must not fetch one of the URLs in `ask`, or if the requests of `tenant` must
    name their end user and this one does not."""
    if tenant.needs_user and not ask.user:
        hint = "send `user`, or `metadata.user_id` in Anthropic's format"
        raise InvalidRequest(f"requests of tenant '{tenant.name}' must name their end user", hint=hint, param="user")
    for url in ask.media_urls:
        reason = why_refused(url, config.server.media_hosts)
        if reason is not None:
            hint = "send the bytes in a data: URL, or have the operator allow the host in server.media_hosts"
            raise InvalidRequest(f"the URL '{url[:80]}' {reason}", hint=hint, param="messages")


def _unreached(cluster: Cluster) -> str:
    """Why backends were never reached, for clients, as the beginning of a hint."""
    troubles = ((name, cluster.trouble(name)) for name in cluster.unreached())
    reasons = (f"{shown_name(name)}: {public_trouble(name, trouble)}; " for name, trouble in troubles if trouble)
    return "".join(islice(reasons, _MOST_SHOWN))


async def tokenize(
    ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway, *, is_asked: bool = False
) -> list[Tokens]:
    """Every input of `ask` as tokens with its block keys, by the model's tokenizer; else by its engine, where a rule, a
    limit or a feed needs exact counts or the client `is_asked` for them; else only estimated.

    Prompts with images are estimated too: only their engine knows how many tokens an image becomes. Raises
    InvalidRequest, Overloaded, and what the engine objects to where the client asked for the tokens.
    """
    common = gateway.prepared.of(model, tenant.domain, gateway.config)
    how = common.how
    if is_asked or ask.echo or ask.reading != _AS_USUAL:
        how = how_read(ask, model, tenant, gateway, is_asked=is_asked)
    text = await gateway.sources.text_of(model) if _may_be_read(ask, model) else None
    if text is not None:
        try:
            return await gateway.tokenizers.tokens(ask, text, how, tenant.name)
        except TooManyTokensError as error:
            raise _beyond_context(error.least, ask, model, at_least=not error.is_exact) from None
        except UncuttableError:
            # the engine may read it nevertheless
            if model.speaks_tokens:
                message = "the prompt has no place where it could be cut to be tokenized"
                raise InvalidRequest(message, hint="break it into lines or words", param=ask.subject) from None
    if model.readers and (readers := readers_for(ask, model, tenant, gateway, is_asked=is_asked)):
        found = await gateway.engine_text.tokens(ask, readers, how, is_patient=is_asked)
        if found is not None:
            gateway.sources.count_at_engine(model.name)
            return found
    if model.speaks_tokens and _may_be_asked_for(ask) and not all(isinstance(one, bytes) for one in ask.inputs):
        # estimates are for servers that read text themselves
        hint = "put tokenizer.json beside the checkpoint, or name one with `tokenizer` of the pool; token ids work"
        raise InvalidRequest(f"'{model.name}' has no tokenizer, so it reads no text", hint=hint, param=ask.subject)
    return estimated(ask, how.root, gateway.text_lengths.of(common.name))


def estimated_at_once(ask: Ask, common: Prepared, gateway: Gateway) -> list[Tokens]:
    """Every input of `ask` with an estimated length, where nothing could count it; else none: see `tokenize`."""
    if not common.is_estimated or ask.reading != _AS_USUAL or ask.echo:
        return []
    return estimated(ask, common.how.root, gateway.text_lengths.of(common.name))


def how_read(ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway, *, is_asked: bool = False) -> How:
    """How the prompts of `ask` become tokens, of any number if the client asked for them."""
    return replaced(
        gateway.prepared.of(model, tenant.domain, gateway.config).how,
        echo=ask.echo,
        reading=_reading(ask, model),
        most_tokens=None if is_asked or ask.reading.most_tokens is not None else most_tokens(model),
    )


async def text_of_model(ask: Ask, model: ServedModel, gateway: Gateway) -> ModelText | None:
    """What tokenizes the prompts of `ask` here; None if an engine has to. Raises InvalidRequest."""
    return await gateway.sources.text_of(model) if _may_be_read(ask, model) else None


def readers_for(
    ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway, *, is_asked: bool = False
) -> dict[str, TextReader]:
    """Backends that are asked for the tokens of `ask` where there is no tokenizer here; none if no exact number is
    needed.
    """
    if not is_asked and not (_may_be_asked_for(ask) and gateway.sources.asks_engine(model)):
        return {}
    readers = readers_of(model, gateway)
    return readers if readers and (is_asked or _needs_exact(tenant, readers, gateway)) else {}


def readers_of(model: ServedModel, gateway: Gateway) -> dict[str, TextReader]:
    """Backends of `model` that can be asked for tokens, those with the least to do first; some of a large fleet."""
    cluster, readers = gateway.cluster, model.readers
    if len(readers) > MOST_READERS:
        readers = tuple(gateway.rng.sample(readers, MOST_READERS))
    found: dict[str, TextReader] = {}
    for name in readers:
        reader = as_text_reader(cluster.backend(name)) if cluster.may_serve(name, model.name) else None
        if reader is not None:
            found[name] = reader
    return found if len(found) < 2 else {name: found[name] for name in sorted(found, key=cluster.flights)}


def _needs_exact(tenant: Tenant, backends: Iterable[str], gateway: Gateway) -> bool:
    """Does anything decide by the number of tokens, or match blocks of them?"""
    teams = tenant.teams.values()
    limits = (
        tenant.limits,
        tenant.user_limits,
        *tenant.model_limits.values(),
        *tenant.key_limits.values(),
        *tenant.tag_limits.values(),
        *(limits for team in teams for limits in (team.limits, *team.model_limits.values())),
        *(() if tenant.organization is None else (tenant.organization.limits,)),
    )
    return (
        any(rule.when.prompt_tokens or rule.when.uncached_tokens for rule in gateway.config.rules)
        or any(one.counts_tokens for one in limits)
        or any(map(gateway.feeds.hears, backends))
    )


def _may_be_asked_for(ask: Ask) -> bool:
    """May an engine be asked beside the request, or is it work twice done?"""
    return ask.needs.isdisjoint(_UNREAD | {Capability.EMBEDDINGS, Capability.RERANK})


def _may_be_read(ask: Ask, model: ServedModel) -> bool:
    """Can the prompts of `ask` be counted as its engine counts them? Raises InvalidRequest for what no shard can do."""
    if not ask.needs.isdisjoint(DIALECTS):
        return False
    if model.speaks_tokens and ask.needs.isdisjoint({Capability.EMBEDDINGS, Capability.RERANK}):
        refuse_undone(ask.bodies[0])
    for given in ask.inputs:
        if isinstance(given, Chat) and given.template is not None:
            if model.speaks_tokens:
                hint = "leave `chat_template` out; operators can give a pool one"
                raise InvalidRequest("this model reads its own chat template only", hint=hint, param="chat_template")
            return False
    if ask.needs & {Capability.EMBEDDINGS, Capability.RERANK}:
        # several texts are measured together, and each of them has to fit by itself
        return isinstance(ask.bodies[0].get("input"), str)
    return Capability.MEDIA not in ask.needs


def _reading(ask: Ask, model: ServedModel) -> Reading:
    """How the client wants its prompts read, with as many tokens as the model takes where it left that open."""
    if ask.reading.most_tokens != -1:
        return ask.reading
    most = model.context_tokens
    return replace(ask.reading, most_tokens=None if most is None else most - bool(ask.max_new_tokens))


def roots_of(domain: str, gateway: Gateway) -> frozenset[int]:
    """The keys that all block keys of cache `domain` come from, one for each model that is served."""
    models = gateway.cluster.models().values()
    return frozenset(root_key(keyed_name(model, gateway.config), domain) for model in models)


class LookedUp(NamedTuple):
    """One prompt as tokens, the keys that it is looked up by, the tokens of it that each backend was believed to hold,
    and its tokens that no backend which may serve it held.
    """

    tokens: Tokens
    keys: PromptKeys
    held: Mapping[str, int]
    uncached_tokens: int


def looked_up(
    tokens: Tokens,
    body: Mapping[str, Any] | None,
    common: Prepared,
    gateway: Gateway,
    *,
    chunks: tuple[ChunkKeys, ...] = (),
) -> LookedUp:
    """What backends of a model hold now in a cache domain, which the call has in `common` with others, of this prompt,
    which came in `body`, and of the `chunks` of its documents."""
    keys = PromptKeys(
        tokens.keys,
        common.name,
        is_exact=tokens.least is None,
        token_ids=tokens.token_ids,
        shared_root=common.shared_root,
        compares=not (body and body.get("truncate_prompt_tokens")),
        key_tokens=tokens.key_tokens,
        chunks=chunks,
    )
    if not tokens.keys:
        # shorter than what caches hold
        return LookedUp(tokens, keys, {}, tokens.count)
    held = believed(tokens, keys, gateway)
    return LookedUp(tokens, keys, held, tokens.count - gateway.cluster.most_held(common.model.name, held))


def believed(tokens: Tokens, prompt: PromptKeys, gateway: Gateway) -> dict[str, int]:
    """Backend -> tokens of this prompt's beginning that it is expected to hold: how many, times how likely that is; and
    of its documents, where they may be reused.
    """
    held: dict[str, int] = {}
    for name, match in gateway.beliefs.longest(prompt).items():
        held[name] = min(round(match.expected_blocks * prompt.key_tokens), tokens.count)
    return gateway.beliefs.with_chunks(held, prompt) if prompt.chunks else held


def facts_of(ask: Ask, prompts: Sequence[LookedUp], *, tenant: Tenant, model: ServedModel) -> Facts:
    """The facts of this call for rules; its longest prompt speaks for all. Raises ContextExceeded."""
    longest = prompts[0] if len(prompts) == 1 else max(prompts, key=lambda prompt: prompt.tokens.count)
    return Facts(
        tenant,
        # rules and tenants go by the name that was asked for, which may be an alias
        ask.model,
        prompt_tokens=longest.tokens.count,
        max_new_tokens=room(ask, longest.tokens, model),
        uncached_tokens=max(1, longest.uncached_tokens),
        priority=ask.priority,
        headers=ask.headers,
        metadata=ask.metadata,
        stream=ask.stream,
    )


def wishes(ask: Ask, tokens: Tokens) -> tuple[frozenset[Capability], Sampling]:
    """What a backend must be able to do for `ask`, and how it is to draw: calls that must be made shape the answer."""
    return ask.needs | {Capability.STRUCTURED_OUTPUT}, replace(ask.sampling, grammar=tokens.calls)


def learn(prompt: LookedUp, model: str, gateway: Gateway, flight: Flight, where: BackendView) -> None:
    """Learn from the end of the last flight of `prompt` what `where` holds now, and how long such prompts are.

    `model` is its name for clients.
    """
    gateway.beliefs.ended(prompt.keys, flight, where)
    tokens, usage = prompt.tokens, flight.usage
    if tokens.measured is None or usage is None or usage.is_guess or not usage.prompt_tokens:
        return
    gateway.observer.estimated(model, abs(tokens.count / usage.prompt_tokens - 1.0))
    gateway.text_lengths.learn(prompt.keys.model, tokens.measured, usage.prompt_tokens, now=gateway.clock())


def room(ask: Ask, tokens: Tokens, model: ServedModel) -> int:
    """How many tokens the answer to `tokens` may have. Raises ContextExceeded if prompt and answer do not fit.

    A length that is only estimated is never refused here: the backend knows better. Then an answer of no given length
    gets what even a long prompt leaves, and where that is next to nothing, a part of what the lower bound leaves.
    """
    wanted = ask.max_new_tokens or ask.usual_new_tokens
    if model.context_tokens is None:
        return wanted or UNKNOWN_ROOM_TOKENS
    left = model.context_tokens - tokens.count
    if tokens.least is not None:
        longest = tokens.count if tokens.likely is None else tokens.likely[1]
        left = max(model.context_tokens - longest, (model.context_tokens - tokens.least) // 8)
    elif left < (ask.max_new_tokens or 1):
        raise _beyond_context(tokens.count, ask, model, left)
    return ask.max_new_tokens or max(1, min(left, wanted or left))


def _beyond_context(
    tokens: int, ask: Ask, model: ServedModel, left: int = 0, *, at_least: bool = False
) -> ContextExceeded:
    """The error for a prompt of so many tokens, which leaves the answer `left` tokens."""
    assert model.context_tokens is not None
    limit = "max_completion_tokens" if ask.bodies[0].get("max_completion_tokens") else "max_tokens"
    return ContextExceeded.of(
        Overflow(tokens, ask.max_new_tokens, model.context_tokens, at_least),
        where=f" of '{model.name}'",
        hint=f"ask for at most {left} tokens" if left > 0 else "shorten the prompt",
        param=limit if left > 0 else ask.subject,
    )


def _is_configured(name: str, config: Config) -> bool:
    return any(name == pool.model or name in pool.models for pool in config.pools.values())


MOST_PREPARED = 4096
"""Models of cache domains that are kept; beyond that all are made again."""


class Prepared(NamedTuple):
    """What the calls to `model` in one cache domain have in common, by the SLA file `config`: the `name` by which its
    backends know it, the root of block keys that all domains share, and how an ordinary prompt becomes tokens.
    """

    model: ServedModel
    config: Config
    name: str
    shared_root: int
    how: How
    is_estimated: bool
    """Neither the router nor its engines make tokens of text: lengths are estimated."""
    is_ready: bool
    """A call that names the model waits for no backend of it."""


class PreparedModels:
    """Keeps what calls have in common, by model and cache domain."""

    def __init__(self, cluster: Cluster, sources: Sources) -> None:
        self._cluster, self._sources = cluster, sources
        self._kept: dict[tuple[str, str], Prepared] = {}

    def __repr__(self) -> str:
        return f"<PreparedModels {len(self._kept)}>"

    def ready(self, name: str, tenant: Tenant, config: Config) -> Prepared | None:
        """What calls of `tenant` to the model `name` have in common, where its backends are known and the tenant may
        use it; None: `started_model` finds out."""
        model = self._cluster.model(name)
        if model is None or (tenant.models and name not in tenant.models):
            return None
        known = self._kept.get((name, tenant.domain))
        if known is None or known.model is not model or known.config is not config:
            known = self.of(model, tenant.domain, config)
        return known if known.is_ready else None

    def of(self, model: ServedModel, domain: str, config: Config) -> Prepared:
        """What calls to `model` in `domain` have in common by `config`, the file in force; made again when the model's
        backends or the file change."""
        known = self._kept.get((model.name, domain))
        if known is not None and known.model is model and known.config is config:
            return known
        name = keyed_name(model, config)
        how = How(
            root_key(name, domain),
            vocabulary=model.vocabulary,
            is_sent=model.speaks_tokens,
            shows_barred_tools=_shows_barred_tools(model, config),
            most_tokens=most_tokens(model),
        )
        if len(self._kept) >= MOST_PREPARED:
            self._kept.clear()
        is_estimated = not (model.readers or model.speaks_tokens or self._sources.may_have(model))
        shared_root = root_key(name, NO_DOMAIN)
        # a backend that the file describes may not have been reached yet, so that its context is unknown
        is_ready = model.name not in config.aliases and (model.context_tokens is not None or not config.has_wake)
        found = Prepared(model, config, name, shared_root, how, is_estimated, is_ready)
        self._kept[model.name, domain] = found
        return found


def keyed_name(model: ServedModel, config: Config) -> str:
    """What the backends of `model` call it: block keys are made of their name, whatever clients say."""
    for name in sorted(model.pools):
        pool = config.pools.get(name)
        if pool is not None and model.name in pool.models:
            return pool.models[model.name]
    return model.name


def most_tokens(model: ServedModel) -> int | None:
    """How many tokens a prompt may have, so that an answer of one token fits; None for any number."""
    return None if model.context_tokens is None else model.context_tokens - 1


def _shows_barred_tools(model: ServedModel, config: Config) -> bool:
    """Does the model see tools that it must not call? Those of vLLM do, and it is what other servers are, mostly."""
    if model.speaks_tokens:
        return False
    kinds = {config.pools[pool].kind for pool in model.pools if pool in config.pools}
    return bool(kinds & {"vllm", "openai_compatible"})
