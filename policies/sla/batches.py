"""The section `batches`: where batches of requests are kept, and their limits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from policies.nouns import ServiceClass
from policies.quantities import quoted, read_bytes, read_count, read_seconds, read_share
from policies.shapes import TEXT, Key, Scalar, Table
from policies.sla.fields import Field
from policies.sla.secrets import Outside


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How a bucket is reached: the `endpoint`, None for Amazon's own, the `region`, and credentials; None: those of the
    environment. `scratch` is a folder of this machine for temporary files; None: one below the system's own."""

    scratch: str | None = None
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = dataclasses.field(default=None, repr=False)
    secret_key: str | None = dataclasses.field(default=None, repr=False)


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

    @classmethod
    def usual(cls, store: str, classes: Mapping[str, ServiceClass]) -> BatchSettings:
        """Batches in the folder `store`, with all limits as they are by default."""
        last = list(classes)[-1]
        return cls(store, last, window_s=classes[last].deadline_s or cls("", last).window_s)


LEAST_KEPT_S = 3600.0
BUCKET = "s3://"

_PLACE = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*/?", re.ASCII)
"""Names of buckets as Amazon allows them: User Guide, "General purpose bucket naming rules"."""

_SECRET = Scalar(str, {"type": "string", "minLength": 1})

S3 = Table(
    {
        "endpoint": Key(TEXT, "URL of the service; default Amazon's own"),
        "region": Key(TEXT, "the region; default AWS_REGION, or us-east-1"),
        "access_key": Key(_SECRET, "${env:NAME} or ${file:path}; default AWS_ACCESS_KEY_ID, or the machine's role"),
        "secret_key": Key(_SECRET, "${env:NAME} or ${file:path}; default AWS_SECRET_ACCESS_KEY, or the machine's role"),
        "scratch": Key(TEXT, "a folder of this machine for temporary files; default below the system's"),
    }
)

BATCHES = Table(
    {
        "store": Key(
            Scalar(str, {"type": "string", "minLength": 1}),
            "a folder or s3://bucket/prefix for files, jobs and results; routers that share it share the jobs",
            required=True,
        ),
        "s3": Key(S3, "how the bucket is reached"),
        "class": Key(TEXT, "the class that lines count in, the last one; a job expires after its deadline, or 24h"),
        "keep": Key(read_seconds, "how long files and ended jobs are kept, 1h at least; default 30d"),
        "max_file": Key(read_bytes, "the largest file; default 200MiB"),
        "max_lines": Key(read_count, "most lines of a job; default 1M"),
        "max_jobs": Key(read_count, "most jobs of a tenant that have not ended; default 100"),
        "max_storage": Key(read_bytes, "most bytes of a tenant's files and results; default 10GiB"),
        "slowdown": Key(read_share, "share by which first tokens of other requests may come later; default 2%"),
        "concurrent": Key(read_count, "most lines of a router that are at backends at once; default 256"),
    }
)


def read_batches(field: Field | None, *, classes: Mapping[str, ServiceClass], outside: Outside) -> BatchSettings | None:
    """Where batches are kept; None without the section."""
    if field is None:
        return None
    section = field.section(BATCHES)
    given, last = section.get("store"), list(classes)[-1]
    store, s3 = None if given is None else given.read(_place), _read_s3(section.get("s3"), outside)
    if (named := section.get("class")) is not None:
        name = named.one_of(classes, what="class")
        if name not in {None, last}:
            named.complain(f"must be {quoted(last)}, the last class, because lines yield to all other requests")
    usual = BatchSettings.usual("", classes)
    keep_s = section.read("keep", usual.keep_s)
    if keep_s < LEAST_KEPT_S:
        section.entries["keep"].complain("must be 1h at least, so that results can be fetched")
    if store is None:
        return None
    is_bucket = store.startswith(BUCKET)
    if s3 is not None and not is_bucket:
        section.entries["s3"].complain("is for a store s3://bucket/prefix, and this one is a folder")
    return BatchSettings(
        store,
        last,
        window_s=usual.window_s,
        keep_s=keep_s,
        max_file_bytes=section.read("max_file", usual.max_file_bytes),
        max_lines=section.read("max_lines", usual.max_lines),
        max_jobs=section.read("max_jobs", usual.max_jobs),
        max_storage_bytes=section.read("max_storage", usual.max_storage_bytes),
        slowdown=section.read("slowdown", usual.slowdown),
        concurrent=section.read("concurrent", usual.concurrent),
        s3=(s3 or S3Settings()) if is_bucket else None,
    )


def _read_s3(field: Field | None, outside: Outside) -> S3Settings | None:
    """How the bucket is reached; None without the section."""
    if field is None:
        return None
    section = field.section(S3)
    endpoint, access, secret = (section.get(name) for name in ("endpoint", "access_key", "secret_key"))
    if (access is None) != (secret is None):
        field.complain("needs access_key and secret_key, or none of both")
    return S3Settings(
        section.read_any("scratch"),
        endpoint=None if endpoint is None else endpoint.read(_url),
        region=section.read_any("region"),
        access_key=None if access is None else access.read(outside.secret),
        secret_key=None if secret is None else secret.read(outside.secret),
    )


def _place(text: str) -> str:
    if "://" not in text:
        return text
    if not text.startswith(BUCKET):
        raise ValueError(
            f"must be a folder or s3://bucket/prefix, not {quoted(text.split('://', maxsplit=1)[0])}://..."
        )
    if not _PLACE.fullmatch(text):
        raise ValueError("must be s3://bucket/prefix, with a bucket of 3 to 63 small letters, digits, dots and hyphens")
    return text.rstrip("/")


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be a URL such as https://s3.example.com")
    return text
