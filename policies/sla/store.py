"""The section `store`: where several routers keep what they share."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from policies.quantities import quoted, read_count, read_yes
from policies.shapes import NAME_PATTERN, Key, Scalar, Table
from policies.sla.config import StoreSettings
from policies.sla.fields import Field
from policies.sla.secrets import REFERENCE_PATTERN, Outside

_SCHEMES = ("redis://", "rediss://", "unix://")

REDIS = Scalar(str, {"type": "string", "pattern": rf"^\s*((rediss?|unix)://\S+|{REFERENCE_PATTERN})\s*$"})

NAMESPACE = Scalar(str, {"type": "string", "pattern": rf"^\s*{NAME_PATTERN}\s*$"})

STORE = Table(
    {
        "redis": Key(REDIS, "redis://host:6379/0, rediss:// for TLS, or ${env:NAME} where it has a password"),
        "replicas": Key(read_count, "how many routers share it: each has its part while it is away; 1 without"),
        "strict": Key(read_yes, "true: while it is away, refuse what is limited rather than let too much through"),
        "namespace": Key(
            NAMESPACE, "what all keys there begin with, so that two deployments can use one Redis; pointsman"
        ),
    }
)


def read_store(field: Field | None, *, outside: Outside) -> StoreSettings:
    """What is shared and where; nothing without the section."""
    usual = StoreSettings()
    if field is None:
        return usual
    section = field.section(STORE)
    given, named = section.get("redis"), section.get("namespace")
    url = given.read(lambda text: _url(text, outside)) if given else None
    if given is None:
        field.complain("has no redis: name the server that the routers share")
    return StoreSettings(
        redis=url,
        replicas=section.read("replicas", usual.replicas),
        strict=section.read("strict", usual.strict),
        namespace=named.read(_namespace) or usual.namespace if named else usual.namespace,
    )


def _url(text: str, outside: Outside) -> str:
    url = outside.resolve(text)
    if not url.startswith(_SCHEMES):
        shown = text if text == url else "what it refers to"
        raise ValueError(f"must be an address like redis://host:6379/0, not {quoted(shown)}")
    if text == url and "@" in url:
        raise ValueError("must hold no password (write ${env:NAME} and put the whole address there)")
    _check_place(url)
    return url


def _namespace(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text.strip()):
        raise ValueError(f"must be letters, digits, '.', '_' and '-', not {quoted(text)}")
    return text.strip()


def _check_place(url: str) -> None:
    """Raise ValueError for a port or a database that is none: redis-py would not say which file has it, or take 0."""
    if url.startswith("unix://"):
        return
    try:
        parts = urlsplit(url)
        named = parts.port is None or parts.port > 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("has a port that is none: 1 to 65535")
    if not re.fullmatch("/?|/[0-9]+", parts.path):
        raise ValueError("must end with the number of a database, such as /0")
