"""The section `batches`: where batches of requests are kept, and their limits."""

from __future__ import annotations

from collections.abc import Mapping

from policies.nouns import ServiceClass
from policies.quantities import quoted, read_bytes, read_count, read_seconds, read_share
from policies.shapes import TEXT, Key, Scalar, Table
from policies.sla.config import BatchSettings
from policies.sla.fields import Field

LEAST_KEPT_S = 3600.0

BATCHES = Table(
    {
        "store": Key(
            Scalar(str, {"type": "string", "minLength": 1}),
            "a folder for files, jobs and results; routers that share it share the jobs",
            required=True,
        ),
        "class": Key(TEXT, "the class that lines count in, the last one; a job expires after its deadline, or 24h"),
        "keep": Key(read_seconds, "how long files and ended jobs are kept, 1h at least; default 30d"),
        "max_file": Key(read_bytes, "the largest file; default 200MiB"),
        "max_lines": Key(read_count, "most lines of a job; default 1M"),
        "max_jobs": Key(read_count, "most jobs of a tenant that have not ended; default 100"),
        "max_storage": Key(read_bytes, "most bytes of a tenant's files and results; default 10GiB"),
        "slowdown": Key(read_share, "share by which first tokens of other requests may come later; default 5%"),
        "concurrent": Key(read_count, "most lines of a router that are at backends at once; default 256"),
    }
)


def read_batches(field: Field | None, *, classes: Mapping[str, ServiceClass]) -> BatchSettings | None:
    """Where batches are kept; None without the section."""
    if field is None:
        return None
    section = field.section(BATCHES)
    given, last = section.get("store"), list(classes)[-1]
    store = None if given is None else given.read(_folder)
    if (named := section.get("class")) is not None:
        name = named.one_of(classes, what="class")
        if name not in {None, last}:
            named.complain(f"must be {quoted(last)}, the last class, because lines yield to all other requests")
    usual = BatchSettings("", last)
    keep_s = section.read("keep", usual.keep_s)
    if keep_s < LEAST_KEPT_S:
        section.entries["keep"].complain("must be 1h at least, so that results can be fetched")
    if store is None:
        return None
    return BatchSettings(
        store,
        last,
        window_s=classes[last].deadline_s or usual.window_s,
        keep_s=keep_s,
        max_file_bytes=section.read("max_file", usual.max_file_bytes),
        max_lines=section.read("max_lines", usual.max_lines),
        max_jobs=section.read("max_jobs", usual.max_jobs),
        max_storage_bytes=section.read("max_storage", usual.max_storage_bytes),
        slowdown=section.read("slowdown", usual.slowdown),
        concurrent=section.read("concurrent", usual.concurrent),
    )


def _folder(text: str) -> str:
    if "://" in text:
        raise ValueError(f"must be a folder, not {quoted(text.split('://', maxsplit=1)[0])}://...")
    return text
