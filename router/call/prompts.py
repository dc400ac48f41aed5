"""From what a client sent to tokens: by the tokenizer of its model, by an engine, or as an estimate; and what all calls
to a model have in common.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import NamedTuple

from msgspec.structs import replace

from backends.base import TextReader, as_text_reader
from policies.errors import ContextExceeded, InvalidRequest, Overflow
from policies.learning.text_length import TextLengths
from policies.nouns import DIALECTS, Capability, Tenant
from policies.sla.config import Config
from router.ask import Ask, Chat, Reading
from router.call.undone_fields import refuse_undone
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel
from router.fleet.feeds.feeds import Feeds
from router.fleet.prompt_keys import NO_DOMAIN
from router.text.cuts import UncuttableError
from router.text.engine_text import EngineText
from router.text.estimates import estimated
from router.text.sources import Sources
from router.text.text_tokenizer import TooManyTokensError
from router.text.tokenize import How, ModelText, Tokenizers, Tokens
from shards.kv.keys import root_key

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
        use it; None: `Models.started` finds out."""
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


MOST_READERS = 32
"""Backends among which one is found that is asked for the tokens of a prompt."""

_AS_USUAL = Reading()

_UNREAD = DIALECTS | {Capability.MEDIA}
"""Of prompts that need one of these, only their engine knows the tokens."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Reads the prompts of calls to the models of `cluster`, each by its SLA file `config`."""

    cluster: Cluster
    prepared: PreparedModels
    sources: Sources
    tokenizers: Tokenizers
    engine_text: EngineText
    text_lengths: TextLengths
    feeds: Feeds
    rng: random.Random

    async def tokens(
        self, ask: Ask, model: ServedModel, tenant: Tenant, config: Config, *, is_asked: bool = False
    ) -> list[Tokens]:
        """Every input of `ask` as tokens with its block keys, by the model's tokenizer; else by its engine, where a
        rule, a limit or a feed needs exact counts or the client `is_asked` for them; else only estimated.

        Prompts with images are estimated too: only their engine knows how many tokens an image becomes. Raises
        InvalidRequest, Overloaded, and what the engine objects to where the client asked for the tokens.
        """
        common = self.prepared.of(model, tenant.domain, config)
        how = common.how
        if is_asked or ask.echo or ask.reading != _AS_USUAL:
            how = self.how(ask, model, tenant, config, is_asked=is_asked)
        text = await self.sources.text_of(model) if _may_be_read(ask, model) else None
        if text is not None:
            try:
                return await self.tokenizers.tokens(ask, text, how, tenant.name)
            except TooManyTokensError as error:
                raise beyond_context(error.least, ask, model, at_least=not error.is_exact) from None
            except UncuttableError:
                # the engine may read it nevertheless
                if model.speaks_tokens:
                    message = "the prompt has no place where it could be cut to be tokenized"
                    raise InvalidRequest(message, hint="break it into lines or words", param=ask.subject) from None
        if model.readers and (readers := self.readers_for(ask, model, tenant, config, is_asked=is_asked)):
            found = await self.engine_text.tokens(ask, readers, how, is_patient=is_asked)
            if found is not None:
                self.sources.count_at_engine(model.name)
                return found
        if model.speaks_tokens and _may_be_asked_for(ask) and not all(isinstance(one, bytes) for one in ask.inputs):
            # estimates are for servers that read text themselves
            hint = "put tokenizer.json beside the checkpoint, or name one with `tokenizer` of the pool; token ids work"
            raise InvalidRequest(f"'{model.name}' has no tokenizer, so it reads no text", hint=hint, param=ask.subject)
        return estimated(ask, how.root, self.text_lengths.of(common.name))

    def estimated_at_once(self, ask: Ask, common: Prepared) -> list[Tokens]:
        """Every input of `ask` with an estimated length, where nothing could count it; else none: see `tokens`."""
        if not common.is_estimated or ask.reading != _AS_USUAL or ask.echo:
            return []
        return estimated(ask, common.how.root, self.text_lengths.of(common.name))

    def how(self, ask: Ask, model: ServedModel, tenant: Tenant, config: Config, *, is_asked: bool = False) -> How:
        """How the prompts of `ask` become tokens, of any number if the client asked for them."""
        return replaced(
            self.prepared.of(model, tenant.domain, config).how,
            echo=ask.echo,
            reading=_reading(ask, model),
            most_tokens=None if is_asked or ask.reading.most_tokens is not None else most_tokens(model),
        )

    async def text_of(self, ask: Ask, model: ServedModel) -> ModelText | None:
        """What tokenizes the prompts of `ask` here; None if an engine has to. Raises InvalidRequest."""
        return await self.sources.text_of(model) if _may_be_read(ask, model) else None

    def readers_for(
        self, ask: Ask, model: ServedModel, tenant: Tenant, config: Config, *, is_asked: bool = False
    ) -> dict[str, TextReader]:
        """Backends that are asked for the tokens of `ask` where there is no tokenizer here; none if no exact number is
        needed.
        """
        if not is_asked and not (_may_be_asked_for(ask) and self.sources.asks_engine(model)):
            return {}
        readers = self.readers_of(model)
        return readers if readers and (is_asked or self._needs_exact(tenant, readers, config)) else {}

    def readers_of(self, model: ServedModel) -> dict[str, TextReader]:
        """Backends of `model` that can be asked for tokens, those with the least to do first; some of a large fleet."""
        cluster, readers = self.cluster, model.readers
        if len(readers) > MOST_READERS:
            readers = tuple(self.rng.sample(readers, MOST_READERS))
        found: dict[str, TextReader] = {}
        for name in readers:
            reader = as_text_reader(cluster.backend(name)) if cluster.may_serve(name, model.name) else None
            if reader is not None:
                found[name] = reader
        return found if len(found) < 2 else {name: found[name] for name in sorted(found, key=cluster.flights)}

    def _needs_exact(self, tenant: Tenant, backends: Iterable[str], config: Config) -> bool:
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
            any(rule.when.prompt_tokens or rule.when.uncached_tokens for rule in config.rules)
            or any(one.counts_tokens for one in limits)
            or any(map(self.feeds.hears, backends))
        )


def _may_be_asked_for(ask: Ask) -> bool:
    """May an engine be asked beside the request, or is it work twice done?"""
    return ask.needs.isdisjoint(_UNREAD | {Capability.EMBEDDINGS, Capability.RERANK})


def _may_be_read(ask: Ask, model: ServedModel) -> bool:
    """Can the prompts of `ask` be counted as its engine counts them? Raises InvalidRequest for what no shard can do."""
    if not ask.needs.isdisjoint(DIALECTS):
        return False
    if model.speaks_tokens:
        refuse_at_shards(ask)
    if any(isinstance(given, Chat) and given.template is not None for given in ask.inputs):
        return False
    if ask.needs & {Capability.EMBEDDINGS, Capability.RERANK}:
        # several texts are measured together, and each of them has to fit by itself
        return isinstance(ask.bodies[0].get("input"), str)
    return Capability.MEDIA not in ask.needs


def refuse_at_shards(ask: Ask) -> None:
    """Raise InvalidRequest for what no shard can do."""
    if ask.needs.isdisjoint({Capability.EMBEDDINGS, Capability.RERANK}):
        refuse_undone(ask.bodies[0])
    if any(isinstance(given, Chat) and given.template is not None for given in ask.inputs):
        hint = "leave `chat_template` out; operators can give a pool one"
        raise InvalidRequest("this model reads its own chat template only", hint=hint, param="chat_template")


def beyond_shards(ask: Ask) -> Ask:
    """`ask` of a model that shards and other engines serve: if no shard can do all of it, as it came for the others,
    which know their own fields."""
    try:
        refuse_at_shards(ask)
    except InvalidRequest as refusal:
        if not ask.needs.isdisjoint(DIALECTS):
            return ask
        speak = Capability.CHATS if isinstance(ask.inputs[0], Chat) else Capability.TEXTS
        natives = ask.natives
        if natives and natives[0].path == ask.path:
            natives = tuple([replace(native, untranslated=refusal) for native in natives])
        return replace(ask, needs=ask.needs | {speak}, natives=natives)
    return ask


def _reading(ask: Ask, model: ServedModel) -> Reading:
    """How the client wants its prompts read, with as many tokens as the model takes where it left that open."""
    if ask.reading.most_tokens != -1:
        return ask.reading
    most = model.context_tokens
    return replace(ask.reading, most_tokens=None if most is None else most - bool(ask.max_new_tokens))


def beyond_context(
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
