"""Everything that a request meets on its way through the router."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from policies.hedging import HedgeBudget
from policies.learning.document_uses import DocumentUses
from policies.learning.text_length import AnswerLengths, TextLengths
from policies.nouns import Tenant
from policies.quota.end_users import EndUsers
from policies.sla.config import Config
from router.call.admission import Admission, Doors
from router.call.blaming import Blaming
from router.call.bodies import Bodies
from router.call.dispatch import Dispatcher
from router.call.identify import Identities
from router.call.mirrors import Mirrors
from router.call.observer import Observer
from router.call.placing import Placer
from router.call.prefill import FirstLegs
from router.call.prepare import PreparedModels
from router.call.shedding import Shedding
from router.call.splits import Splits
from router.call.waking import Waking
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel
from router.fleet.feeds.feeds import Feeds
from router.fleet.pools import PoolsInForce
from router.later import Later
from router.shared.documents.sets import DocumentSets
from router.shared.keys.ring import KeyRing
from router.shared.prefixes.prefixes import Prefixes
from router.text.engine_text import EngineText
from router.text.sources import Sources
from router.text.tokenize import Tokenizers

if TYPE_CHECKING:
    # a router that trusts no issuer, or shares nothing, runs without what these import
    from router.identity.tokens import Verifier
    from router.shared.replicas.replicas import Replicas


@dataclass(slots=True)
class Gateway:
    """The parts of one router. `config` is replaced whole by one assignment; a call keeps the one it began with.

    `placer` places prompts of classes without steps of `on_miss`. `shadow` decides beside it without effect, where
    there is one. `replicas` are the other routers, where there may be any. `tokens` verifies those of issuers, where
    the file has any.
    """

    config: Config
    cluster: Cluster
    beliefs: Beliefs
    bodies: Bodies
    tokenizers: Tokenizers
    sources: Sources
    engine_text: EngineText
    admission: Admission
    keys: KeyRing
    identities: Identities
    observer: Observer
    doors: Doors
    shedding: Shedding
    dispatcher: Dispatcher
    placer: Placer
    waking: Waking
    lengths: AnswerLengths
    text_lengths: TextLengths
    prepared: PreparedModels
    clock: Callable[[], float]
    rng: random.Random
    ids: Iterator[str]
    """Names for calls, each unlike any other."""
    later: Later
    fleet: PoolsInForce
    feeds: Feeds
    prefixes: Prefixes
    document_sets: DocumentSets
    blaming: Blaming
    hedges: HedgeBudget
    documents: DocumentUses
    first_legs: FirstLegs
    splits: Splits
    mirrors: Mirrors
    end_users: EndUsers
    shadow: Config | None = None
    replicas: Replicas | None = None
    tokens: Verifier | None = None
    unix_time: Callable[[], float] = time.time
    """The time of day."""

    def __repr__(self) -> str:
        return f"<Gateway {self.doors!r} {self.admission!r} {self.cluster!r}>"

    def models_for(self, tenant: Tenant) -> dict[str, ServedModel]:
        """The models that are served now and that `tenant` may use, by name; so are aliases of such models."""
        allowed, served = tenant.models, self.cluster.models()
        aliases = self.config.aliases.values()
        names = {
            alias.name: replace(served[alias.model], name=alias.name) for alias in aliases if alias.model in served
        }
        return {name: one for name, one in {**served, **names}.items() if not allowed or name in allowed}

    def only_model(self, tenant: str) -> str | None:
        """The name of the one model that the `tenant` may use now; None if there are several, or none."""
        known = self.config.tenants.get(tenant)
        names = [] if known is None else list(self.models_for(known))
        served = [name for name in names if name not in self.config.aliases] or names
        return served[0] if len(served) == 1 else None

    def is_ready(self) -> bool:
        """Are the doors open, and has every pool a healthy backend that was reached?"""
        pools = self.cluster.pools_ready()
        return self.doors.open and bool(pools) and all(pools.values())

    def awaits_backends(self) -> bool:
        """Are there backends that were never reached, or pools that have not found any?"""
        pools = self.cluster.pools_ready()
        nowhere = (pool for pool in self.config.pools.values() if pool.is_found and pool.name not in pools)
        return bool(self.cluster.unreached()) or any(nowhere)

    def check(self) -> None:
        """Nothing is left of any request; for an idle router."""
        self.later.flush()
        parts = (self.doors, self.admission, self.dispatcher, self.cluster, self.beliefs, self.fleet, self.tokenizers)
        texts = (self.bodies, self.prefixes, self.engine_text, self.text_lengths, self.documents, self.document_sets)
        for part in (*parts, *texts, self.blaming, self.hedges, self.mirrors, self.waking):
            part.check()
        assert self.doors.inside == 0, f"{self.doors!r}: calls are inside"
        assert self.admission.is_idle(), f"{self.admission!r}: permits are open"
        assert self.dispatcher.is_idle(), f"{self.dispatcher!r}: a bid waits"
