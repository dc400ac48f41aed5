"""What the calls to one model in one cache domain have in common, and what was looked up for one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.nouns import Tenant
from policies.sla.config import Config
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel
from router.fleet.prompt_keys import NO_DOMAIN, PromptKeys
from router.text.sources import Sources
from router.text.tokenize import How, Tokens
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


class LookedUp(NamedTuple):
    """One prompt as tokens, the keys that it is looked up by, the tokens of it that each backend was believed to hold,
    and its tokens that no backend which may serve it held.
    """

    tokens: Tokens
    keys: PromptKeys
    held: Mapping[str, int]
    uncached_tokens: int
