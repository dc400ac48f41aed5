"""The section `store`: the store that several routers share."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from policies.quantities import quoted, read_count, read_yes
from policies.shapes import NAME_PATTERN, Key, Scalar, Table
from policies.sla.config import StoreSettings
from policies.sla.fields import Field
from policies.sla.secrets import REFERENCE_PATTERN, Outside
from policies.sla.tls import CLIENT_TLS, read_client

_SCHEMES = ("redis://", "rediss://", "unix://")

REDIS = Scalar(str, {"type": "string", "pattern": rf"^\s*((rediss?|unix)://\S+|{REFERENCE_PATTERN})\s*$"})

NAMESPACE = Scalar(str, {"type": "string", "pattern": rf"^\s*{NAME_PATTERN}\s*$"})

STORE = Table(
    {
        "redis": Key(REDIS, "redis://host:6379/0, rediss:// for TLS, or ${env:NAME} if it has a password"),
        "replicas": Key(
            read_count, "least number of routers that share it, which sets their parts while it is away; default 1"
        ),
        "tls": Key(CLIENT_TLS, "certificates for rediss://; default: the system's CAs, and none of ours"),
        "strict": Key(read_yes, "true: while it is away, reject limited requests rather than admit too many"),
        "namespace": Key(
            NAMESPACE, "prefix of all keys there, so that two deployments can use one Redis; default pointsman"
        ),
    }
)


def read_store(field: Field | None, *, outside: Outside) -> StoreSettings:
    """The shared store; nothing is shared without the section."""
    usual = StoreSettings()
    if field is None:
        return usual
    section = field.section(STORE)
    given, named = section.get("redis"), section.get("namespace")
    url = given.read(lambda text: _url(text, outside)) if given else None
    if given is None:
        field.complain("has no redis: write the address of the server that the routers share")
    tls = read_client(section.get("tls"))
    if tls is not None and url is not None and not url.startswith("rediss://"):
        section.entries["tls"].complain("is for rediss:// addresses alone (write rediss://, or leave tls out)")
    return StoreSettings(
        redis=url,
        replicas=section.read("replicas", usual.replicas),
        strict=section.read("strict", usual.strict),
        namespace=named.read(_namespace) or usual.namespace if named else usual.namespace,
        tls=tls,
    )


def _url(text: str, outside: Outside) -> str:
    url = outside.resolve(text)
    if not url.startswith(_SCHEMES):
        shown = text if text == url else "the value that it refers to"
        raise ValueError(f"must be an address like redis://host:6379/0, not {quoted(shown)}")
    if text == url and "@" in url:
        raise ValueError("must not contain a password (write ${env:NAME} and put the whole address there)")
    _check_place(url)
    return url


def _namespace(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text.strip()):
        raise ValueError(f"must be letters, digits, '.', '_' and '-', not {quoted(text)}")
    return text.strip()


def _check_place(url: str) -> None:
    """Raise ValueError for an invalid port or database: redis-py would not name the file, or would use 0."""
    if url.startswith("unix://"):
        return
    try:
        parts = urlsplit(url)
        named = parts.port is None or parts.port > 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("must have a port from 1 to 65535")
    if not re.fullmatch("/?|/[0-9]+", parts.path):
        raise ValueError("must end with the number of a database, such as /0")
