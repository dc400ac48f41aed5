"""One side of TLS: the certificate that it shows, and those that it accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSIONS = ("1.2", "1.3")
"""Versions of TLS that may be the lowest."""

GRPC_ALPN = ("h2",)
"""Protocols inside TLS that clients of gRPC expect to be agreed on."""

HTTP_ALPN = ("http/1.1",)
"""Those of HTTP/1.1."""

PIN_PATTERN = "[Ss][Hh][Aa]256:[0-9A-Fa-f]{64}"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The files of one side, all in PEM, and its rules.

    `cert` with its chain and `key` are shown to the other side; a client needs none. `ca` issues the other side's
    certificates: a server with it accepts only clients with such a certificate, a client without it trusts the
    system's authorities. With `pins` the other side's key must be one of them: sha256 in hex, of its public key (DER,
    SubjectPublicKeyInfo). A client expects `name` in the server's certificate instead of the name that it connects to.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    pins: frozenset[str] = frozenset()
    min_version: str = "1.2"
    name: str | None = None


def read_pin(text: str) -> str:
    """The digest in `sha256:<64 hexadecimal digits>`, in lower case. Raises ValueError with a sentence."""
    if not re.fullmatch(PIN_PATTERN, text.strip()):
        raise ValueError(f"must be sha256: and 64 hexadecimal digits, not '{text}'")
    return text.strip().lower().removeprefix("sha256:")
