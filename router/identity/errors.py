"""Why a token cannot be verified yet: a fetch of its issuer's keys may help."""

from __future__ import annotations

from typing import Protocol

from policies.errors import Unauthenticated, Unavailable


class Awaited(Protocol):
    """An issuer with keys that can be fetched."""

    async def refreshed(self) -> bool:
        """Wait until its keys are fetched once more; False, at once, if they may not be."""
        ...


class UnknownKey(Unauthenticated):
    """The token's key is none of those that its issuer published when they were last fetched."""

    def __init__(self, issuer: Awaited) -> None:
        hint = "get a new token from its issuer"
        super().__init__("the token is signed with a key that its issuer does not publish", hint=hint)
        self.issuer = issuer


class KeysAway(Unavailable):
    """The keys of a token's issuer are not known."""

    def __init__(self, issuer: Awaited, retry_after_s: float) -> None:
        message, hint = "tokens of this issuer cannot be verified now", "try again in a moment"
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.issuer = issuer
