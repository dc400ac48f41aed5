"""The end users that requests name, as many as are counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from policies.nouns import NO_LIMITS, Tenant

OTHERS = "(others)"
"""Stands for the end users beyond the most that are counted one by one."""

MOST_USERS = 100_000
"""End users of one tenant that a router counts one by one in a day. Their names take about 10 MB."""

_MOST_CHARACTERS = 128
_DAY_S = 86_400


class EndUsers:
    """Keeps the names that clients send from filling the store of quotas: further ones share the limits of OTHERS.

    `clock` is Unix time; at midnight UTC all names are new.
    """

    def __init__(self, clock: Callable[[], float], *, most: int = MOST_USERS) -> None:
        self._clock, self._most = clock, most
        self._day = 0
        self._seen: dict[str, set[str]] = {}

    def __repr__(self) -> str:
        return f"<EndUsers {sum(map(len, self._seen.values()))}>"

    def counted(self, tenant: Tenant, user: str | None) -> str | None:
        """The name under which the requests of `user` are counted; None if no limits bind end users of `tenant`."""
        if user is None or tenant.user_limits == NO_LIMITS:
            return None
        if len(user) > _MOST_CHARACTERS:
            # two long names that begin alike are two users
            digest = blake2b(user.encode(errors="surrogatepass"), digest_size=16).hexdigest()
            user = user[: _MOST_CHARACTERS - len(digest)] + digest
        if (day := int(self._clock() // _DAY_S)) != self._day:
            self._day, self._seen = day, {}
        seen = self._seen.setdefault(tenant.name, set())
        if user not in seen:
            if len(seen) >= self._most:
                return OTHERS
            seen.add(user)
        return user
