"""The parts that routers share through the file's Redis, or local substitutes without one."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from policies.sla.config import Config
from policies.sla.redis_address import RedisKind, read_address
from policies.sla.server import STATE_OFF
from policies.sla.store import StoreSettings
from router.call.gateway import Gateway
from router.fleet.feeds.relay import Relay
from router.operate.telemetry.telemetry import Telemetry
from router.shared.documents.base import SetStore
from router.shared.documents.memory import MemorySets
from router.shared.keys.base import KeyStore
from router.shared.keys.file import FileKeys
from router.shared.store.base import QuotaStore
from router.shared.store.debts import DebtFile
from router.shared.store.levels_file import LevelsFile
from router.shared.store.memory import MemoryStore
from router.shared.store.spread import SpreadStore
from router.start.state import BUDGETS
from tls.certificates import Certificates

if TYPE_CHECKING:
    from router.shared.once import Once
    from router.shared.replicas.replicas import Replicas


def quota_store(
    config: Config, telemetry: Telemetry, routers: Callable[[], int], certificates: Certificates | None = None
) -> QuotaStore:
    """Where quotas are counted: in one Redis or in several, or in memory for this router alone, and kept in its state
    folder. `routers` counts those that are known."""
    shared = config.store
    if shared.redis is None:
        state = config.server.state
        file = None if state in {None, STATE_OFF} else LevelsFile(Path(state) / BUDGETS)
        return MemoryStore(time.time, file, on_event=telemetry.event)
    # imported late: a router that shares nothing starts without redis-py and its dependencies
    from router.shared.store.advances import AdvanceStore
    from router.shared.store.guarded import GuardedStore, GuardOptions
    from router.shared.store.redis import RedisStore

    options = GuardOptions(replicas=shared.replicas, strict=shared.strict)
    stores = {
        read_address(url).place: AdvanceStore(
            GuardedStore(
                RedisStore(url, prefix=shared.namespace, certificates=certificates),
                clock=time.time,
                options=options,
                on_event=telemetry.event,
                routers=routers,
                file=DebtFile(_journal(shared), read_address(url).place),
            )
        )
        for url in shared.quotas or (shared.redis,)
    }
    return SpreadStore(stores) if len(stores) > 1 else next(iter(stores.values()))


def once(shared: StoreSettings, certificates: Certificates | None = None) -> Once | None:
    """What only one of the routers does that share a Redis; None for a router that shares nothing."""
    if shared.redis is None:
        return None
    from router.shared.once import Once

    return Once(shared.redis, prefix=f"{_prefix(shared)}:once:", certificates=certificates)


def relay(shared: StoreSettings, certificates: Certificates | None = None) -> Relay | None:
    """Relays cache events that an engine gives to one reader only; None for a router that shares nothing."""
    if shared.redis is None:
        return None
    from router.shared.replicas.feed_relay import RedisRelay

    return RedisRelay(shared.redis, prefix=f"{_prefix(shared)}:feeds:", certificates=certificates)


def key_store(config: Config, telemetry: Telemetry, certificates: Certificates | None = None) -> KeyStore | None:
    """Where issued keys are kept: in a file, or in Redis; None if none can be issued."""
    shared = config.store
    if config.server.keys_file is not None:
        return FileKeys(config.server.keys_file)
    if shared.redis is None:
        return None
    from router.shared.keys.redis import RedisKeys

    return RedisKeys(shared.redis, key=f"{_prefix(shared)}:keys", on_event=telemetry.event, certificates=certificates)


def set_store(shared: StoreSettings, certificates: Certificates | None = None) -> SetStore:
    """Where document sets are stored: in Redis for all routers, or in memory for this one alone."""
    if shared.redis is None:
        return MemorySets()
    from router.shared.documents.redis import RedisSets

    return RedisSets(shared.redis, prefix=f"{_prefix(shared)}:", certificates=certificates)


def replicas(
    shared: StoreSettings, gateway: Gateway, telemetry: Telemetry, certificates: Certificates | None = None
) -> Replicas | None:
    """The exchange of `gateway` with the other routers of its cell, not started; None without a Redis."""
    url, key = shared.redis, f"{_prefix(shared)}:replicas"
    if url is None:
        return None
    if shared.cell is not None:
        key = f"{_prefix(shared)}:cell:{shared.cell}:replicas"
    from router.shared.replicas.replicas import Replicas
    from router.shared.replicas.shelf import RedisShelf
    from router.shared.replicas.stream import RedisStream

    # not from the router's rng: two routers with one seed would take each other for themselves
    by = uuid.uuid4().hex
    replicas = Replicas(
        RedisStream(url, by, key=key, certificates=certificates),
        RedisShelf(url, key=f"{key}:snapshot", certificates=certificates),
        by,
        beliefs=gateway.beliefs,
        cluster=gateway.cluster,
        clock=gateway.clock,
        on_event=telemetry.event,
        on_state=telemetry.replicas,
        on_prefix=gateway.prefixes.hear,
    )
    gateway.prefixes.share(replicas.tell, replicas.catch_up)
    return replicas


def _prefix(shared: StoreSettings) -> str:
    """The beginning of all keys but those of quotas. In a cluster it is a hash tag: commands on several keys need them
    in one slot. A ledger's keys have its own tag, so that ledgers spread over the cluster."""
    is_cluster = shared.redis is not None and read_address(shared.redis).kind is RedisKind.CLUSTER
    return f"{{{shared.namespace}}}" if is_cluster else shared.namespace


def _journal(shared: StoreSettings) -> Path:
    """The folder for what is owed to the store: of this user alone, and by default in one that can be written also in
    a container."""
    if shared.journal is not None:
        return Path(shared.journal)
    return Path(tempfile.gettempdir()) / f"{shared.namespace}-owed-{os.geteuid()}"
