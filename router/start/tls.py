"""The certificates of a router: of its ports, for its pools, and for its store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from policies.errors import ConfigError
from policies.sla.config import Config
from router.call.operators import asks_for_keys
from router.start.address import Address
from tls.certificates import Certificates
from tls.errors import TlsError
from tls.settings import GRPC_ALPN, HTTP_ALPN

_ALPN = {"http": HTTP_ALPN, "admin": HTTP_ALPN, "grpc": GRPC_ALPN, "picker": GRPC_ALPN}


def port_certificates(config: Config, on_event: Callable[[str], None]) -> Mapping[str, Certificates]:
    """The certificates of each port with TLS, by its key in the file. `on_event` gets `tls_refused` for each failed
    handshake. Raises ConfigError for files that cannot be used.
    """
    with _as_config_errors():
        return {
            port: Certificates(
                settings,
                is_server=True,
                what=f"server.{port}",
                alpn=_ALPN[port],
                on_refused=lambda _: on_event("tls_refused"),
            )
            for port, settings in config.server.tls.items()
            if getattr(config.server, port) is not None
        }


def pool_certificates(config: Config) -> Mapping[str, Certificates]:
    """The certificates for the backends of each pool that has some, by the pool's name. Raises ConfigError for files
    that cannot be used.
    """
    with _as_config_errors():
        return {
            pool.name: Certificates(
                pool.tls,
                is_server=False,
                what=f"pool {pool.name}",
                alpn=GRPC_ALPN if pool.kind == "shard" else HTTP_ALPN,
            )
            for pool in config.pools.values()
            if pool.tls is not None
        }


def issuer_certificates(config: Config) -> Mapping[str, Certificates]:
    """The certificates for the connections to each issuer with a section `tls`, by its name. Raises ConfigError for
    files that cannot be used.
    """
    issuers = {} if config.identity is None else config.identity.issuers
    with _as_config_errors():
        return {
            issuer.name: Certificates(issuer.tls, is_server=False, what=f"issuer {issuer.name}", alpn=HTTP_ALPN)
            for issuer in issuers.values()
            if issuer.tls is not None
        }


def store_certificates(config: Config) -> Certificates | None:
    """The certificates for the store; None if redis-py's own defaults are to be used. Raises ConfigError for files that
    cannot be used.
    """
    if config.store.tls is None:
        return None
    with _as_config_errors():
        return Certificates(config.store.tls, is_server=False, what="store")


def ports_in_clear(config: Config) -> tuple[str, ...]:
    """The ports that take keys without TLS and that other machines can reach, as `name host:port` each."""
    server = config.server
    # the usual place for issued keys is no sign that there are any
    is_issued = server.keys_file is not None and (server.state is None or Path(server.keys_file).exists())
    is_open = is_issued or config.store.redis is not None or config.identity is not None
    has_keys = bool(config.tenant_by_key_hash) or is_open
    takes_keys = {"http": has_keys, "grpc": has_keys, "admin": asks_for_keys(config)}
    listening = ((port, getattr(server, port)) for port, takes in takes_keys.items() if takes)
    return tuple(
        f"{port} {address}"
        for port, address in listening
        if address is not None and port not in server.tls and not Address.parse(address).is_loopback
    )


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except TlsError as error:
        raise ConfigError(error.message, hint=error.hint) from error
