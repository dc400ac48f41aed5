"""Config: the content of an SLA file, validated and ready to use. Immutable; a changed file makes a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.aliases import Alias
from policies.compose import Policy
from policies.health import HealthRules
from policies.identity import IdentitySettings
from policies.nouns import ServiceClass, Tenant
from policies.on_miss import Step
from policies.quota.prices import PriceList
from policies.roles import Operator
from policies.rules import Rule
from policies.sla.sources import SourceName
from policies.wake import Wake
from tls.settings import TlsSettings

AT_HOST_AND_PORT = frozenset({"shard", "fake"})
"""Kinds with addresses of the form host:port; the others have a URL."""

BUNDLED = "bundled"
"""The model that comes with Pointsman, as `PoolSpec.model`."""

Option = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Backends of one kind that serve one model.

    `at` are their addresses; `sources` discover more at run time; with `register` backends announce
    themselves. `health` defines when one counts as ill. `pointsman up` starts `local` shard processes beside the
    router, with `model`: a checkpoint's path or "bundled". Otherwise `model` is the name that clients and
    backend both use, and `models` maps clients' names to the backend's. `key` is the backend's own API key. `options`
    go to the backend as text. `tokenizer` is a directory or a name of the Hugging Face Hub, `chat_template` a file;
    both replace those of the backends. `tls` is for connections to its backends: None is plain text for shards, and for
    others what their URL says. The backends of the pool `prefill` compute long prompts for these.
    With `wake` it may have no backend, and is started when a request comes.
    """

    name: str
    kind: str = "shard"
    at: tuple[str, ...] = ()
    sources: tuple[SourceName, ...] = ()
    register: bool = False
    local: int = 0
    model: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    options: Mapping[str, Option] = field(default_factory=dict)
    tokenizer: str | None = None
    chat_template: str | None = None
    health: HealthRules = field(default_factory=HealthRules)
    tls: TlsSettings | None = None
    prefill: str | None = None
    wake: Wake | None = None

    @property
    def is_found(self) -> bool:
        """Whether its backends are discovered at run time."""
        return bool(self.sources) or self.register

    def reachable(self, address: str) -> str:
        """`address` in the form of its kind: sources return host:port, and most kinds have a URL."""
        if self.kind in AT_HOST_AND_PORT or "://" in address:
            return address
        return f"http://{address}" if self.tls is None else f"https://{address}"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The router's listening addresses and limits. Addresses are host:port; None turns that server off.

    `admin_key_hashes` are sha256 hex digests of the operators' keys, `operators` has those with a name or a role of
    their own. `decision_log` is a file, `-` standard output.
    `keys_file` stores issued keys if no Redis does. Pages of `cors_origins` may call; `*` is any.
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
    operators: Mapping[str, Operator] = field(default_factory=dict)
    keys_file: str | None = None
    max_body_bytes: int = 16 * 2**20
    memory_bytes: int = 2**30
    max_concurrent: int = 4096
    max_queued: int = 4096
    drain_s: float = 30.0
    decision_log: str | None = None
    cors_origins: frozenset[str] = frozenset()
    media_hosts: frozenset[str] | None = None
    tls: Mapping[str, TlsSettings] = field(default_factory=dict)
    metrics: str | None = None
    strangers: int | None = 512
    stranger_requests: int | None = 50
    trusted_proxies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """State that several routers share: the address of a Redis (None: nothing is shared), and the number of `replicas`.

    `strict` rejects limited requests while the store is away, instead of using each router's share. The names
    of all keys there begin with `namespace`. `tls` is for connections to it. `quotas` has the addresses of the servers
    that count quotas, each for a part of the tenants; without any it is `redis`. Only routers of one `cell` share
    news; quotas and issued keys are those of all cells.
    """

    redis: str | None = field(default=None, repr=False)
    replicas: int = 1
    strict: bool = False
    namespace: str = "pointsman"
    tls: TlsSettings | None = None
    quotas: tuple[str, ...] = field(default=(), repr=False)
    cell: str | None = None


@dataclass(frozen=True, slots=True)
class UsageSettings:
    """Where what tenants used is kept: `store` is a file for SQLite or the URL of a PostgreSQL, `journal` a folder for
    what it does not have yet. Rows older than `keep_s` are deleted; None: never."""

    store: str = field(repr=False)
    journal: str
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How a bucket is reached: the `endpoint`, None for Amazon's own, the `region`, and credentials; None: those of the
    environment. `scratch` is a folder of this machine for temporary files; None: one below the system's own."""

    scratch: str | None = None
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Where batches are kept, and their limits: `store` is a folder, or with `s3` a bucket, `s3://bucket/prefix`. Their
    lines count in `service_class`.

    A job that is `window_s` old expires. Files and ended jobs are kept for `keep_s`. A file has at most
    `max_file_bytes` and `max_lines`; a tenant has at most `max_jobs` that have not ended and `max_storage_bytes`.
    A router has at most `concurrent` lines at backends, and fewer if other requests begin later by more than the share
    `slowdown`.
    """

    store: str
    service_class: str
    window_s: float = 86_400.0
    keep_s: float = 30 * 86_400.0
    max_file_bytes: int = 200 * 2**20
    max_lines: int = 1_000_000
    max_jobs: int = 100
    max_storage_bytes: int = 10 * 2**30
    concurrent: int = 256
    slowdown: float = 0.02
    s3: S3Settings | None = None


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Where operators are told of budgets that are near their end: an http or https URL. `secret` signs."""

    webhook: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Where the audit log is: `file`, and as many older ones, of `file_bytes` each, that there are `files`. `secret`
    keys its seals."""

    file: str
    secret: str | None = field(default=None, repr=False)
    file_bytes: int = 64 << 20
    files: int = 16


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the SLA file decides.

    `classes` are in order of rank. `policies` has the named ones and the file's own. `anonymous` is the tenant of
    requests without a key; None rejects them. `on_miss` has the steps of a class, by its name; requests of other
    classes wait. `ageing_s` is the waiting time after which a request counts as one rank better,
    `outage_s` how long it waits while no backend that could take it is well. `version` changes exactly when the file's
    text does.
    """

    classes: Mapping[str, ServiceClass]
    tenants: Mapping[str, Tenant]
    rules: tuple[Rule, ...]
    policies: Mapping[str, Policy]
    pools: Mapping[str, PoolSpec]
    server: ServerSettings
    version: str
    tenant_by_key_hash: Mapping[str, Tenant]
    anonymous: Tenant | None = None
    prices: PriceList = field(default_factory=PriceList)
    on_miss: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    ageing_s: float = 30.0
    outage_s: float = 10.0
    store: StoreSettings = field(default_factory=StoreSettings)
    usage: UsageSettings | None = None
    alerts: AlertSettings | None = None
    identity: IdentitySettings | None = None
    audit: AuditSettings | None = None
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    batches: BatchSettings | None = None
    has_wake: bool = field(init=False, compare=False, repr=False, default=False)
    """Whether any pool is started when a request comes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_wake", any(pool.wake is not None for pool in self.pools.values()))
