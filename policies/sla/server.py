"""The sections `server` and `queue`: the router's addresses and limits, and the queue's."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from policies.identity import IdentitySettings
from policies.keys import id_of
from policies.quantities import quoted, read_bytes, read_count, read_seconds
from policies.roles import Operator, OperatorRole
from policies.shapes import TEXT, Either, Key, Many, Scalar, Table, word
from policies.sla.fields import Field, Section
from policies.sla.identity import ROLE
from policies.sla.secrets import API_KEY, Outside
from policies.sla.tls import SERVER_TLS, read_ports
from tls.settings import TlsSettings


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The router's listening addresses and limits. Addresses are host:port; None turns that server off.

    `admin_key_hashes` are sha256 hex digests of the operators' keys, `operators` has those with a name or a role of
    their own. `decision_log` is a file, `-` standard output.
    `keys_file` stores issued keys if no Redis does. `state` is the folder for all that the file gives no other place,
    or `off`; None: the file does not say. Pages of `cors_origins` may call; `*` is any.
    `tls` has the settings of each port with TLS, by `http`, `grpc`, `admin` and `picker`.
    `media_hosts` are those that engines may fetch images and the like from; None: all but this machine.
    `metrics` is an address that serves them without a key, or "open": the HTTP address does. Strangers are clients
    without a known key: `strangers` of their connections may wait at one address, which may send `stranger_requests`
    in a second (None: any number); `trusted_proxies` are networks of load balancers, which are no such address.
    The bodies of all requests may take `memory_bytes` together.
    """

    http: str = "127.0.0.1:8080"
    grpc: str | None = "127.0.0.1:8081"
    admin: str | None = None
    picker: str | None = None
    admin_key_hashes: frozenset[str] = frozenset()
    operators: Mapping[str, Operator] = dataclasses.field(default_factory=dict)
    keys_file: str | None = None
    max_body_bytes: int = 16 * 2**20
    memory_bytes: int = 2**30
    max_concurrent: int = 4096
    max_queued: int = 4096
    drain_s: float = 30.0
    decision_log: str | None = None
    cors_origins: frozenset[str] = frozenset()
    media_hosts: frozenset[str] | None = None
    tls: Mapping[str, TlsSettings] = dataclasses.field(default_factory=dict)
    metrics: str | None = None
    strangers: int | None = 512
    stranger_requests: int | None = 50
    trusted_proxies: tuple[str, ...] = ()
    state: str | None = None


ADDRESS_PATTERN = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})"
_ADDRESS = re.compile(ADDRESS_PATTERN, re.ASCII)

OPEN = "open"

STATE_OFF = "off"
"""The state folder of a router that keeps nothing that its file gives no place."""

_LOOPBACK = ("127.0.0.1:", "localhost:", "[::1]:")

_OF_A_BODY = 32
"""A request may take a sixth of the memory, and a text of `max_body` bytes takes four to nine times as much."""

USUAL_AGEING_S = 30.0
USUAL_OUTAGE_S = 10.0


def read_address(text: str) -> str:
    """host:port. Raises ValueError with a sentence."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[1]) > 65535:
        raise ValueError(f"must be host:port, such as 127.0.0.1:8080, not {quoted(text)}")
    return text


ORIGIN_PATTERN = r"(?:\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s@*]+)"
_ORIGIN = re.compile(ORIGIN_PATTERN)


def read_origin(text: str) -> str:
    """A scheme, a host and perhaps a port, as browsers send them in `Origin`; * is any. Raises ValueError."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"must be scheme://host or scheme://host:port without a path, or '*', not {quoted(text)}")
    return text.lower()


ORIGIN = Scalar(read_origin, {"type": "string", "pattern": rf"^\s*{ORIGIN_PATTERN}\s*$"})

CORS = Table(
    {"origins": Key(Many(ORIGIN), "pages that may call, such as https://app.example.com; * is any", required=True)}
)

HOST_PATTERN = r"(?:\*\.)?[A-Za-z0-9_.:-]+"
_HOST = re.compile(HOST_PATTERN)


def read_host(text: str) -> str:
    """A host name or address, or `*.` and a domain. Raises ValueError."""
    if not _HOST.fullmatch(text):
        raise ValueError(f"must be a host such as cdn.example.com or *.example.com, not {quoted(text)}")
    return text.lower()


HOST = Scalar(read_host, {"type": "string", "pattern": rf"^\s*{HOST_PATTERN}\s*$"})

ADDRESS = Scalar(read_address, {"type": "string", "pattern": rf"^\s*{ADDRESS_PATTERN}\s*$"})


def read_network(text: str) -> str:
    """A network of IP addresses, or one address. Raises ValueError with a sentence."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(f"must be a network such as 10.0.0.0/8, or an address, not {quoted(text)}") from None


NETWORK = Scalar(read_network, {"type": "string", "pattern": r"^\s*[0-9A-Fa-f:.]+(/[0-9]{1,3})?\s*$"})

STRANGERS = Table(
    {
        "connections": Key(read_count, "connections of one address that may wait; default 512"),
        "requests_per_second": Key(read_count, "requests of one address; default 50"),
    }
)

ADMIN_KEY = Table(
    {
        "key": Key(API_KEY, "sha256: and 64 hex digits, ${env:NAME} or ${file:path}", required=True),
        "role": Key(ROLE, "viewer, operator or owner; default owner"),
        "name": Key(TEXT, "name of the operator in the audit log; default the key's id"),
    }
)

SERVER = Table(
    {
        "http": Key(ADDRESS, "HTTP address; default 127.0.0.1:8080"),
        "grpc": Key(Either((word("off"), ADDRESS)), "gRPC address, or off; default 127.0.0.1:8081"),
        "admin": Key(ADDRESS, "address for operators; default none"),
        "picker": Key(ADDRESS, "address where gateways ask for an endpoint (Envoy's ext_proc); default none"),
        "metrics": Key(
            Either((word("open"), ADDRESS)),
            "address for GET /metrics without a key, or open: the HTTP address; default operators' keys only",
        ),
        "strangers": Key(
            Either((word("off"), STRANGERS)), "limits of each address for clients without a known key, or off"
        ),
        "trusted_proxies": Key(Many(NETWORK), "load balancers: their X-Forwarded-For names the client; default none"),
        "admin_keys": Key(
            Many(Either((API_KEY, ADMIN_KEY))),
            "the operators' keys, as sha256:... or ${env:NAME}, alone or as {key: ..., role: ...}; not needed on "
            "127.0.0.1",
        ),
        "keys_file": Key(TEXT, "file for the hashes of issued keys; store.redis replaces it"),
        "state": Key(
            Either((word("off"), TEXT)),
            "folder for usage, issued keys, the audit log, batches and budgets that have no other place, or off; "
            "default below $STATE_DIRECTORY or $XDG_STATE_HOME",
        ),
        "max_body": Key(read_bytes, "the largest request body; default 16MiB"),
        "memory": Key(
            read_bytes, "memory for the bodies of all requests of a router process; default 1GiB, or 64 times max_body"
        ),
        "max_concurrent": Key(read_count, "requests that may be at backends at once; default 4096"),
        "decision_log": Key(TEXT, "file for the log of decisions, - is standard output; default none"),
        "drain": Key(read_seconds, "time that running requests get after SIGTERM; default 30s"),
        "media_hosts": Key(
            Either((word("none"), Many(HOST))),
            "hosts that engines may fetch images and the like from, or none; default all but this machine",
        ),
        "tls": Key(SERVER_TLS, "certificates of the ports; default: plain text"),
        "cors": Key(CORS, "web pages that may call over HTTP; default none"),
    }
)

FIXED_SERVER = {
    "http": "http",
    "grpc": "grpc",
    "admin": "admin",
    "picker": "picker",
    "metrics": "metrics",
    "keys_file": "keys_file",
    "state": "state",
    "max_body": "max_body_bytes",
    "decision_log": "decision_log",
    "tls": "tls",
}
"""Keys of `server` that are built into the running servers, so that a change needs a restart, and their settings."""

QUEUE = Table(
    {
        "ageing": Key(read_seconds, "waiting time after which a request counts as one rank better; default 30s"),
        "most": Key(read_count, "requests that may wait; default 4096"),
        "outage": Key(
            read_seconds, "how long a request waits while no backend that could take it is well; default 10s"
        ),
    }
)


def read_server(field: Field | None, *, queue: Section, outside: Outside) -> ServerSettings:
    """The router's addresses and limits, with a default for each."""
    section = field.section(SERVER) if field else Section({}, SERVER.keys)
    usual = ServerSettings()
    strangers, stranger_requests = _read_strangers(section.get("strangers"), usual)
    operators = _read_operators(section, outside)
    max_body_bytes = section.read("max_body", usual.max_body_bytes)
    return ServerSettings(
        http=section.read("http", usual.http),
        grpc=_read_grpc(section.get("grpc"), usual.grpc),
        admin=section.read("admin", usual.admin),
        picker=section.read("picker", usual.picker),
        metrics=_read_metrics(section.get("metrics")),
        strangers=strangers,
        stranger_requests=stranger_requests,
        trusted_proxies=tuple(item.read(read_network) or "" for item in section.items("trusted_proxies")),
        admin_key_hashes=frozenset(operators),
        operators={digest: operator for digest, operator in operators.items() if operator is not None},
        keys_file=section.read("keys_file", usual.keys_file),
        state=_read_state(section.get("state")),
        max_body_bytes=max_body_bytes,
        memory_bytes=_read_memory(section, max_body_bytes),
        max_concurrent=section.read("max_concurrent", usual.max_concurrent),
        max_queued=queue.read("most", usual.max_queued),
        drain_s=section.read("drain", usual.drain_s),
        decision_log=section.read("decision_log", usual.decision_log),
        media_hosts=_read_media_hosts(section),
        tls=read_ports(section),
        cors_origins=frozenset(section.section("cors").read_many("origins")),
    )


def require_guarded(field: Field | None, identity: IdentitySettings | None) -> None:
    """Complain if the section `server` opens the admin port to other machines and no operator has a key or a role."""
    admin = field.find("admin") if field else None
    if field is None or admin is None or admin.path == field.path or str(admin.node.value).startswith(_LOOPBACK):
        return
    has_keys = field.find("admin_keys").path != field.path
    if not has_keys and not (identity is not None and identity.gives_roles):
        admin.complain("can be reached from other machines but has no keys (write admin_keys, or use 127.0.0.1)")


def _read_operators(section: Section, outside: Outside) -> dict[str, Operator | None]:
    """The operators' keys by hash, and the operators of those with a role or a name."""
    found: dict[str, Operator | None] = {}
    for item in section.items("admin_keys"):
        entry = item.section(ADMIN_KEY) if isinstance(item.node.value, dict) else None
        key = item if entry is None else entry.get("key")
        digest = None if key is None else key.read(outside.key_hash)
        operator = None
        if entry is not None and digest is not None:
            operator = Operator(entry.read("name", id_of(digest)), entry.read("role", OperatorRole.OWNER))
        if digest is not None and digest in found and found[digest] != operator:
            item.complain("the same key is here twice (remove one, so that its role is clear)")
        if digest is not None:
            found[digest] = operator
    return found


def _read_memory(section: Section, max_body_bytes: int) -> int:
    usual, least = max(ServerSettings().memory_bytes, 2 * _OF_A_BODY * max_body_bytes), _OF_A_BODY * max_body_bytes
    memory = section.read("memory", usual)
    field = section.get("memory")
    if field is not None and memory < least:
        field.complain(f"is too little for requests of max_body (at least {_OF_A_BODY} times as much)")
    return memory


def _read_metrics(field: Field | None) -> str | None:
    if field is None or field.node.value == OPEN:
        return None if field is None else OPEN
    return field.read(read_address)


def _read_strangers(field: Field | None, usual: ServerSettings) -> tuple[int | None, int | None]:
    """Connections, and requests in a second, of one address; None for any number."""
    if field is None:
        return usual.strangers, usual.stranger_requests
    if field.node.value == "off":
        return None, None
    limits = field.section(STRANGERS)
    return limits.read("connections", usual.strangers), limits.read("requests_per_second", usual.stranger_requests)


def _read_state(field: Field | None) -> str | None:
    if field is None or field.node.value == STATE_OFF:
        return None if field is None else STATE_OFF
    return field.read(str)


def _read_media_hosts(section: Section) -> frozenset[str] | None:
    field = section.get("media_hosts")
    if field is None or field.node.value == "none":
        return None if field is None else frozenset()
    return frozenset(host for item in section.items("media_hosts") if (host := item.read(read_host)))


def _read_grpc(field: Field | None, usual: str | None) -> str | None:
    if field is None or field.node.value == "off":
        return usual if field is None else None
    return field.read(read_address) or usual
