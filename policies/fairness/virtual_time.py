"""Start-time fair queueing: the account with the least service for its weight is served next."""

from __future__ import annotations

from dataclasses import dataclass

DEBT_HALF_LIFE_S = 60.0
"""Time in which an idle account loses half of its debt, the service that it had beyond the others."""

MOST_DEBT_S = 600.0
"""The largest debt, in seconds of service, that an account keeps when it comes back. Longer than any request."""


@dataclass(slots=True)
class Account:
    """One participant. `tag` is the virtual time at which its next service starts, in seconds per weight.

    `touched_at` is its last use by the caller's clock; while the account is idle, its debt fades from then on.
    """

    weight: float
    tag: float = 0.0
    touched_at: float = 0.0


@dataclass(slots=True)
class VirtualTime:
    """Start-time fair queueing with corrections and bounded memory.

    The account with the lowest tag is served next; `seconds` of service move its tag on by seconds / weight. `reached`
    is the latest tag at which service has started. An account that begins to wait starts at `reached`, so that idle
    time earns no credit, or later if it still has a debt. An account that waits but is passed over keeps its lead over
    the accounts that are served, up to `slack_s` (per weight of 1).

    For any two accounts that wait all the time and are not passed over, seconds / weight differ by at most the sum of
    their largest single costs, each divided by its weight, over any interval (Goyal, Vin, Cheng: Start-time Fair
    Queueing, SIGCOMM '96, theorem 1). Wrong predictions add the amount that is not yet corrected.
    """

    slack_s: float = 0.0
    reached: float = 0.0

    def start(self, account: Account) -> float:
        """The virtual time at which the next service of `account`, which waits, starts."""
        return max(account.tag, self.reached - self.slack_s)

    def serve(self, account: Account, seconds: float, now: float) -> None:
        """Give `account`, which waits, `seconds` of service."""
        start = max(account.tag, self.reached - self.slack_s)
        self.reached = max(self.reached, start)
        account.tag, account.touched_at = start + seconds / account.weight, now

    def wake(self, account: Account, now: float) -> None:
        """Bring an idle account back: without credit, and with the rest of its debt."""
        self.fade(account, now)
        account.tag = max(account.tag, self.reached)

    def fade(self, account: Account, now: float) -> None:
        """Reduce the debt of an idle account by the time since it was touched."""
        debt = account.tag - self.reached
        if debt > 0:
            left = 0.5 ** (max(0.0, now - account.touched_at) / DEBT_HALF_LIFE_S)
            account.tag = self.reached + min(debt, MOST_DEBT_S / account.weight) * left
        account.touched_at = now
