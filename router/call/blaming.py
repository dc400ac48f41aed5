"""Which requests are refused because they hang, kill or confuse backends, and which failures those answer for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from xxhash import xxh3_128

from policies.blame import Blame, FailedTry, Harm, Suspect
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendHung,
    BackendLost,
    ExpectedError,
    IdleLost,
    PrefillFailed,
    RequestFails,
    Unavailable,
)
from router.call.bid import Bid, Placed
from router.call.observer import Observer
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight

_TOGETHER_S = 0.05
"""Requests that a backend has when it is lost are known to be lost after this, and so are connections that lie idle."""

_log = logging.getLogger("pointsman.pipeline")


class Blaming(msgspec.Struct, frozen=True):
    """Tells `blame` of the failures and the answers of calls, and `cluster` which failures are not a backend's."""

    blame: Blame
    cluster: Cluster
    clock: Callable[[], float]
    observer: Observer

    def check(self) -> None:
        self.blame.check()

    def require_harmless(self, bid: Bid) -> None:
        """Raise RequestFails if requests like that of `bid` are to blame, Unavailable if its tenant is on probation."""
        if bid.request.tenant not in self.blame.by_tenant:
            return
        suspect, now = suspect_of(bid), self.clock()
        if self.blame.refuses(suspect, now, self.cluster.served_since):
            raise RequestFails(f"request {bid.request.id} failed at two backends a moment ago, or others like it did")
        if wait_s := self.blame.probation_s(suspect, now):
            self.observer.event("probation")
            raise Unavailable(
                "requests of this tenant made backends end or hang, one after the other: one at a time is tried",
                hint="find those that do so; a minute without one ends this",
                retry_after_s=wait_s,
            )

    def sent(self, bid: Bid, flight: Flight) -> None:
        """`flight`, a later try of `bid`, is on its way: once its answer begins, that tells of those that failed."""
        on_first, failed = flight.on_first, bid.failed

        def on_first_after_failures(answered: Flight) -> None:
            self.cluster.answered_elsewhere(answered.request, failed - {answered.backend})
            on_first(answered)

        flight.on_first = on_first_after_failures

    def answered(self, bid: Bid, flight: Flight) -> None:
        """The answer to `bid` is whole."""
        if bid.failed:
            self.cluster.answered_elsewhere(bid.request, bid.failed - {flight.backend})
        if bid.request.tenant in self.blame.by_tenant:
            self.blame.passed(suspect_of(bid))

    async def require_innocent(self, placed: Placed, error: ExpectedError) -> None:
        """Raise RequestFails if the request of `placed` is the cause of `error`: no backend is ill for it."""
        failure, backend = error, placed.chosen.name
        if isinstance(error, PrefillFailed):
            if error.backend is None or not isinstance(error.__cause__, ExpectedError):
                return
            failure, backend = error.__cause__, error.backend
        if isinstance(failure, BackendFailed) and await self._is_to_blame(placed, failure, backend):
            raise RequestFails(f"request {placed.bid.request.id} fails wherever it is sent: {failure}") from error

    async def _is_to_blame(self, placed: Placed, error: BackendFailed, backend: str) -> bool:
        harm = _harm_of(error)
        if harm is None:
            return False
        # a connection that lay idle was there before: a death of a moment ago is the one that it was lost in
        sent_at = placed.flight.sent_at - (_TOGETHER_S if isinstance(error, IdleLost) else 0.0)
        when_idle = isinstance(error, IdleLost)
        failure = FailedTry(sent_at, self.clock(), backend, suspect_of(placed.bid), harm, when_idle)
        failures = self.blame.failed(failure, self.cluster.served_since)
        if not failures and harm is not Harm.ERRED and self.blame.is_suspect(failure.suspect):
            # the backend's other requests end in the same moment
            await asyncio.sleep(_TOGETHER_S)
            failures = self.blame.judge(failure.suspect, self.clock(), self.cluster.serves_others)
        if not failures:
            return False
        names = ", ".join(sorted({each.backend for each in failures}))
        _log.warning("%s is to blame: these failed at it, and not at others: %s", placed.bid, names)
        self.observer.event("poison_request")
        self.cluster.acquit(failures)
        return True


def suspect_of(bid: Bid) -> Suspect:
    """The request of `bid` as far as blame goes. Of the bytes as they came, 0.6 ms for 16 MB; a body without them, such
    as one of several prompts, is written out.
    """
    prompt, request = bid.prompt, bid.request
    body = prompt.body or {}
    raw = prompt.native.raw if prompt.native is not None else b""
    written = b"" if raw else repr(prompt.body).encode("utf-8", "surrogatepass")
    parts = (request.model, prompt.path, prompt.token_ids, written, repr(request.sampling))
    hashed = xxh3_128(raw)
    hashed.update(msgspec.msgpack.encode(parts))
    size = request.prompt_tokens.bit_length()
    shape = (request.model, prompt.path, frozenset(body), request.needs, size)
    return Suspect(request.tenant, hashed.digest(), shape, request.id)


def _harm_of(error: BackendFailed) -> Harm | None:
    """What a backend did when it failed with `error`; None: that says nothing of the request."""
    if isinstance(error, BackendHung):
        return Harm.HUNG
    if isinstance(error, BackendErred):
        return Harm.ERRED
    # a connection that had lain idle may just have been closed: then the next one is not lost
    return Harm.DIED if isinstance(error, BackendLost | IdleLost) else None
