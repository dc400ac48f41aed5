"""A prefix that is kept: what clients see of it, and what routers tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

Key = tuple[str, str]
"""A prefix among all tenants': its tenant and its id."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One backend where it was computed: so many of its tokens were cached there, and so many of them stay.

    `can_pin`: the backend keeps what it is told to keep; of any other nobody knows for how long it will hold it.
    """

    backend: str
    pool: str
    held_tokens: Count
    pinned_tokens: Count = 0
    can_pin: bool = False

    @property
    def is_pinned(self) -> bool:
        """Does all that is held stay?"""
        return self.can_pin and 0 < self.held_tokens <= self.pinned_tokens


class Prefix(msgspec.Struct, frozen=True, array_like=True, tag="prefix"):
    """The beginning of prompts of `tenant` that is to be kept on `shards` backends until `expires_at`.

    Times are Unix times. `domain` is the tenant's cache domain. `tokens` are those of its whole blocks. `by` is the
    router that looks after it, `changed_at` when that one said so. `trouble` says why it is not where it should be.

    `version` grows whenever it is asked for or dropped, by whichever router (Book). `life` names its pins: a version
    later than all that another router may have ended them for, 0 while there was none.
    """

    id: str
    tenant: str
    model: str
    domain: str
    tokens: Count
    shards: Count
    created_at: float
    expires_at: float
    by: str = ""
    changed_at: float = 0.0
    is_warming: bool = False
    trouble: str = ""
    places: tuple[Place, ...] = ()
    version: Version = 0
    life: Version = 0

    @property
    def key(self) -> Key:
        """Its name among all tenants' prefixes."""
        return (self.tenant, self.id)

    @property
    def stamp(self) -> tuple[int, float, str]:
        """What is said of a prefix counts if this is later: who was asked last, and of what that one says the last."""
        return (self.version, self.changed_at, self.by)

    @property
    def pin(self) -> str:
        """What its pins are called: those of another life may still be ended by who dropped it or looked after it."""
        return f"{self.tenant}/{self.id}/{self.life}" if self.life else f"{self.tenant}/{self.id}"

    @property
    def backends(self) -> frozenset[str]:
        """Where it is."""
        return frozenset(place.backend for place in self.places)

    @property
    def charge(self) -> int:
        """What it counts of its tenant's limit, in tokens."""
        return self.tokens * self.shards

    @property
    def state(self) -> str:
        """`warming`, `ready`, `partial` (on fewer backends than it should be) or `lost` (on none)."""
        if self.is_warming:
            return "warming"
        if not self.places:
            return "lost"
        return "ready" if len(self.places) >= self.shards else "partial"


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="prefix_dropped"):
    """The prefix `id` of `tenant` is to be kept no longer, unless it was asked for after `version`.

    0 is of a router that orders nothing: it counts whatever came before.
    """

    tenant: str
    id: str
    version: Version = 0

    @property
    def key(self) -> Key:
        """That of the prefix."""
        return (self.tenant, self.id)


PrefixNews = Prefix | Dropped
"""What one router tells the others of prefixes."""


_MARK = "prefix-"


def prefix_id(keys: Sequence[int]) -> str:
    """The name of the prefix with blocks `keys`: the same for equal prompts, whichever router is asked."""
    return f"{_MARK}{keys[-1]:016x}"


def last_key(id: str) -> int | None:  # noqa: A002 - it is the prefix's
    """The key of the last block of the prefix with this id, if it is one."""
    try:
        return int(id.removeprefix(_MARK), 16)
    except ValueError:
        return None
