"""The section `audit`: where it is recorded what operators do, and logins that are refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from policies.quantities import read_bytes, read_count
from policies.shapes import TEXT, Key, Scalar, Table
from policies.sla.fields import Field
from policies.sla.secrets import Outside


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Where the audit log is: `file`, and as many older ones, of `file_bytes` each, that there are `files`. `secret`
    keys its seals."""

    file: str
    secret: str | None = dataclasses.field(default=None, repr=False)
    file_bytes: int = 64 << 20
    files: int = 16


_LEAST_BYTES = 1 << 20

AUDIT = Table(
    {
        "file": Key(TEXT, "the log; older files are FILE.1, FILE.2 and so on", required=True),
        "secret": Key(
            Scalar(str, {"type": "string", "minLength": 1}),
            "${env:NAME} or ${file:path}: only its holders can write records that fit; default: none",
        ),
        "file_size": Key(read_bytes, "a larger file is set aside; default 64MiB"),
        "files": Key(read_count, "files that are kept, 2 at least; default 16"),
    }
)


def read_audit(field: Field | None, *, outside: Outside) -> AuditSettings | None:
    """Where the audit log is; None without the section."""
    if field is None:
        return None
    section = field.section(AUDIT)
    usual, given = AuditSettings(""), section.get("secret")
    secret = None if given is None else given.read(outside.secret)
    settings = AuditSettings(
        section.read("file", ""),
        secret,
        file_bytes=section.read("file_size", usual.file_bytes),
        files=section.read("files", usual.files),
    )
    if settings.file_bytes < _LEAST_BYTES:
        section.entries["file_size"].complain("must be 1MiB at least")
    if settings.files < 2:
        section.entries["files"].complain("must be 2 at least: the one that is written, and the one before it")
    return settings if settings.file else None
