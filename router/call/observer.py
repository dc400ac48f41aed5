"""What a call reports while it runs, to the part of the router that keeps metrics, traces and logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from policies.errors import ExpectedError
from policies.nouns import NO_TENANT, BackendView, Decision, Request, Usage
from policies.shadow import Difference
from router.ask import Input
from router.call.tracing import CallTrace, PromptTrace


class Spent(NamedTuple):
    """What one prompt of a call used: the model and the pool that answered it, its tokens, and what its tenant pays for
    them, in thousandths of a unit of cost."""

    model: str
    pool: str
    usage: Usage
    cost: int


class Account(msgspec.Struct, eq=False):
    """What is known of one call while it runs. `tenant` and the others are set as soon as they are known: `key` is the
    id of its API key, `team` its part of the tenant, `user` the end user that its client names, `tags` the tags that
    count, `spent` has an entry for each answered prompt.

    `on_end` is called with it and the failure of the call, None without one, when the call is over; a context manager
    that is left does so. `trace` is None where the call is not traced; `headers` are the trace context that goes on to
    backends. Without `wants_prompts`, `Observer.prompt` would find no trace, log or metric that wants its prompts.
    """

    id: str
    started_at: float
    headers: Mapping[str, str]
    trace: CallTrace | None
    on_end: Callable[[Account, BaseException | None], None]
    wants_prompts: bool = True
    tenant: str = NO_TENANT
    service_class: str = "none"
    model: str = ""
    path: str = ""
    key: str | None = None
    team: str | None = None
    user: str | None = None
    tags: tuple[str, ...] = ()
    rule: int | None = None
    spent: tuple[Spent, ...] = ()
    inputs: Sequence[Input] = ()
    usage: Usage = Usage()
    first_at: float | None = None
    last_at: float | None = None

    def __repr__(self) -> str:
        return f"<Account {self.id} of {self.tenant} in {self.service_class}, {self.usage}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.on_end(self, error)

    def heard(self, now: float) -> None:
        """A piece of the answer came at `now`."""
        if self.first_at is None:
            self.first_at = now
        self.last_at = now


class UsageDoubt(StrEnum):
    """What is wrong with the usage that a backend reports."""

    UNCOUNTED = "uncounted"
    """It has no numbers of tokens that can be read: the router counts itself."""
    BEYOND_ASKED = "beyond_asked"
    """It has more tokens than were sent or asked for: what is charged is bounded."""


class Observer(Protocol):
    """Receives what calls report. What it does must be cheap: calls wait for it."""

    def account(self, id: str, context: Mapping[str, str]) -> Account:  # noqa: A002
        """The Account of a call that begins now; leaving it ends the call. `context` are its W3C trace headers."""
        ...

    def prompt(self, account: Account, *, config_version: str) -> PromptTrace | None:
        """The trace of the next prompt of a call that was classified; None where neither trace nor log wants it."""
        ...

    def decided(
        self,
        request: Request,
        decision: Decision,
        chosen: BackendView | None,
        *,
        config_version: str,
        waited_s: float | None = None,
    ) -> None:
        """`decision` was made for `request` by the SLA file of this version; `chosen` is the view of its backend.

        It found that after `waited_s` in the router; None: it found one before, or none.
        """
        ...

    def doubted(self, backend: str, what: UsageDoubt) -> None:
        """The usage that `backend` reported for an answer is not charged as it is."""
        ...

    def missed(self, service_class: str, step: str) -> None:
        """A target of the class cannot be kept, and this step of `on_miss` is tried."""
        ...

    def shadowed(self, request: Request, differences: Sequence[Difference]) -> None:
        """The shadow file would have decided on `request` with these differences."""
        ...

    def estimated(self, model: str, error: float) -> None:
        """A backend counted a prompt of `model`; the estimate was off by this share of the count."""
        ...

    def refused(self, address: str, error: ExpectedError) -> None:
        """A client at `address` sent a key or token that was not accepted."""
        ...

    def event(self, name: str) -> None:
        """Something rare happened. `name` comes from a closed list."""
        ...
