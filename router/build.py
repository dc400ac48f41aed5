"""The composition root: every part of a router, put together and not started."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from backends.base import Backend, CacheListener
from backends.kinds import Surroundings
from policies.answer_length import AnswerLengths
from policies.config import Config
from policies.health import HealthRules
from router.admission import Admission
from router.beliefs import Beliefs
from router.cluster import Cluster
from router.config_file import Contents
from router.dashboard.board import Board
from router.decision_log import DecisionLog
from router.dispatch import Dispatcher
from router.doors import Doors
from router.feeds.feeds import Feeds
from router.feeds.folding import FoldingSink
from router.gateway import Gateway
from router.keys.ring import KeyRing
from router.pools import finding, named_backends
from router.prefixes.prefixes import Prefixes
from router.prefixes.warming import GatewayWarmer
from router.shared import key_store, quota_store, relay, replicas
from router.store.base import QuotaStore
from router.telemetry import Telemetry
from router.tokenize import Tokenizers
from router.tracing import Tracing


class Parts(TypedDict, total=False):
    """What may be given to a router instead of what it makes itself: backends, time, chance, health rules, quotas.

    `file` is what the SLA file said when it was read; it is watched for changes. Without it the config stays.
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


def build(config: Config, **parts: Unpack[Parts]) -> Gateway:
    """The parts of a router for `config`, put together and not started."""
    clock, unix_time = parts.get("clock", time.monotonic), parts.get("unix_time", time.time)
    telemetry = Telemetry(clock, tracing=parts.get("tracing"), unix_time=unix_time)
    if config.server.decision_log is not None:
        telemetry.decisions = DecisionLog(config.server.decision_log, on_dropped=telemetry.undecided)
    telemetry.config(config.version)
    beliefs = Beliefs(lambda name: cluster.tells_cache(name), clock)  # noqa: PLW0108 - the cluster is made below
    rng = parts.get("rng") or random.Random()
    # who reports does so once it was started, and by then there is a cluster
    surroundings = Surroundings(
        listener=beliefs.index,
        on_load=lambda name: cluster.changed(name),  # noqa: PLW0108
        clock=clock,
        rng=rng,
    )
    made = parts["backends"](beliefs.index) if "backends" in parts else tuple(named_backends(config, surroundings))

    def model_at(name: str) -> str | None:
        return _model_of(gateway.config, cluster.backend(name))

    def forget(name: str) -> None:
        sources = gateway.feeds.leave(name)
        beliefs.forget(name)
        telemetry.forget(name, sources)

    cluster = Cluster(
        made,
        clock=clock,
        rng=rng,
        rules=parts.get("health", HealthRules()),
        pool_rules={} if "health" in parts else {pool.name: pool.health for pool in config.pools.values()},
        on_health=telemetry.health,
        on_in_flight=telemetry.in_flight,
        on_predicted=telemetry.predicted,
        on_learnt=telemetry.learnt,
        on_reached=lambda backend: gateway.feeds.join(backend.name, backend.pool, backend.address),
        on_gone=forget,
    )
    gateway = Gateway(
        config=config,
        cluster=cluster,
        beliefs=beliefs,
        tokenizers=Tokenizers(),
        admission=Admission(parts.get("quotas") or quota_store(config, telemetry)),
        keys=KeyRing(key_store(config, telemetry), clock=unix_time, on_event=telemetry.event),
        telemetry=telemetry,
        board=Board(clock, lambda: gateway.config.prices),
        doors=Doors(),
        dispatcher=Dispatcher(cluster, lambda: gateway.config, clock, on_waiting=telemetry.waiting),
        lengths=AnswerLengths(),
        clock=clock,
        rng=rng,
        shadow=parts["shadow"].config if "shadow" in parts else None,
        prefixes=Prefixes(
            cluster,
            beliefs.index,
            GatewayWarmer(lambda: gateway),
            by=uuid.uuid4().hex,
            now=unix_time,
            on_failure=lambda: telemetry.event("task_failed"),
        ),
        finding=finding(
            config,
            surroundings,
            cluster=cluster,
            drain_s=lambda: gateway.config.server.drain_s,
            rng=rng,
            telemetry=telemetry,
        ),
        feeds=Feeds(
            config.pools.values(),
            FoldingSink(beliefs, model_at),
            relay=relay(config.store),
            clock=clock,
            rng=rng,
            on_failure=lambda _: telemetry.event("task_failed"),
        ),
    )
    telemetry.listen(gateway.board)
    cluster.heed(lambda _: gateway.dispatcher.changed())
    if config.store.redis is not None:
        gateway.replicas = replicas(config.store.redis, config.store.namespace, gateway)
    return gateway


def _model_of(config: Config, backend: Backend) -> str | None:
    """What `backend` calls its model; None if it has several, or was never reached."""
    pool, description = config.pools[backend.pool], backend.describe()
    served = description.models if description else frozenset()
    names = set(pool.models.values()) or ({pool.model} if pool.model else served)
    return next(iter(names)) if len(names) == 1 else None
