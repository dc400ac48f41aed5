"""A pinned prefix, as shown to clients and as sent between routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

Key = tuple[str, str]
"""A prefix's key among all tenants: its tenant and its id."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One backend that computed it: `held_tokens` were cached there, and `pinned_tokens` of them are pinned.

    `can_pin`: the backend supports pins. Any other backend may evict its blocks at any time.
    """

    backend: str
    pool: str
    held_tokens: Count
    pinned_tokens: Count = 0
    can_pin: bool = False

    @property
    def is_pinned(self) -> bool:
        """Whether all cached tokens are pinned."""
        return self.can_pin and 0 < self.held_tokens <= self.pinned_tokens


class Prefix(msgspec.Struct, frozen=True, array_like=True, tag="prefix"):
    """The beginning of prompts of `tenant`, to be kept on `shards` backends until `expires_at`.

    Times are Unix times. `domain` is the tenant's cache domain. `tokens` counts those of whole blocks. `by` is the
    router that maintains it, `changed_at` the time of that router's last change. `trouble` is the reason if backends
    are missing.

    `version` grows with every POST and DELETE, at any router (Book). `life` is part of its pins' name: a version
    later than all pins that another router may be ending, 0 if there were none.
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
        """Its key among all tenants' prefixes."""
        return (self.tenant, self.id)

    @property
    def stamp(self) -> tuple[int, float, str]:
        """Order of messages about a prefix: the latest request first, then the latest change of its router."""
        return (self.version, self.changed_at, self.by)

    @property
    def pin(self) -> str:
        """Name of its pins. A router that dropped or maintained it before may still end those of an earlier `life`."""
        return f"{self.tenant}/{self.id}/{self.life}" if self.life else f"{self.tenant}/{self.id}"

    @property
    def backends(self) -> frozenset[str]:
        """Where it is."""
        return frozenset(place.backend for place in self.places)

    @property
    def charge(self) -> int:
        """Tokens that count against its tenant's limit."""
        return self.tokens * self.shards

    @property
    def state(self) -> str:
        """`warming`, `ready`, `partial` (on fewer backends than wanted) or `lost` (on none)."""
        if self.is_warming:
            return "warming"
        if not self.places:
            return "lost"
        return "ready" if len(self.places) >= self.shards else "partial"


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="prefix_dropped"):
    """The prefix `id` of `tenant` was dropped, unless a version after `version` asked for it again.

    0 comes from a router without versions: it counts as later than everything before.
    """

    tenant: str
    id: str
    version: Version = 0

    @property
    def key(self) -> Key:
        """The prefix's key."""
        return (self.tenant, self.id)


PrefixNews = Prefix | Dropped
"""A message between routers about a prefix."""


_MARK = "prefix-"


def prefix_id(keys: Sequence[int]) -> str:
    """The id of the prefix with blocks `keys`: the same for equal prompts at every router."""
    return f"{_MARK}{keys[-1]:016x}"


def last_key(id: str) -> int | None:  # noqa: A002 - it is the prefix's
    """The key of the last block of the prefix with this id; None if it is not an id."""
    try:
        return int(id.removeprefix(_MARK), 16)
    except ValueError:
        return None
