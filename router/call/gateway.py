"""Everything that a request meets on its way through the router."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.hedging import HedgeBudget
from policies.learning.document_uses import DocumentUses
from policies.learning.text_length import AnswerLengths, TextLengths
from policies.sla.config import Config
from router.call.admission import Admission, Doors
from router.call.blaming import Blaming
from router.call.bodies import Bodies
from router.call.charges import Charges
from router.call.decider import Decider
from router.call.dispatch import Dispatcher
from router.call.documents import Documents
from router.call.identify import Identities
from router.call.lookup import Lookup
from router.call.mirrors import Mirrors
from router.call.models import Models
from router.call.observer import Observer
from router.call.placing import Placer
from router.call.prefill import FirstLegs
from router.call.prompts import PreparedModels, Prompts
from router.call.shedding import Shedding
from router.call.splits import Splits
from router.call.waking import Waking
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
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
    # a router that shares nothing runs without what this imports
    from router.shared.replicas.replicas import Replicas


@dataclass(slots=True)
class Gateway:
    """The parts of one router. `config` is replaced whole by one assignment; a call keeps the one it began with.

    `placer` places prompts of classes without steps of `on_miss`. `replicas` are the other routers, where there
    may be any.
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
    decider: Decider
    dispatcher: Dispatcher
    placer: Placer
    waking: Waking
    lengths: AnswerLengths
    text_lengths: TextLengths
    models: Models
    prepared: PreparedModels
    prompts: Prompts
    documents: Documents
    lookup: Lookup
    charges: Charges
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
    document_uses: DocumentUses
    first_legs: FirstLegs
    splits: Splits
    mirrors: Mirrors
    replicas: Replicas | None = None
    unix_time: Callable[[], float] = time.time
    """The time of day."""

    def __repr__(self) -> str:
        return f"<Gateway {self.doors!r} {self.admission!r} {self.cluster!r}>"

    def in_force(self) -> Config:
        """The present `config`."""
        return self.config

    def is_ready(self) -> bool:
        """Are the doors open, and has every pool a healthy backend that was reached?"""
        pools = self.cluster.pools_ready()
        return self.doors.open and bool(pools) and all(pools.values())

    def check(self) -> None:
        """Nothing is left of any request; for an idle router."""
        self.later.flush()
        parts = (self.doors, self.admission, self.dispatcher, self.cluster, self.beliefs, self.fleet, self.tokenizers)
        texts = (
            self.bodies,
            self.prefixes,
            self.engine_text,
            self.text_lengths,
            self.document_uses,
            self.document_sets,
        )
        for part in (*parts, *texts, self.blaming, self.hedges, self.mirrors, self.waking):
            part.check()
        assert self.doors.inside == 0, f"{self.doors!r}: calls are inside"
        assert self.admission.is_idle(), f"{self.admission!r}: permits are open"
        assert self.dispatcher.is_idle(), f"{self.dispatcher!r}: a bid waits"
