"""The composition root: builds every part of a router and starts none."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TypedDict, Unpack

from backends.base import Backend, CacheListener, CacheSalter, EventPublisher
from backends.kinds import Surroundings
from policies.blame import Blame
from policies.health import HealthRules
from policies.hedging import HedgeBudget
from policies.learning.document_uses import DocumentUses
from policies.learning.text_length import AnswerLengths, TextLengths
from policies.quota.end_users import EndUsers
from policies.sla.batches import BatchSettings
from policies.sla.config import Config
from router.batches.batches import Batches
from router.batches.pace import Pace
from router.batches.room import LineRoom
from router.batches.running import BatchMeans
from router.batches.shelf import BatchShelf
from router.batches.storage import Storage
from router.batches.store.base import BatchStore
from router.batches.store.directory import DirectoryStore
from router.batches.store.s3 import S3BatchStore
from router.call.admission import Admission, Doors
from router.call.blaming import Blaming
from router.call.bodies import Bodies
from router.call.charges import Charges
from router.call.decider import Decider
from router.call.dispatch import Dispatcher
from router.call.documents import Documents
from router.call.gateway import Gateway
from router.call.identify import Identities, known_tenant
from router.call.lookup import Lookup
from router.call.mirrors import Mirrors
from router.call.models import Models
from router.call.placing import Placer
from router.call.prefill import FirstLegs
from router.call.prompts import PreparedModels, Prompts
from router.call.shedding import Shedding
from router.call.splits import Splits
from router.call.tracing import Tracing
from router.call.waking import Waking
from router.call.warming import GatewayWarmer
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.listener import ClusterListener
from router.fleet.feeds.feeds import Feeds
from router.fleet.feeds.folding import FoldingSink
from router.fleet.feeds.relay import Relay
from router.fleet.pools import PoolsInForce, rules_of
from router.later import Later
from router.operate.alerts import Alerts
from router.operate.audit.chain import Chain
from router.operate.audit.log import AuditLog
from router.operate.dashboard.board import Board
from router.operate.operations import Operations
from router.operate.telemetry.decision_log import DecisionLog
from router.operate.telemetry.telemetry import Telemetry
from router.operate.usage.recorder import UsageRecorder
from router.protocols.http.document_sets import computing_ask
from router.shared.documents.sets import DocumentSets
from router.shared.keys.ring import KeyRing
from router.shared.prefixes.prefixes import Prefixes
from router.shared.prefixes.warmer import Warmer
from router.shared.store.base import QuotaStore
from router.start.config_file import Contents
from router.start.identity import trust_issuers
from router.start.shared import key_store, once, quota_store, relay, replicas, set_store
from router.start.tls import pool_certificates, store_certificates
from router.text.engine_text import EngineText
from router.text.sources import Sources
from router.text.tokenize import Tokenizers
from tls.certificates import Certificates


class Parts(TypedDict, total=False):
    """Parts to use in place of the router's own: backends, clock, random numbers, health rules, quotas.

    `file` is the SLA file as it was read; it is watched for changes. Without it the config stays.
    `shadow` is a second file that decides beside it without effect; it is watched too. `shares_ports`: other processes
    of this machine listen at the same addresses.
    """

    backends: Callable[[CacheListener], Sequence[Backend]]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    rng: random.Random
    health: HealthRules
    file: Contents
    shadow: Contents
    quotas: QuotaStore
    tracing: Tracing
    shares_ports: bool
    later: Later


def build(config: Config, **parts: Unpack[Parts]) -> Operations:
    """The parts of a router for `config`, built and not started."""
    base, store_tls = _base(config, parts), store_certificates(config)
    cluster = _cluster(base, parts)
    beliefs = Beliefs(cluster.reports_cache, base.clock, cluster.__contains__)
    around = Surroundings(
        listener=beliefs.index,
        on_load=cluster.changed,
        on_leaving=cluster.hand_over,
        clock=base.clock,
        rng=base.rng,
        tls=pool_certificates(config),
        secrets=lambda: in_force().secrets,
    )

    def in_force() -> Config:
        return gateway.config

    def routers() -> int:
        return 1 if gateway.replicas is None else gateway.replicas.routers

    alerts = Alerts(
        lambda: in_force().alerts,
        unix_time=base.unix_time,
        once=once(config.store, store_tls),
        on_event=base.telemetry.event,
    )
    tokenizers = Tokenizers()
    sources = Sources(tokenizers, config.pools)
    waking = Waking(in_force, cluster, base.unix_time, on_waiting=base.telemetry.waking, on_event=base.telemetry.event)
    dispatcher = Dispatcher(cluster, config, base.clock, on_waiting=base.telemetry.waiting, waking=waking)
    prefixes = _prefixes(base, cluster, beliefs, GatewayWarmer(lambda: gateway))
    admission = Admission(
        parts.get("quotas") or quota_store(config, base.telemetry, routers, store_tls), on_near=alerts.near
    )
    fleet = PoolsInForce(
        config.pools,
        around,
        cluster,
        drain_s=lambda: in_force().server.drain_s,
        observer=base.telemetry.backends,
        on_failure=base.task_failed,
        backends=list(parts["backends"](beliefs.index)) if "backends" in parts else None,
    )
    keys = KeyRing(key_store(config, base.telemetry, store_tls), clock=base.unix_time, on_event=base.telemetry.event)
    feeds = _feeds(base, cluster, beliefs, relay(config.store, store_tls), in_force)
    prepared, text_lengths, document_uses = PreparedModels(cluster, sources), TextLengths(), DocumentUses()
    engine_text = EngineText(tokenizers.cache, base.clock)
    prompts = Prompts(cluster, prepared, sources, tokenizers, engine_text, text_lengths, feeds, base.rng)
    document_sets = DocumentSets(
        set_store(config.store, store_tls),
        prefixes,
        ask_of=computing_ask,
        tenant_of=lambda name: known_tenant(name, in_force()),
        backends_of=lambda model: sum(cluster.may_serve(name, model) for name in cluster.names()),
        now=base.unix_time,
        # not from the router's rng, as for prefixes
        by=uuid.uuid4().hex,
        on_failure=base.task_failed,
    )
    gateway = Gateway(
        config=config,
        cluster=cluster,
        beliefs=beliefs,
        bodies=Bodies(config.server.memory_bytes),
        tokenizers=tokenizers,
        sources=sources,
        engine_text=engine_text,
        admission=admission,
        keys=keys,
        observer=base.telemetry,
        doors=Doors(),
        shedding=Shedding(admission, on_event=base.telemetry.event),
        decider=Decider(
            cluster, fleet, base.clock, base.rng, shadow=parts["shadow"].config if "shadow" in parts else None
        ),
        dispatcher=dispatcher,
        placer=Placer(dispatcher, base.clock),
        waking=waking,
        models=Models(cluster, waking),
        prepared=prepared,
        prompts=prompts,
        documents=Documents(prompts, cluster, beliefs, document_sets, document_uses, base.clock),
        lookup=Lookup(cluster, beliefs, text_lengths, base.telemetry, base.clock),
        charges=Charges(cluster, base.clock, EndUsers(base.unix_time)),
        identities=Identities(keys, base.telemetry),
        lengths=AnswerLengths(),
        text_lengths=text_lengths,
        clock=base.clock,
        rng=base.rng,
        # 24 hex digits, without a call of ours
        ids=map("{:024x}".format, map(base.rng.getrandbits, repeat(96))),
        later=base.later,
        prefixes=prefixes,
        document_sets=document_sets,
        fleet=fleet,
        feeds=feeds,
        blaming=Blaming(Blame(), cluster, base.clock, base.telemetry),
        hedges=HedgeBudget(),
        document_uses=document_uses,
        first_legs=FirstLegs(cluster, base.clock),
        mirrors=Mirrors(dispatcher, cluster, base.clock, base.rng, on_ended=base.telemetry.mirrored),
        splits=Splits(base.clock, on_ended=base.telemetry.split, on_lost=lambda: base.telemetry.event("rolled_back")),
    )
    gateway.splits.follow(config.rules)
    trust_issuers(config, gateway, base.telemetry)()
    gateway.mirrors.follow(config.rules)
    board = Board(
        base.clock,
        lambda name: cluster.reports_cache(name) or beliefs.counts_cached(name),
    )
    usage, audit = _usage(base, in_force), _audit(base)
    operations = Operations(gateway, base.telemetry, board, alerts, usage, audit, _batches(base, gateway))
    _introduce(operations, store_tls)
    return operations


@dataclass(frozen=True, slots=True)
class _Base:
    """The inputs of all parts: config, clock, random numbers, telemetry, and what does the work that can wait."""

    config: Config
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    rng: random.Random
    telemetry: Telemetry
    later: Later

    def task_failed(self, *_: object) -> None:
        """Count the failure of a background task."""
        self.telemetry.event("task_failed")


def _base(config: Config, parts: Parts) -> _Base:
    clock, unix_time = parts.get("clock", time.monotonic), parts.get("unix_time", time.time)
    later = parts.get("later") or Later()
    telemetry = Telemetry(clock, tracing=parts.get("tracing"), unix_time=unix_time, later=later)
    if config.server.decision_log is not None:
        telemetry.decisions = DecisionLog(config.server.decision_log, on_dropped=telemetry.undecided)
    telemetry.config(config.version)
    return _Base(config, clock, unix_time, parts.get("rng") or random.Random(), telemetry, later)


def _usage(base: _Base, in_force: Callable[[], Config]) -> UsageRecorder | None:
    """What keeps the usage of this router, with the settings that it starts with."""
    settings = base.config.usage
    if settings is None:
        return None
    # SQLAlchemy takes a seventh of the time in which the other parts are imported
    from router.operate.usage.database import UsageDatabase

    def kind_of(pool: str) -> str:
        # a pool that is gone may have answered before
        spec = in_force().pools.get(pool)
        return "" if spec is None else spec.kind

    return UsageRecorder(
        UsageDatabase(settings.store),
        Path(settings.journal),
        kind_of=kind_of,
        currency=lambda: in_force().prices.currency,
        clock=base.clock,
        unix_time=base.unix_time,
        on_event=base.telemetry.event,
        keep_s=settings.keep_s,
    )


def _audit(base: _Base) -> AuditLog | None:
    """The audit log, with the settings that this router starts with."""
    settings = base.config.audit
    if settings is None:
        return None
    audit = AuditLog(
        Path(settings.file),
        Chain(None if settings.secret is None else settings.secret.encode()),
        file_bytes=settings.file_bytes,
        keep=settings.files,
        unix_time=base.unix_time,
        on_event=base.telemetry.event,
    )
    base.telemetry.on_refused = partial(audit.refused, "clients")
    return audit


def _batches(base: _Base, gateway: Gateway) -> Batches | None:
    """The batches of this router, if the file that it starts with has a place for them."""
    if base.config.batches is None:
        return None

    def settings() -> BatchSettings:
        assert gateway.config.batches is not None, "the section does not go away without a restart"
        return gateway.config.batches

    shelf = BatchShelf(_batch_store(base.config.batches, base.clock))
    room = LineRoom(lambda: gateway, most=lambda: settings().concurrent, slowdown=lambda: settings().slowdown)
    means = BatchMeans(
        gateway=lambda: gateway,
        shelf=shelf,
        storage=Storage(shelf, lambda: settings().max_storage_bytes),
        settings=settings,
        room=room,
        observer=base.telemetry.batches,
        unix_time=base.unix_time,
        # not the router's: two routers with one seed would make the same names
        rng=random.SystemRandom(),
        pace=Pace(),
    )
    return Batches(means)


def _batch_store(settings: BatchSettings, clock: Callable[[], float]) -> BatchStore:
    """Raises ConfigError."""
    if settings.s3 is None:
        return DirectoryStore(Path(settings.store))
    return S3BatchStore(settings.store, settings.s3, clock=clock)


def _cluster(base: _Base, parts: Parts) -> Cluster:
    pool_rules, prefill = rules_of(base.config.pools)
    if "health" in parts:
        pool_rules = {}
    rules = parts.get("health", HealthRules())
    return Cluster(
        clock=base.clock, rng=base.rng, rules=rules, pool_rules=pool_rules, prefill=prefill, later=base.later
    )


def _prefixes(base: _Base, cluster: Cluster, beliefs: Beliefs, warmer: Warmer) -> Prefixes:
    # not from the router's rng: two routers with one seed would take each other for themselves
    by = uuid.uuid4().hex
    return Prefixes(cluster, beliefs.index, warmer, by=by, now=base.unix_time, on_failure=base.task_failed)


def _feeds(
    base: _Base, cluster: Cluster, beliefs: Beliefs, relay: Relay | None, in_force: Callable[[], Config]
) -> Feeds:
    return Feeds(
        base.config.pools.values(),
        FoldingSink(
            beliefs,
            lambda name: _names_of(in_force(), cluster.backend(name)),
            lambda salt: any(tenant.domain == salt for tenant in in_force().tenants.values()),
            lambda name: isinstance(backend := cluster.backend(name), CacheSalter) and backend.sends_salts,
        ),
        relay=relay,
        clock=base.clock,
        rng=base.rng,
        on_failure=base.task_failed,
    )


def _introduce(operations: Operations, store_tls: Certificates | None) -> None:
    """Connect the parts that listen to each other."""
    gateway, telemetry = operations.gateway, operations.telemetry
    telemetry.listen(operations.board)
    if operations.usage is not None:
        telemetry.listen(operations.usage)
    if operations.batches is not None:
        telemetry.listen(operations.batches.room)
    gateway.beliefs.parity.listener = telemetry
    gateway.cluster.listen(telemetry.backends)
    gateway.cluster.listen(_Membership(gateway, telemetry))
    gateway.cluster.on_changed = gateway.dispatcher.changed
    gateway.replicas = replicas(gateway.config.store, gateway, telemetry, store_tls)


@dataclass(frozen=True, slots=True)
class _Membership(ClusterListener):
    """Tells the parts of `gateway` when backends join or leave its cluster."""

    gateway: Gateway
    telemetry: Telemetry

    def reached(self, backend: Backend) -> None:
        publisher = backend if isinstance(backend, EventPublisher) else None
        self.gateway.feeds.join(backend.name, backend.pool, backend.address, publisher)

    def health(self, backend: str, healthy: bool) -> None:
        if healthy:
            self.gateway.feeds.ask(backend)

    def computed(self, backend: str, keys: Sequence[int]) -> None:
        self.gateway.beliefs.computed(backend, keys)

    def gone(self, backend: str) -> None:
        # what its requests told and taught is forgotten with it, and not counted for it afterwards
        self.gateway.later.flush()
        sources = self.gateway.feeds.leave(backend)
        self.gateway.beliefs.forget(backend)
        self.telemetry.backends.forget(backend, sources)


def _names_of(config: Config, backend: Backend) -> frozenset[str]:
    """The names that `backend` gives its model, without adapters; empty if it was never reached."""
    # a backend may outlive its pool for a while
    pool, description = config.pools.get(backend.pool), backend.describe()
    if pool is None or description is None:
        return frozenset()
    named = frozenset(pool.models.get(name, name) for name in description.models)
    return named - description.adapters
