"""Checks before shards are loaded, which takes long: torch and the model are there, and addresses are free."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.pools import BUNDLED, PACKAGED
from policies.sla.server import OPEN
from policies.sla.usage import POSTGRES
from router.call.operators import asks_for_keys
from router.operate.telemetry.decision_log import STANDARD_OUTPUT
from router.start.address import Address, cannot_listen
from router.start.tls import (
    issuer_certificates,
    pool_certificates,
    port_certificates,
    ports_in_clear,
    store_certificates,
)


def require_startable(config: Config, *, shares_ports: bool = False) -> None:
    """Raise ConfigError with the first problem that would keep `config` from being served.

    `shares_ports`: other processes listen at the same addresses on purpose.
    """
    for check in _of_local_pools(config):
        check()
    if config.server.admin is not None:
        require_guarded(Address.parse(config.server.admin), config)
    if not shares_ports:
        _require_free(config)


def doubts_at_start(config: Config) -> Iterator[str]:
    """What would keep `config` from being served on this machine as it is now, or is doubtful then, in sentences.

    Ports that are taken are no doubt: they may be those of the router that is to be replaced.
    """
    checks: list[Callable[[], object]] = [
        *_of_local_pools(config),
        partial(port_certificates, config, lambda _: None),
        partial(pool_certificates, config),
        partial(issuer_certificates, config),
        partial(store_certificates, config),
        partial(_require_packages, config),
    ]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    yield from _folders_that_are_missing(config)
    yield from _shared_addresses(config)
    if in_clear := ports_in_clear(config):
        yield f"keys reach {' and '.join(in_clear)} in clear text: write server.tls, or let a proxy or mesh do TLS"


def _of_local_pools(config: Config) -> Iterator[Callable[[], None]]:
    models = {pool.name: pool.model or BUNDLED for pool in config.pools.values() if pool.local}
    if models:
        yield require_engine
    for pool, model in models.items():
        if model != BUNDLED:
            yield partial(_require_checkpoint, pool, Path(model))


def _require_packages(config: Config) -> None:
    """Raise ConfigError for a store that needs a package that is not here."""
    usage, batches = config.usage, config.batches
    if usage is not None and usage.store.startswith(POSTGRES) and importlib.util.find_spec("psycopg") is None:
        hint = "pip install 'pointsman[postgres]'"
        raise ConfigError("usage.store is a PostgreSQL, and psycopg is not installed", hint=hint)
    if batches is not None and batches.store.startswith("s3://") and importlib.util.find_spec("obstore") is None:
        raise ConfigError("batches.store is a bucket, and obstore is not installed", hint="pip install 'pointsman[s3]'")


def _folders_that_are_missing(config: Config) -> Iterator[str]:
    server, usage, audit, batches = config.server, config.usage, config.audit, config.batches
    files = {
        "server.decision_log": None if server.decision_log == STANDARD_OUTPUT else server.decision_log,
        "server.keys_file": server.keys_file,
        "audit.file": None if audit is None else audit.file,
        "usage.store": None if usage is None or "://" in usage.store else usage.store,
        "batches.store": None if batches is None or "://" in batches.store else batches.store,
    }
    for name, file in files.items():
        if file is None:
            continue
        folder = Path(file).absolute().parent
        if not folder.is_dir():
            yield f"{name} is {file}, and there is no folder {folder}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield f"{name} is {file}, and the folder {folder} cannot be written"


def _shared_addresses(config: Config) -> Iterator[str]:
    found: dict[str, str] = {}
    for name in ("http", "grpc", "admin", "picker", "metrics"):
        address = getattr(config.server, name)
        if address in (None, OPEN) or address.endswith(":0"):
            continue
        if address in found:
            yield f"server.{found[address]} and server.{name} are both {address}: only one can listen there"
        found[address] = name


def require_guarded(admin: Address, config: Config) -> None:
    """Raise ConfigError if the admin port is open to other machines without keys."""
    if not admin.is_loopback and not asks_for_keys(config):
        hint = "set server.admin_keys, or listen on 127.0.0.1"
        raise ConfigError(f"the admin port {admin} is open to other machines and has no keys", hint=hint)


def require_engine() -> None:
    """Raise ConfigError if our own engine cannot run here."""
    if importlib.util.find_spec("torch") is None:
        hint = "pip install 'pointsman[shard]', or list backends of other kinds"
        raise ConfigError("torch is not installed, and shards cannot run without it", hint=hint)


def _require_checkpoint(pool: str, path: Path) -> None:
    if not path.exists() and str(path) in PACKAGED:
        return
    if not path.exists():
        hint = "models are not downloaded: fetch one with `hf download ORG/NAME --local-dir ./NAME`"
        raise ConfigError(f"pool '{pool}' has the model {path}, which is not a directory", hint=hint)
    if path.suffix == ".gguf" and path.is_file():
        return
    if not (path / "config.json").is_file():
        hint = "a checkpoint is a directory with config.json, tokenizer.json and *.safetensors"
        raise ConfigError(f"pool '{pool}' has the model {path}, which has no config.json", hint=hint)


def _require_free(config: Config) -> None:
    server = config.server
    with ExitStack() as held:  # all at once: two of ours may be the same
        metrics = None if server.metrics == OPEN else server.metrics
        for text in (server.http, server.grpc, server.admin, server.picker, metrics):
            if text is not None:
                _hold(held, Address.parse(text))


def _hold(held: ExitStack, address: Address) -> None:
    try:
        family, *_, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return  # no socket to try it with; listening reports the error later
        raise cannot_listen(address, error) from error
