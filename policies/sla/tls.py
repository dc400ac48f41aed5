"""The sections `tls`: of the router's ports, of a pool, and of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies.shapes import TEXT, Either, Key, Many, Scalar, Table, word
from policies.sla.fields import Field, Section
from tls.settings import PIN_PATTERN, VERSIONS, TlsSettings, read_pin

PORTS = ("http", "grpc", "admin", "picker")
"""The router's ports, by their keys in `server`."""

PIN = Scalar(read_pin, {"type": "string", "pattern": rf"^\s*{PIN_PATTERN}\s*$"})


def read_version(text: str) -> str:
    """The lowest version of TLS. Raises ValueError."""
    if text not in VERSIONS:
        raise ValueError(f"must be {' or '.join(VERSIONS)}, not '{text}'")
    return text


VERSION = Scalar(read_version, {"enum": [*VERSIONS, *map(float, VERSIONS)]})

_COMMON = {
    "cert": Key(TEXT, "file with the certificate and its chain, in PEM; read again when it changes"),
    "key": Key(TEXT, "file with the certificate's private key, in PEM without a passphrase"),
    "min_version": Key(VERSION, "lowest version of TLS, 1.2 or 1.3; default 1.2"),
}

_PORT = {
    **_COMMON,
    "client_ca": Key(TEXT, "file with CAs: clients must have a certificate of one of them; default: clients need none"),
    "pins": Key(Many(PIN), "sha256:... of the public keys that clients may have; default: any with a certificate"),
}

SERVER_TLS = Table(
    {
        **_PORT,
        "ports": Key(
            Table({port: Key(Either((word("off"), Table(_PORT))), f"for {port} alone, or off") for port in PORTS}),
            "what is different for http, grpc, admin or picker",
        ),
    }
)

CLIENT_TLS = Table(
    {
        **_COMMON,
        "ca": Key(TEXT, "file with the CAs that issue the server's certificate; default: the system's"),
        "pins": Key(Many(PIN), "sha256:... of the public keys that the server may have; default: any"),
        "name": Key(TEXT, "name in the server's certificate; default: the host that it is reached at"),
    }
)


def read_ports(section: Section) -> Mapping[str, TlsSettings]:
    """The settings of each port with TLS, from the section `server`."""
    field = section.get("tls")
    if field is None:
        return {}
    common = section.section("tls")
    usual, ports = _settings(common, TlsSettings()), common.section("ports")
    found: dict[str, TlsSettings] = {}
    for port in PORTS:
        own = ports.get(port)
        if own is not None and own.node.value == "off":
            continue
        settings = usual if own is None else _settings(own.section(Table(_PORT)), usual)
        _check_pair(own or field, settings, needed=True)
        if settings.pins and settings.ca is None:
            (own or field).complain("has pins and no client_ca (pins are for clients with a certificate of that CA)")
        found[port] = settings
    return found


def read_client(field: Field | None) -> TlsSettings | None:
    """The settings for connections to the servers of a pool, or to the store; None without a section."""
    if field is None:
        return None
    settings = _settings(field.section(CLIENT_TLS), TlsSettings())
    _check_pair(field, settings, needed=False)
    return settings


def _settings(section: Section, usual: TlsSettings) -> TlsSettings:
    return replace(
        usual,
        cert=section.read("cert", usual.cert),
        key=section.read("key", usual.key),
        ca=section.read("client_ca" if "client_ca" in section.known else "ca", usual.ca),
        pins=frozenset(section.read_many("pins")) or usual.pins,
        min_version=section.read("min_version", usual.min_version),
        name=section.read("name", usual.name) if "name" in section.known else usual.name,
    )


def _check_pair(field: Field, settings: TlsSettings, *, needed: bool) -> None:
    for name, file in (("cert", settings.cert), ("key", settings.key)):
        if file is None and (needed or settings.cert is not settings.key) and field.is_sound():
            field.complain(f"has no {name} (write {name}: and the path of a file in PEM)")
