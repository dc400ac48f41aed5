"""Settings of the command line that override the SLA file."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import replace

from policies.quantities import read_count
from policies.sla.config import Config
from router.start.address import Address

USUAL_ADMIN = "127.0.0.1:8082"
"""Default address of the admin port with `pointsman up`."""


def listening(
    config: Config,
    http: str | None,
    grpc: str | None,
    admin: str | None,
    picker: str | None = None,
    metrics: str | None = None,
    *,
    usual_admin: bool = False,
) -> Config:
    """`config` with the addresses of the command line. With `usual_admin` the admin port is served even if the file
    names none, so that the dashboard is there by default.

    It then takes a free port if the usual one is taken, so that two routers can start on one machine.
    """
    operators = admin or config.server.admin or (usual_or_free(USUAL_ADMIN) if usual_admin else None)
    server = replace(
        config.server,
        http=http or config.server.http,
        grpc=None if grpc == "off" else grpc or config.server.grpc,
        admin=None if operators == "off" else operators,
        picker=picker or config.server.picker,
        metrics=metrics or config.server.metrics,
    )
    return replace(config, server=server)


def logging_decisions(config: Config, to: str | None) -> Config:
    """`config` with the decision log of the command line."""
    return config if to is None else replace(config, server=replace(config.server, decision_log=to))


def usual_or_free(address: str) -> str:
    """`address`, or another port of its host if that is taken, because it is only a default."""
    wanted = Address.parse(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((wanted.host, wanted.port))
        except OSError:
            return str(Address(wanted.host, 0))
    return address


def read_pair(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`. Raises ValueError with a sentence."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ValueError(f"'{text}' is not NAME=VALUE")
    return name, value


def read_counts(texts: Iterable[str]) -> dict[str, int]:
    """Counts by name, of texts like `own=8,spot=2`. Raises ValueError with a sentence."""
    return {name: read_count(value) for text in texts for name, value in map(read_pair, text.split(","))}
