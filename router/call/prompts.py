"""From what a client sent to tokens: by the tokenizer of its model, by an engine, or as an estimate."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as replaced

from msgspec.structs import replace

from backends.base import TextReader, as_text_reader
from policies.errors import InvalidRequest
from policies.learning.text_length import TextLengths
from policies.nouns import DIALECTS, Capability, Tenant
from policies.sla.config import Config
from router.ask import Ask, Chat, Reading
from router.call.prepare import beyond_context
from router.call.prepared import Prepared, PreparedModels, most_tokens
from router.call.undone_fields import refuse_undone
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel
from router.fleet.feeds.feeds import Feeds
from router.text.cuts import UncuttableError
from router.text.engine_text import EngineText
from router.text.estimates import estimated
from router.text.sources import Sources
from router.text.text_tokenizer import TooManyTokensError
from router.text.tokenize import How, ModelText, Tokenizers, Tokens

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
