"""The first of two legs: a prompt is computed at a backend of its own, for the backend that answers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from backends.base import Backend, PairedPrefiller, Prefilled, Prefiller, Taker
from policies.errors import BackendErred, BackendFailed, ExpectedError, PrefillFailed
from policies.nouns import Delta, Fetch, Native, PrefillLeg, Prompt, Request, Usage
from policies.predict import uncached_tokens
from router.call.bid import Placed
from router.call.carrier import Carrier, UntilGivenUp
from router.fleet.cluster.cluster import Cluster

PATIENCE, LEAST_S = 3.0, 1.0
"""A prompt may take this many times as long as was predicted, and at least these seconds more. Then it is computed with
its answer."""


class FirstLegs(msgspec.Struct, frozen=True):
    """Has prompts computed at the backends of `cluster` that are chosen for that."""

    cluster: Cluster
    clock: Callable[[], float]

    async def before(
        self, carrier: Carrier, placed: Placed, leg: PrefillLeg, prompt: Prompt
    ) -> tuple[Fetching | Meeting, Prompt]:
        """How `carrier` takes `prompt` to the backend that answers it, and with which prompt, from now on.

        Returns when that backend can ask for the KV: once the prompt was computed at the backend of `leg`, or at once
        if that hands it over to a backend that awaits it. Raises PrefillFailed.
        """
        if leg.backend not in self.cluster:
            raise PrefillFailed(f"{leg.backend} is gone")
        prefiller = self.cluster.backend(leg.backend)
        if not isinstance(prefiller, PairedPrefiller):
            done = await self.run(placed, leg, prompt)
            return Fetching(carrier, done), replace(prompt, transfer=done.transfer)
        try:
            paired = replace(prompt, transfer=prefiller.pair())
        except BackendFailed as failure:
            raise PrefillFailed(str(failure)) from failure
        return Meeting(carrier, partial(self.run, placed, leg, paired), self.clock), paired

    async def run(self, placed: Placed, leg: PrefillLeg, prompt: Prompt) -> Prefilled:
        """The `prompt` of `placed` as computed at the backend of `leg`, which keeps its KV until it is fetched.

        It counts as a request there. Cancelling this cancels it. Raises PrefillFailed.
        """
        name, request = leg.backend, placed.bid.request
        if name not in self.cluster:
            raise PrefillFailed(f"{name} is gone")
        bid, view = placed.bid, next(backend for backend in placed.found.view.backends if backend.name == name)
        alone = replace(request, max_new_tokens=1, expected_new_tokens=1, stream=False, preemptible=False)
        flight = self.cluster.begin(name, alone, uncached_tokens(request, view))
        if bid.sent is not None:
            bid.sent(name)
        # a backend that computes no prompts has nothing to fall back on: then the leg ends as any request does
        limit_s = None if placed.chosen.needs_prefill else PATIENCE * leg.seconds + LEAST_S
        try:
            with self.cluster.flying(flight):
                backend = self.cluster.backend_of(flight)
                if not isinstance(backend, Prefiller):
                    raise PrefillFailed(f"{name} computes no prompts for others")
                try:
                    async with asyncio.timeout(limit_s):
                        with UntilGivenUp(flight):
                            done = await backend.prefill(alone, prompt)
                except TimeoutError as error:
                    raise BackendFailed(f"{name} did not compute the prompt within {limit_s:.1f} s") from error
                flight.heard(Delta(usage=done.usage, tokens=1, is_whole=True), self.clock())
                return done
        except ExpectedError as failure:
            failed = PrefillFailed(f"{name} did not compute the prompt: {failure}")
            failed.backend = name
            raise failed from failure
        finally:
            bid.ended(flight, view)


class Fetching(msgspec.Struct, frozen=True):
    """A Carrier's second leg, to the backend that fetches the KV of the prompt that was `done`."""

    carrier: Carrier
    done: Prefilled

    async def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> None:
        """As Carrier: what was cached is what the first backend did not compute.

        Raises PrefillFailed if the backend errs before it has answered: the KV may be gone.
        """
        taker = _FetchTaker(to, self.done)
        try:
            await self.carrier.carry(placed, backend, prompt, taker)
        except BackendErred as failure:
            if taker.is_answered:
                raise
            raise PrefillFailed(f"the KV of the prompt was not fetched: {failure}") from failure


class Meeting(msgspec.Struct, frozen=True):
    """A Carrier's second leg, to a backend that gets the KV of the prompt while `first` computes it."""

    carrier: Carrier
    first: Callable[[], Awaitable[Prefilled]]
    clock: Callable[[], float]

    async def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> None:
        """As Fetching: one of the two that ends badly before the answer begins ends the other.

        The answering backend is not late, however long the first leg takes: that has a limit of its own.
        """
        flight, taker = placed.flight, _FetchTaker(to)
        give_up, flight.give_up = flight.give_up, None
        first = asyncio.ensure_future(self.first())
        second = asyncio.create_task(self.carrier.carry(placed, backend, prompt, taker))
        try:
            await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
            if not second.done():
                try:
                    taker.done = first.result()
                except PrefillFailed:
                    if not taker.is_answered:
                        raise
                flight.fetch(self.clock())
                flight.give_up = give_up
            try:
                await second
            except BackendErred as failure:
                if taker.is_answered:
                    raise
                raise PrefillFailed(f"the KV of the prompt did not arrive: {failure}") from failure
            # the whole answer may be faster than the end of the first leg, which is not wanted any more if it fails
            with contextlib.suppress(PrefillFailed):
                await first
        finally:
            first.cancel()
            second.cancel()
            await asyncio.gather(first, second, return_exceptions=True)


class _FetchTaker:
    """Gives `to` the Deltas that it gets, with the usage of both legs: the first one's from when it is `done`."""

    def __init__(self, to: Taker, done: Prefilled | None = None) -> None:
        self._to, self.done = to, done
        self.is_answered = False

    def __repr__(self) -> str:
        return f"<_FetchTaker {'answered' if self.is_answered else 'waiting'}>"

    def take(self, delta: Delta) -> bool:
        self.is_answered = self.is_answered or delta.computed_tokens is None
        return self._to.take(delta if delta.usage is None else replace(delta, usage=self._truthful(delta.usage)))

    async def ready(self) -> None:
        await self._to.ready()

    def _truthful(self, usage: Usage) -> Usage:
        if self.done is None:
            return usage
        return replace(usage, cached_tokens=min(self.done.usage.cached_tokens, usage.prompt_tokens))


def may_transfer(native: Native | None) -> bool:
    """May the prompt of a request in this form be computed elsewhere? Both legs have to read it from the same body, so
    it has to be one of the dialect that both are sent in.
    """
    return native is None or native.path in ("/v1/chat/completions", "/v1/completions")


def without_transfer(request: Request) -> Request:
    """`request`, of which the prompt is to be computed where its answer is."""
    return replace(request, may_transfer=False, may_fetch=False)


def with_lent(placed: Placed, fetch: Fetch, cluster: Cluster) -> Prompt:
    """The prompt of `placed`, with what its backend needs to `fetch` KV; without that if it cannot be lent any more."""
    transfer = cluster.lend(fetch.backend, (placed.chosen.held_tokens or 0) + fetch.tokens)
    return replace(placed.bid.prompt, transfer=transfer)
