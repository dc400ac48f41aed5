"""What this router has at one backend: each request from its sending to its end, and what they add up to."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec

from policies.learning.adapters import Readiness
from policies.learning.cost import Ahead, Work, prefill_work
from policies.nouns import ACCEPTED, Delta, Fetch, Request, Usage
from policies.rules import BACKGROUND_RANK


def may_move() -> bool:
    """What is asked of a flight that no call watches: nothing is against it."""
    return True


class Flight(msgspec.Struct, eq=False):
    """One request at a backend, from when it is sent to its end.

    `ahead` is the prefill that was in front of it when it was sent, `crowd` the requests there, itself included, and
    `own_crowd` those of this router among them.
    `is_first_try`: no other backend was tried before. `on_first` is called when the first piece of its answer arrives,
    `on_computed` when its prompt is computed, as far as was seen or is presumed.
    `is_silent`: it may be answered in one piece, so that the end of its prefill is not seen. `began_at`: when it
    began to decode, as far as was seen or is presumed; `whole_tokens`: how many tokens its server says that an answer
    in one piece had, 0 where it does not say. `readiness` is what its backend had to do for its LoRA adapter, if it has
    one; `predicted_ttft_s` includes `adapter_s` for that. `give_up`, where it is set, ends it there by raising what it
    gets, so that another backend may be tried; `can_move`: that one could take it, or continue its answer.

    `alive_at` is when the backend last showed that it goes on with this request: when it was sent, a piece of its
    prefill's progress or of its answer came, or the client had taken that piece. `accepted_at`: the first sign that the
    backend has it.
    """

    backend: str
    request: Request
    uncached_tokens: int
    sent_at: float
    ahead: Ahead
    crowd: int
    own_crowd: int
    predicted_ttft_s: float
    is_first_try: bool
    book: Flights
    on_first: Callable[[Flight], None]
    is_silent: bool = False
    readiness: Readiness | None = None
    adapter_s: float = 0.0
    answered: bool = False
    """Did a piece of its answer arrive?"""
    is_waiting: bool = True
    """Is its prompt not computed yet, as far as is known?"""
    first_at: float | None = None
    last_at: float | None = None
    first_tokens: int = 0
    drawn_tokens: int = 0
    usage: Usage | None = None
    """What its backend reports."""
    charged: tuple[Usage, int] | None = None
    """What its tenant pays for, and the cost in thousandths of a unit, once it has ended with an answer."""
    whole_tokens: int = 0
    began_at: float | None = None
    began_with: tuple[float, float] = (0.0, 0.0)
    give_up: Callable[[BaseException], None] | None = None
    can_move: Callable[[], bool] = may_move
    on_computed: Callable[[Flight], None] | None = None
    accepted_at: float | None = None
    alive_at: float = 0.0
    fetches: bool = False
    """Does its backend fetch the KV of the prompt from another one that computed it for this request?"""
    lent: Fetch | None = None
    """What its backend fetches of the prompt from the cache of another one."""
    is_relayed: bool = True
    """Has the client taken the newest piece?"""
    work: Work = Work()
    """The prefill that it brought, as far as is known; this and the next two from its `begin` on."""
    new_tokens: int = 0
    """Tokens of the prompt that are new in its backend's cache, computed or fetched."""
    weight: float = 1.0
    """That of its class."""

    def __repr__(self) -> str:
        state = "waits for its first token" if self.is_waiting else f"has {self.drawn_tokens} tokens"
        return f"<Flight {self.request.id} at {self.backend}: {state}>"

    @property
    def fetch_s(self) -> float:
        """The predicted seconds of its fetch."""
        return 0.0 if self.lent is None else self.lent.seconds

    @property
    def whole_work(self) -> Work:
        """The prefill if nothing can be fetched after all."""
        if self.lent is None:
            return self.work
        return prefill_work(self.new_tokens, max(0, self.request.prompt_tokens - self.new_tokens))

    @property
    def ttft_s(self) -> float:
        """Seconds from its sending to its first token, which must have been seen."""
        assert self.first_at is not None, "it was not seen"
        return self.first_at - self.sent_at

    @property
    def later_tokens(self) -> int:
        """Tokens that were drawn after the first piece of the answer, over all choices.

        Where the backend tells in the end how many there were, that counts; pieces without token ids count as one.
        """
        reported = self.usage.completion_tokens if self.usage else 0
        return max(self.drawn_tokens, reported) - self.first_tokens

    def heard(self, delta: Delta, now: float) -> None:
        """A piece of its answer, or of its prefill's progress, arrived at `now`.

        Where the client does not take it at once, `hold` and then `relayed` follow.
        """
        if self.accepted_at is None:
            self.accepted_at = now
        if delta is ACCEPTED:
            return
        book = self.book
        book.heard_at = self.alive_at = now
        if delta.computed_tokens is not None:
            return
        tokens = delta.tokens or len(delta.token_ids) or bool(delta.text)
        self.usage = delta.usage or self.usage
        if not self.answered:
            # its prompt is computed
            self.answered = True
            if book.silent and book.silent[0][0] <= now:
                book.presume(now)
            if self.is_waiting:
                book.begin_decoding(self, now)
            elif not delta.is_whole:
                book.see_decoding(self, now)
            if delta.is_whole:
                self.whole_tokens = delta.tokens
            else:
                self.first_at, self.first_tokens = now, tokens
                self.on_first(self)
        if tokens:
            self.last_at = now
            self.drawn_tokens += tokens
            book.context_tokens += tokens
            if self.request.preemptible:
                book.grow(self, tokens)

    def fetch(self, now: float) -> None:
        """Its prompt was computed elsewhere by `now`, and its backend is to fetch the KV: its time begins here."""
        self.fetches, self.alive_at = True, now

    def hold(self) -> None:
        """The client has not taken the piece that was heard yet."""
        self.is_relayed = False

    def relayed(self, now: float) -> None:
        """The client has taken the piece that was heard, at `now`: its time is not the backend's."""
        self.alive_at, self.is_relayed = now, True


class Traffic(NamedTuple):
    """Requests at one backend: those `running`, and those `waiting` for a first token, with the prefill they bring."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    waiting_pairs: float = 0.0


class Elsewhere(NamedTuple):
    """What other routers have at one backend. `busy_since`: since when it computes what it computes now, as far as they
    tell: when they last told of a first token, or of a first prompt.
    """

    traffic: Traffic = Traffic()
    busy_since: float = -math.inf


class Front:
    """Prompts that wait, and how much of them is in front of a further one."""

    def __init__(self, works: Iterable[Work]) -> None:
        ordered = sorted(works)
        self._sizes = [work.tokens for work in ordered]
        self._tokens = [0.0, *accumulate(self._sizes)]
        self._pairs = [0.0, *accumulate([work.pairs for work in ordered])]
        # of longer ones a part counts: as many pairs as go with so many of their tokens
        self._steepness = [0.0, *accumulate([work.pairs / max(1.0, work.tokens) for work in ordered])]

    def ahead_of(self, tokens: float) -> Ahead:
        """What is in front of a prompt of so many tokens."""
        shorter = bisect_right(self._sizes, tokens)
        alike = Work(self._tokens[shorter], self._pairs[shorter])
        if shorter == len(self._sizes):
            return Ahead(alike)
        alike_tokens = alike.tokens + tokens * (len(self._sizes) - shorter)
        alike_pairs = alike.pairs + tokens * (self._steepness[-1] - self._steepness[shorter])
        beyond = Work(self._tokens[-1] - alike_tokens, self._pairs[-1] - alike_pairs)
        return Ahead(Work(alike_tokens, alike_pairs), beyond)


_NO_FRONT = Front(())
"""No prompt waits."""


class Seen(NamedTuple):
    """The prompts that wait in `front` of a request of some rank, and what preemptible requests of worse ranks hold.

    `reclaimable_tokens` of KV are those that they hold alone, at the least.
    """

    front: Front
    reclaimable_requests: int
    reclaimable_tokens: int


NOTHING_SEEN = Seen(_NO_FRONT, 0, 0)
"""What any request sees where no prompt waits and no request is preemptible."""


@dataclass(slots=True)
class _Rank:
    """What the requests of one rank add up to: those that wait for their first token, and those that may give way."""

    requests: int = 0
    preemptible_requests: int = 0
    preemptible_tokens: int = 0


_MOST_ENDED = 1024
"""How many ended requests are remembered until the next report."""


class Flights:
    """The open Flights at one backend, oldest first. Sums are kept, so that asking for them costs nothing per request.

    `waiting` of them have no answer yet, and are not presumed to be past their prefill, with `waiting_tokens` and
    `waiting_pairs` of it. `busy_since`: since when the backend computes what it computes now, if it computes one prompt
    after the other: when the last first token came, or the first prompt was sent to an idle one. `revision` grows with
    each flight that begins, is answered or presumed to be, or ends. `silent` is a heap of the flights with a first
    token that may not be seen, by its predicted time; without any, `presume` does nothing. `heard_at`: when the last
    piece of any answer came. So many are `preemptible`, and so many of the `background`. Those that
    decode have contexts of `context_tokens`.
    """

    def __init__(self) -> None:
        self.open: dict[Flight, None] = {}
        """All of them: changed here alone."""
        self._ranks: dict[int, _Rank] = {}
        self.waiting = 0
        self.waiting_tokens, self.waiting_pairs = 0, 0.0
        self.busy_since = 0.0
        self.revision = 0
        self.heard_at = -math.inf
        self._last_sent_at = self._reported_at = -math.inf
        self._ended: deque[tuple[float, float]] = deque(maxlen=_MOST_ENDED)
        self._gone = 0
        self._seen: dict[int | None, Seen] = {}
        self.silent: list[tuple[float, int, Flight]] = []
        self.preemptible = self.background = 0
        self._decoding = self.context_tokens = self._yielding_tokens = 0
        self._weights = 0.0
        self.mean_weight = 1.0
        """The mean weight of their classes; 1 without any."""
        self._decoding_s = self._context_s = 0.0
        self._counted_at = self._counted_context = 0.0

    def __repr__(self) -> str:
        return f"<Flights {len(self)} open, {self.waiting} of them without an answer>"

    def __len__(self) -> int:
        return len(self.open)

    def movable(self) -> list[Flight]:
        """Those that another backend can take, or continue."""
        return [flight for flight in self.open if flight.give_up is not None and flight.can_move()]

    @property
    def decoding(self) -> tuple[float, float]:
        """Sequences that decode, at least one, and the tokens of their contexts in total."""
        return float(max(1, self._decoding)), float(self.context_tokens)

    def others_than(self, rank: int | None) -> tuple[int, float]:
        """For a request of this rank: how many there yield to it, and the contexts that decode but for theirs."""
        if rank is None or rank >= BACKGROUND_RANK:
            return 0, float(self.context_tokens)
        return self.background, float(self.context_tokens - self._yielding_tokens)

    def traffic(self) -> Traffic:
        """What others need to know of them."""
        return Traffic(len(self) - self.waiting, self.waiting, self.waiting_tokens, self.waiting_pairs)

    def begin(self, flight: Flight) -> None:
        """`flight` is sent now."""
        request, uncached, lent = flight.request, flight.uncached_tokens, flight.lent
        flight.alive_at = flight.sent_at
        flight.work = Work(uncached, uncached * (max(0, request.prompt_tokens - uncached) + uncached / 2))
        flight.new_tokens = uncached if lent is None else uncached + lent.tokens
        if request.promised is not None:
            flight.weight = request.promised.weight
        self._seen.clear()
        self.revision += 1
        if not self.waiting:
            self.busy_since = flight.sent_at
        # integers and halves: nothing is lost in adding and subtracting
        self.waiting += 1
        self.waiting_tokens += uncached
        self.waiting_pairs += flight.work.pairs
        self.open[flight] = None
        self._weights += flight.weight
        self.mean_weight = self._weights / len(self.open)
        if flight.is_silent:
            heapq.heappush(self.silent, (flight.sent_at + flight.predicted_ttft_s, id(flight), flight))
        self._last_sent_at = flight.sent_at
        rank = self._ranks.get(request.rank)
        if rank is None:
            rank = self._ranks[request.rank] = _Rank()
        rank.requests += 1
        self.background += request.rank == BACKGROUND_RANK
        if request.preemptible:
            self.preemptible += 1
            rank.preemptible_requests += 1
            rank.preemptible_tokens += uncached

    def presume(self, now: float) -> None:
        """Count a flight as decoding from its predicted first token on, if that is due and will not be seen."""
        while self.silent and self.silent[0][0] <= now:
            due_at, _, flight = heapq.heappop(self.silent)
            if flight in self.open and flight.is_waiting:
                self.begin_decoding(flight, due_at)

    def see_decoding(self, flight: Flight, now: float) -> None:
        """The answer of `flight` came at `now`: its company counts from then on, not from what was presumed."""
        self._count(now)
        flight.began_at, flight.began_with = now, (self._decoding_s, self._context_s)

    def begin_decoding(self, flight: Flight, now: float) -> None:
        """The prompt of `flight` is computed at `now`, as far as was seen or is presumed."""
        request = flight.request
        self._seen.clear()
        self.revision += 1
        self._count(now)
        flight.is_waiting = False
        flight.began_at, flight.began_with = now, (self._decoding_s, self._context_s)
        self.busy_since = now
        self.waiting -= 1
        self.waiting_tokens -= flight.uncached_tokens
        self.waiting_pairs -= flight.work.pairs
        self._decoding += request.sampling.choices
        self.context_tokens += request.prompt_tokens * request.sampling.choices
        # its context counts from now on
        self._counted_context = float(self.context_tokens)
        if request.rank == BACKGROUND_RANK:
            self._yielding_tokens += request.prompt_tokens
        if flight.on_computed is not None:
            flight.on_computed(flight)

    def grow(self, flight: Flight, tokens: int) -> None:
        """`flight`, which is preemptible, drew `tokens`."""
        self._seen.clear()
        self._ranks[flight.request.rank].preemptible_tokens += tokens

    def end(self, flight: Flight, now: float) -> tuple[float, float]:
        """`flight` is over, with or without an answer. Returns the sequences that decoded while it did, itself
        included, and the tokens of their contexts: the means, those of this moment if its answer came only now, and 1
        and 0 if it decoded nothing.
        """
        if self.silent and self.silent[0][0] <= now:
            self.presume(now)
        self._seen.clear()
        self.revision += 1
        self._count(now)
        company = (1.0, 0.0)
        if flight.began_at is not None:
            seconds, (decoding_s, context_s) = now - flight.began_at, flight.began_with
            company = float(self._decoding), float(self.context_tokens)
            if seconds > 0.0:
                company = (self._decoding_s - decoding_s) / seconds, (self._context_s - context_s) / seconds
        del self.open[flight]
        if self.silent and self.silent[0][2] is flight:
            heapq.heappop(self.silent)
        # from zero again, so that rounding does not add up
        self._weights = self._weights - flight.weight if self.open else 0.0
        self.mean_weight = self._weights / len(self.open) if self.open else 1.0
        self._ended.append((flight.sent_at, now))
        self._gone += flight.sent_at <= self._reported_at
        request, rank = flight.request, self._ranks[flight.request.rank]
        if not flight.is_waiting:
            self._decoding -= request.sampling.choices
            self.context_tokens -= request.prompt_tokens * request.sampling.choices + flight.drawn_tokens
            if request.rank == BACKGROUND_RANK:
                self._yielding_tokens -= request.prompt_tokens
        else:
            self.waiting -= 1
            self.waiting_tokens -= flight.uncached_tokens
            self.waiting_pairs -= flight.work.pairs
        if request.preemptible:
            self.preemptible -= 1
            rank.preemptible_requests -= 1
            rank.preemptible_tokens -= flight.uncached_tokens + flight.drawn_tokens
        rank.requests -= 1
        self.background -= request.rank == BACKGROUND_RANK
        if not rank.requests:
            del self._ranks[request.rank]
        return company

    def seen_by(self, rank: int | None) -> Seen:
        """What is here as one of `rank` sees it, where ranks are served in order; None: behind all ranks.

        Remembered until it changes.
        """
        seen = self._seen.get(rank)
        if seen is None:
            seen = self._seen[rank] = self._look(rank)
        return seen

    def unseen(self, reported_at: float) -> tuple[int, int]:
        """Requests sent after a report of `reported_at`, and the prompt tokens that they still have to compute."""
        requests = tokens = 0
        if self._last_sent_at > reported_at:
            for flight in reversed(self.open):
                if flight.sent_at <= reported_at:
                    break
                requests += 1
                tokens += flight.uncached_tokens if flight.is_waiting else 0
        return requests, tokens

    def gone(self, reported_at: float) -> int:
        """Requests that were there at `reported_at`, the time of the newest report, and have ended since."""
        if reported_at != self._reported_at:
            self._reported_at = reported_at
            while self._ended and self._ended[0][1] <= reported_at:
                self._ended.popleft()
            self._gone = sum(sent_at <= reported_at for sent_at, _ in self._ended)
        return self._gone

    def check(self) -> None:
        """Prove that every sum is what its parts add up to."""
        assert self.waiting == sum(flight.is_waiting for flight in self.open), f"{self!r}: lost count"
        assert sum(rank.requests for rank in self._ranks.values()) == len(self), f"{self!r}: ranks lost count"
        waiting = [flight.uncached_tokens for flight in self.open if flight.is_waiting]
        assert self.waiting_tokens == sum(waiting), f"{self!r}: waiting tokens are wrong"
        pairs = sum(flight.work.pairs for flight in self.open if flight.is_waiting)
        assert self.waiting_pairs == pairs, f"{self!r}: waiting pairs are wrong"
        preemptible = [
            flight.uncached_tokens + flight.drawn_tokens for flight in self.open if flight.request.preemptible
        ]
        assert self._look(-1)[1:] == (len(preemptible), sum(preemptible)), f"{self!r}: reclaimable is wrong"
        for rank, seen in self._seen.items():
            now = self._look(rank)
            assert seen[1:] == now[1:], f"{self!r}: remembers what is past"
            assert seen.front.ahead_of(1000) == now.front.ahead_of(1000), f"{self!r}: remembers flights that are gone"
        weights = sum(flight.weight for flight in self.open)
        assert math.isclose(self._weights, weights, abs_tol=1e-6), f"{self!r}: weights are wrong"
        assert self.open or not (self._decoding or self.context_tokens), f"{self!r}: decodes though nothing is open"
        assert self.preemptible == len(preemptible), f"{self!r}: preemptible requests are counted wrong"
        background = sum(flight.request.rank == BACKGROUND_RANK for flight in self.open)
        assert self.background == background, f"{self!r}: requests of the background are counted wrong"

    def _look(self, rank: int | None) -> Seen:
        requests = held = 0
        if rank is not None:
            for number, other in self._ranks.items():
                if number > rank:
                    requests += other.preemptible_requests
                    held += other.preemptible_tokens
        if not self.waiting:
            # the usual case
            return Seen(_NO_FRONT, requests, held)
        waiting = [
            flight.work for flight in self.open if flight.is_waiting and (rank is None or flight.request.rank <= rank)
        ]
        return Seen(Front(waiting), requests, held)

    def _count(self, now: float) -> None:
        """Add up the sequences that decoded since the last time, with the mean of the contexts then and now."""
        seconds = max(0.0, now - self._counted_at)
        self._decoding_s += seconds * self._decoding
        self._context_s += seconds * (self._counted_context + self.context_tokens) / 2 if self._decoding else 0.0
        self._counted_at, self._counted_context = now, float(self.context_tokens)
