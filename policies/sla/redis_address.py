"""The address of a Redis: one server, the primary that Sentinels name, or a cluster."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit


class RedisKind(enum.StrEnum):
    """What stands at an address."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`url` is redis-py's for one server. The `hosts` are Sentinels, which know the primary by the name `primary`, or
    some of the nodes of a cluster; `username`, `password` and `db` are those of the Redis servers.

    `place` tells addresses apart without user and password. Sentinels have the user and password `sentinel`.
    """

    kind: RedisKind
    place: str
    url: str = field(default="", repr=False)
    is_tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    primary: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel: tuple[str | None, str | None] = field(default=(None, None), repr=False)


_SCHEME = re.compile(r"(redis|rediss)(?:\+(sentinel|cluster))?://|unix://")
# urllib takes no list of hosts with an IPv6 address in it, since Python 3.14
_PARTS = re.compile(r"[^:]+://(?P<netloc>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?")
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\[\]:@]+)(?::(?P<port>[0-9]{1,5}))?")
_USUAL_PORTS = {RedisKind.SENTINEL: 26379, RedisKind.CLUSTER: 6379}


def read_address(url: str) -> RedisAddress:
    """The address that is written as `url`:

    - redis://user:password@host:6379/0, rediss:// with TLS, unix:///path: one server, or a Service in front of several
    - redis+sentinel://user:password@host:26379,host:26379/primary/0?sentinel_password=...: Sentinels
    - redis+cluster://user:password@host:6379,host:6379: nodes of a cluster

    Raises ValueError that says what is wrong, without showing a password.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise ValueError(
            "must be an address like redis://host:6379/0, redis+sentinel://host,host/primary or redis+cluster://host"
        )
    kind = RedisKind(scheme[2] or "server")
    if kind is RedisKind.SERVER:
        return _server(url)
    parts = _PARTS.match(url)
    assert parts is not None, "the scheme is known"
    user, _, places = parts["netloc"].rpartition("@")
    name, _, password = user.partition(":")
    hosts = tuple(_host(each, _USUAL_PORTS[kind]) for each in places.split(","))
    if len(set(hosts)) != len(hosts):
        raise ValueError("must name each host once")
    primary, db = _path(parts["path"], kind)
    options = dict(parse_qsl(parts["query"] or "", keep_blank_values=True))
    known = ("sentinel_username", "sentinel_password") if kind is RedisKind.SENTINEL else ()
    if unknown := sorted(options.keys() - set(known)):
        hint = f" (known: {', '.join(known)})" if known else ""
        raise ValueError(f"must not have the option '{unknown[0][:40]}'{hint}")
    shown = ",".join(sorted(f"{host}:{port}" for host, port in hosts))
    return RedisAddress(
        kind,
        place=f"{kind} {shown}/{primary}/{db}",
        is_tls=scheme[1] == "rediss",
        hosts=hosts,
        primary=primary,
        db=db,
        username=unquote(name) or None,
        password=unquote(password) or None,
        sentinel=(options.get("sentinel_username") or None, options.get("sentinel_password") or None),
    )


def _server(url: str) -> RedisAddress:
    try:
        parts = urlsplit(url)
    except ValueError:
        # urllib's own words repeat the password
        raise ValueError("must be an address like redis://user:password@host:6379/0") from None
    if url.startswith("unix://"):
        return RedisAddress(RedisKind.SERVER, f"{parts.path}?{parts.query}", url)
    if "," in parts.netloc.rpartition("@")[2]:
        raise ValueError("must name one host (several: redis+cluster://a,b or redis+sentinel://a,b/primary)")
    # redis-py would not name the file for an invalid port or database, or would use 0
    try:
        is_named = parts.port is None or parts.port > 0
    except ValueError:
        is_named = False
    if not is_named:
        raise ValueError("must have a port from 1 to 65535")
    if not re.fullmatch("/?|/[0-9]+", parts.path):
        raise ValueError("must end with the number of a database, such as /0")
    place = f"{parts.hostname}:{parts.port or 6379}/{parts.path.strip('/') or 0}"
    return RedisAddress(RedisKind.SERVER, place, url, is_tls=url.startswith("rediss://"))


def _host(text: str, usual_port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text.strip())
    if found is None:
        raise ValueError("must name its hosts as host:port,host:port")
    port = int(found["port"] or usual_port)
    if not 0 < port < 65536:
        raise ValueError("must have a port from 1 to 65535")
    return found["name"].strip("[]"), port


def _path(path: str, kind: RedisKind) -> tuple[str, int]:
    """The name of the primary, and the database."""
    if kind is RedisKind.CLUSTER:
        if path.strip("/") not in {"", "0"}:
            raise ValueError("must not name a database: a cluster has the database 0 alone")
        return "", 0
    found = re.fullmatch(r"/(?P<primary>[^/]+)(?:/(?P<db>[0-9]{0,5}))?", path)
    if found is None:
        raise ValueError("must end with the primary's name at the Sentinels, such as /mymaster or /mymaster/0")
    return unquote(found["primary"]), int(found["db"] or 0)
