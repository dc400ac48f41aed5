"""The section `store`: the store that several routers share."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from policies.quantities import quoted, read_count, read_yes
from policies.shapes import NAME_PATTERN, TEXT, Key, Many, Scalar, Table
from policies.sla.fields import Field, Section
from policies.sla.redis_address import read_address
from policies.sla.secrets import REFERENCE_PATTERN, Outside
from policies.sla.tls import CLIENT_TLS, read_client
from tls.settings import TlsSettings


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """State that several routers share: the address of a Redis (None: nothing is shared), and the number of `replicas`.

    `strict` rejects limited requests while the store is away, instead of using each router's share. The names
    of all keys there begin with `namespace`. `tls` is for connections to it. `quotas` has the addresses of the servers
    that count quotas, each for a part of the tenants; without any it is `redis`. Only routers of one `cell` share
    news; quotas and issued keys are those of all cells. `journal` is a folder for what quotas owe while the store is
    away; None: one of the user in the folder for temporary files.
    """

    redis: str | None = dataclasses.field(default=None, repr=False)
    replicas: int = 1
    strict: bool = False
    namespace: str = "pointsman"
    tls: TlsSettings | None = None
    quotas: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    cell: str | None = None
    journal: str | None = None


REDIS = Scalar(
    str, {"type": "string", "pattern": rf"^\s*((rediss?(\+(sentinel|cluster))?|unix)://\S+|{REFERENCE_PATTERN})\s*$"}
)

NAMESPACE = Scalar(str, {"type": "string", "pattern": rf"^\s*{NAME_PATTERN}\s*$"})

STORE = Table(
    {
        "redis": Key(
            REDIS,
            "redis://host:6379/0, redis+sentinel://host,host/primary or redis+cluster://host,host; rediss for TLS; "
            "or ${env:NAME} if it has a password",
        ),
        "replicas": Key(
            read_count, "least number of routers that share it, which sets their parts while it is away; default 1"
        ),
        "tls": Key(CLIENT_TLS, "certificates for rediss://; default: the system's CAs, and none of ours"),
        "strict": Key(read_yes, "true: while it is away, reject limited requests rather than admit too many"),
        "namespace": Key(
            NAMESPACE, "prefix of all keys there, so that two deployments can use one Redis; default pointsman"
        ),
        "quotas": Key(
            Many(REDIS), "addresses of servers that count quotas, each for a part of the tenants; default redis"
        ),
        "journal": Key(
            TEXT, "a folder for what quotas do not have yet while it is away; default NAMESPACE-owed-UID in /tmp"
        ),
        "cell": Key(NAMESPACE, "only routers of one cell share news; quotas and keys are those of all cells"),
    }
)


def read_store(field: Field | None, *, outside: Outside) -> StoreSettings:
    """The shared store; nothing is shared without the section."""
    usual = StoreSettings()
    if field is None:
        return usual
    section = field.section(STORE)
    given, named, cell = section.get("redis"), section.get("namespace"), section.get("cell")
    url = given.read(lambda text: _url(text, outside)) if given else None
    quotas = _quotas(section, outside)
    if given is None:
        field.complain("has no redis: write the address of the server that the routers share")
    tls = read_client(section.get("tls"))
    if tls is not None and any(not read_address(each).is_tls for each in (*([url] if url else []), *quotas)):
        section.entries["tls"].complain("is for rediss:// addresses alone (write rediss://, or leave tls out)")
    if cell is not None and "replicas" not in section:
        cell.doubt(
            "counts on replicas: while Redis is away, each router's part of a limit follows from the number of all"
        )
    return StoreSettings(
        redis=url,
        replicas=section.read("replicas", usual.replicas),
        strict=section.read("strict", usual.strict),
        namespace=named.read(_namespace) or usual.namespace if named else usual.namespace,
        tls=tls,
        quotas=quotas,
        cell=cell.read(_namespace) if cell else None,
        journal=section.read_any("journal"),
    )


def _quotas(section: Section, outside: Outside) -> tuple[str, ...]:
    places: list[str] = []
    urls: list[str] = []
    for field in section.items("quotas"):
        url = field.read(lambda text: _url(text, outside))
        if url is None:
            continue
        if (place := read_address(url).place) in places:
            field.complain("names a server twice (each one counts the quotas of its own part of the tenants)")
        places.append(place)
        urls.append(url)
    return tuple(urls)


def _url(text: str, outside: Outside) -> str:
    # of the scheme that may have TLS
    url = outside.resolve(text, lambda name: f"rediss://{name}:6379/0")
    if text == url and ("@" in url or "password=" in url):
        raise ValueError("must not contain a password (write ${env:NAME} and put the whole address there)")
    try:
        read_address(url)
    except ValueError as error:
        shown = text if text == url else "the value that it refers to"
        raise ValueError(f"{error}, not {quoted(shown)}") from error
    return url


def _namespace(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text.strip()):
        raise ValueError(f"must be letters, digits, '.', '_' and '-', not {quoted(text)}")
    return text.strip()
