"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tls.settings import TlsSettings

if TYPE_CHECKING:
    from router.operate.admin_port import AdminPort

SlaFile = Annotated[Path, typer.Argument(metavar="FILE", help="The SLA file (YAML).", show_default=False)]

At = Annotated[str, typer.Option(metavar="URL", help="The router's HTTP address.")]
USUAL_AT = "http://127.0.0.1:8080"

AdminAt = Annotated[
    str, typer.Option("--admin", metavar="HOST:PORT", help="The router's address for operators; or a URL.")
]
USUAL_ADMIN = "127.0.0.1:8082"

Ca = Annotated[
    str | None, typer.Option("--ca", metavar="FILE", help="CAs of a router at an https:// URL; default: the system's.")
]
Cert = Annotated[str | None, typer.Option("--cert", metavar="FILE", help="Our certificate, if the port wants one.")]
CertKey = Annotated[str | None, typer.Option("--key", metavar="FILE", help="The certificate's private key.")]


def admin_port(admin: str, ca: str | None, cert: str | None, key: str | None) -> AdminPort:
    """The port of these options, with the operator's key of the environment. Raises ExpectedError."""
    from router.operate.admin_port import AdminPort

    return AdminPort.from_environment(admin, TlsSettings(cert, key, ca))
