"""Virtual time: who of several has had less service for its weight."""

from __future__ import annotations

from dataclasses import dataclass

DEBT_HALF_LIFE_S = 60.0
"""Of what an idle account had beyond the others, half is forgotten in this time."""

MOST_DEBT_S = 600.0
"""Seconds of service beyond the others that an account which comes back still owes. Longer than any one request."""


@dataclass(slots=True)
class Account:
    """One of those who share. `tag` is the virtual time at which its next service starts: seconds per weight.

    `touched_at` is when it was last used, on the caller's clock; debts fade from there while it is idle.
    """

    weight: float
    tag: float = 0.0
    touched_at: float = 0.0


@dataclass(slots=True)
class VirtualTime:
    """Start-time fair queueing with corrections and bounded memory.

    Who has the lowest tag is served next; service of `seconds` moves its tag on by seconds / weight. `reached` is the
    latest tag at which service has started: whoever begins to wait does so there, so that idleness earns nothing, or
    later if it still owes. One that waits but is passed over keeps the lead that it has on those who are served, up to
    `slack_s` (per weight of 1).

    Between any two that wait all the time, and are not passed over, seconds / weight differ by at most the sum of their
    largest single costs, each divided by its weight, however short or long the time (Goyal, Vin, Cheng: Start-time Fair
    Queueing, SIGCOMM '96, theorem 1); where predictions were wrong, also by what is not yet corrected.
    """

    slack_s: float = 0.0
    reached: float = 0.0

    def start(self, account: Account) -> float:
        """When the next service of `account`, which waits, starts in virtual time."""
        return max(account.tag, self.reached - self.slack_s)

    def serve(self, account: Account, seconds: float, now: float) -> None:
        """`account`, which waits, gets `seconds` of service."""
        start = self.start(account)
        self.reached = max(self.reached, start)
        account.tag, account.touched_at = start + seconds / account.weight, now

    def lend(self, account: Account, seconds: float, now: float) -> None:
        """`account` gets `seconds` that nobody waits for.

        They count, so that a burst into an idle system is not free once others come; but of all that was lent only
        the last `slack_s` and the last cost do, so that nobody pays for long for what nobody wanted.
        """
        start = max(account.tag, self.reached)
        self.reached = max(self.reached, start - self.slack_s)
        account.tag, account.touched_at = start + seconds / account.weight, now

    def wake(self, account: Account, now: float) -> None:
        """An idle account comes back: without credit, with what is left of its debt."""
        self.fade(account, now)
        account.tag = max(account.tag, self.reached)

    def fade(self, account: Account, now: float) -> None:
        """The debt of an idle account shrinks by the time since it was touched."""
        debt = account.tag - self.reached
        if debt > 0:
            left = 0.5 ** (max(0.0, now - account.touched_at) / DEBT_HALF_LIFE_S)
            account.tag = self.reached + min(debt, MOST_DEBT_S / account.weight) * left
        account.touched_at = now
