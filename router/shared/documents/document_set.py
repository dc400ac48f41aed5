"""A document set, as it is stored and as routers share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]

Key = tuple[str, str]
"""A set's key among all: its tenant and its name."""

AUTO = 0
"""In place of a number of backends: as many as load and popularity require."""


class DocumentEntry(msgspec.Struct, frozen=True, array_like=True):
    """A document of a set without its text, which has `size` bytes in UTF-8 and the hash `digest` with its title."""

    id: str
    title: str
    size: Count
    digest: Count


class DocumentSet(msgspec.Struct, frozen=True, array_like=True):
    """Documents that `tenant` calls `name` in its requests, kept until `expires_at` (Unix time).

    With a `model`, each is computed ahead, behind the conversation's beginning `head` (JSON of messages), on `shards`
    backends or on as many as its use requires (AUTO), and pinned there. `version` is that of the texts, and `revision`
    changes with every change; both grow.
    """

    tenant: str
    name: str
    version: Count
    revision: Count
    created_at: float
    expires_at: float
    entries: tuple[DocumentEntry, ...]
    model: str = ""
    head: bytes = b"[]"
    shards: Count = AUTO

    @property
    def key(self) -> Key:
        """Its key among all sets."""
        return (self.tenant, self.name)

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return sum(entry.size for entry in self.entries)


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The result of computing a document with this `digest`: the id of its prefix, or the reason why there is none."""

    prefix: str = ""
    trouble: str = ""
    digest: Count = 0


class Uses(msgspec.Struct, frozen=True, array_like=True):
    """How often a document was used: requests, its tokens that came from a cache in them, the predicted seconds and the
    cost (in millionths of a unit) that this saved, and the Unix time of the last use.
    """

    requests: int = 0
    cached_tokens: int = 0
    saved_s: float = 0.0
    saved_cost: int = 0
    last_at: float = 0.0

    def __add__(self, other: Uses) -> Uses:
        return Uses(
            self.requests + other.requests,
            self.cached_tokens + other.cached_tokens,
            self.saved_s + other.saved_s,
            self.saved_cost + other.saved_cost,
            max(self.last_at, other.last_at),
        )


Texts = Mapping[str, str]
"""Texts of documents by their ids."""
