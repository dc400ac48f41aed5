"""Checks before shards are loaded, which takes long: torch and the model are there, and addresses are free."""

from __future__ import annotations

import errno
import importlib.util
import socket
from contextlib import ExitStack
from pathlib import Path

from policies.errors import ConfigError
from policies.sla.config import Config
from policies.sla.pools import BUNDLED
from policies.sla.server import OPEN
from router.call.operators import asks_for_keys
from router.start.address import Address, cannot_listen


def require_startable(config: Config, *, shares_ports: bool = False) -> None:
    """Raise ConfigError with the first problem that would keep `config` from being served.

    `shares_ports`: other processes listen at the same addresses on purpose.
    """
    models = {pool.name: pool.model or BUNDLED for pool in config.pools.values() if pool.local}
    if models:
        require_engine()
    for pool, model in models.items():
        if model != BUNDLED:
            _require_checkpoint(pool, Path(model))
    if config.server.admin is not None:
        require_guarded(Address.parse(config.server.admin), config)
    if not shares_ports:
        _require_free(config)


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
    if not path.exists():
        hint = "models are not downloaded: fetch one with `hf download ORG/NAME --local-dir ./NAME`"
        raise ConfigError(f"pool '{pool}' has the model {path}, which is not a directory", hint=hint)
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
