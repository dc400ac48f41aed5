"""What backends are believed to hold: told by events, learnt from answers, or just sent there. One match for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from backends.base import rank_name
from policies.nouns import BackendView, Capability
from policies.prefix.cached_hints import Hint, from_ttft, from_usage
from policies.prefix.index import PrefixIndex
from policies.prefix.match import Match, best
from policies.prefix.residency import Guess, Picture, Residency
from policies.prefix.speculation import Speculation
from router.fleet.belief_news import MOST_KEYS, Belief, Learnt, Lost, Sent
from router.fleet.cluster.flights import Flight
from router.fleet.parity import ParityMonitor
from router.fleet.prompt_keys import PromptKeys


class Beliefs:
    """Of each backend what its events tell and what its answers teach, and for a moment what was sent to it.

    `tells` says of a backend whether it tells of its cache itself, as our shards do: then nothing is learnt. Other
    engines have feeds. `parity` compares what those tell with what the router computes: where both agree, events alone
    count for prompts of token ids; where they differ, what was learnt counts alone; before that is known, the better
    of both. Prompts of text match no events, so what was learnt counts for them at all backends with or without a feed.
    `is_candidate` says whether a request can be sent to a backend of this name: of a server whose data-parallel ranks
    are no candidates it is believed what its ranks hold, each as likely as the others. `index` hears the events. What
    is sent and learnt here may be told to other routers, and what they tell is believed as if it had happened here.
    """

    def __init__(
        self,
        tells: Callable[[str], bool],
        clock: Callable[[], float],
        is_candidate: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.index = PrefixIndex()
        self.parity = ParityMonitor(clock, holds=self._holds, is_live=self.is_live, is_whole=self.is_whole)
        self._tells, self._clock, self._is_candidate = tells, clock, is_candidate
        self._speculation, self._residency = Speculation(), Residency()
        # of servers that have feeds: the name of each rank -> its server, the names of all, those that are live, and
        # those whose events have told all that they hold
        self._server_of: dict[str, str] = {}
        self._ranks: dict[str, set[str]] = {}
        self._live: dict[str, set[str]] = {}
        self._whole: dict[str, set[str]] = {}
        # names in the index of those with more blocks than are remembered
        self._overflowed: set[str] = set()
        # the last rank of servers of which several are heard
        self._last_rank: dict[str, tuple[int, str]] = {}
        # names in the index of those whose events tell no salts
        self._unsalted: set[str] = set()
        self._exact: set[str] = set()
        self._tell: Callable[[Belief], None] = lambda _: None
        self._trust = 1.0

    def __repr__(self) -> str:
        return f"<Beliefs {self.index!r}, {self._speculation!r}, {self._residency!r}>"

    def longest(self, prompt: PromptKeys) -> Mapping[str, Match]:
        """Backend -> how much of `prompt` it is believed to hold, and how surely."""
        now, keys = self._clock(), prompt.keys
        told: Mapping[str, Match] = {}
        if prompt.is_exact:
            told = self.index.longest(keys)
            if self._unsalted and prompt.token_ids:
                told = best(told, self._shared(prompt))
            if self._ranks:
                prompt.told = told = self._joined(told) if self._last_rank else told
                if broken := self.parity.broken(prompt.model):
                    told = {name: match for name, match in told.items() if name not in broken}
            learnt = self._residency.longest(keys, now, but=lambda name: self._is_told(name, prompt.model))
        else:
            learnt = self._residency.longest(keys, now)
        if self._trust < 1.0:
            learnt = {name: one._replace(p_hit=one.p_hit * self._trust) for name, one in learnt.items()}
        return best(told, learnt, self._speculation.longest(keys, now))

    def sent(self, backend: str, prompt: PromptKeys) -> None:
        """`prompt` goes to `backend` now: equal ones that come at once are to follow it."""
        # a prefix that is asked for is the last that the index forgets, however long ago it was told of
        self.index.touch(prompt.keys)
        self._tell(Sent(backend, self._speculation.sent(backend, prompt.keys, self._clock())))
        if backend in self._server_of:
            keys = prompt.keys
            if prompt.token_ids and self._hides_salts(backend):
                keys = prompt.shared
                self.index.touch(keys)
            prompt.expected = self.parity.expect(backend, prompt, keys, prompt.told.get(backend))

    def ended(self, prompt: PromptKeys, flight: Flight, seen: BackendView) -> None:
        """Learn from the answer of `flight` what of `prompt` was at its backend, and that all of it is now.

        `seen` is the backend as it was before. Nothing is learnt where a backend tells of its cache itself, or from
        what was never answered.
        """
        backend, expected, prompt.expected = flight.backend, prompt.expected, None
        if not flight.answered or self._tells(backend):
            if expected is not None:
                self.parity.dismiss(backend, expected)
            return
        keys, usage = prompt.keys, flight.usage
        if usage is not None and usage.cached_tokens:
            # a zero from who has never told of a hit may mean that it does not count them
            self._exact.add(backend)
        counts = backend in self._exact
        # engines compute the whole prompt where its tokens' probabilities are wanted
        reads_cache = Capability.PROMPT_LOGPROBS not in flight.request.needs
        self.parity.answered(backend, prompt, expected, usage, counts_cached=counts and reads_cache)
        if not keys:
            return
        guess = self._residency.sent(backend, keys, self._clock())
        drawn_blocks = int(usage.completion_tokens / prompt.key_tokens) if usage else 0
        self._residency.answered(backend, drawn_blocks)
        hint = self._hint(guess, flight, seen, prompt.key_tokens)
        if hint is not None:
            self._residency.observe(guess, hint)
        if not prompt.is_exact or not self._is_told(backend, prompt.model) or self._hides_salts(backend):
            share, weight = hint or (None, 1.0)
            self._tell(Learnt(backend, tuple(keys[:MOST_KEYS]), len(keys), drawn_blocks, share, weight, counts))

    def failed(self, backend: str) -> None:
        """`backend` broke off: what was just sent there may never have been computed."""
        self._speculation.forget(backend)
        self._tell(Lost(backend))

    def cleared(self, backend: str) -> None:
        """Part of what `backend` held was cleared: it tells which, but what was just sent there may be part of it."""
        self.failed(backend)

    def share(self, tell: Callable[[Belief], None]) -> None:
        """Call `tell` with whatever other routers should hear. What it does must be cheap."""
        self._tell = tell

    def hear(self, news: Belief, at: float) -> None:
        """Another router told this, of the time `at`."""
        match news:
            case Sent():
                self._speculation.hear(news.backend, news.noted, self._clock(), sent_at=at)
            case Learnt() if news.keys and not self._tells(news.backend):
                self._hear_learnt(news, at)
            case Lost():
                self._speculation.forget(news.backend)

    def learnt_of(self) -> tuple[str, ...]:
        """Backends of which what was learnt is of use, since events alone do not tell; those of few blocks first."""
        return tuple(name for name in self._residency.backends() if self._needs_learning(name))

    def picture(self, backend: str, most_keys: int) -> Picture | None:
        """What was learnt of `backend`: a copy, for routers that were not there."""
        return self._residency.picture(backend, most_keys, self._clock())

    def counts_cached(self, backend: str) -> bool:
        """Has `backend` told of cached tokens before, so that its zeros can be believed?"""
        return backend in self._exact

    def take_over(self, picture: Picture, *, counts: bool) -> None:
        """Believe what another router had learnt, and that the backend counts cached tokens, if it `counts`."""
        if not self._tells(picture.backend):
            self._residency.take_over(picture, self._clock())
            if counts:
                self._exact.add(picture.backend)

    def doubt(self, trust: float) -> None:
        """What was learnt is to be believed so much, in (0, 1]: less while nobody hears what other routers send."""
        self._trust = trust

    def joined(self, backend: str, rank: int) -> str:
        """The name in the index of one data-parallel rank of the server `backend`."""
        name = rank_name(backend, rank)
        self._server_of[name] = backend
        self._ranks.setdefault(backend, set()).add(name)
        if rank:
            self._last_rank[backend] = max(self._last_rank.get(backend, (0, "")), (rank, name))
        return name

    def holder(self, name: str) -> str:
        """The backend that holds what events tell of `name`: that rank, or the server if it chooses ranks itself."""
        server = self._server_of.get(name, name)
        return server if self._chooses(server) else name

    def tells_salts(self, name: str, *, is_told: bool) -> None:
        """Events of `name` tell the cache salts of prompts, or do not as far as is known.

        Where they do not, blocks are of any domain. They count for those domains alone that sent them there.
        """
        (self._unsalted.discard if is_told else self._unsalted.add)(name)

    def stored(self, name: str, keys: Sequence[int], tier: str = "device") -> None:
        """Events tell that the one who is called `name` in the index holds the blocks `keys`, parents first."""
        self.index.store(name, keys, tier)
        self.parity.stored(self.holder(name), keys)

    def evicted(self, name: str, keys: Sequence[int], tier: str = "device") -> None:
        """Events tell that these blocks left this tier."""
        self.index.evict(name, keys, tier)
        self.parity.lost(self.holder(name), keys)

    def emptied(self, name: str, *, is_empty: bool) -> None:
        """Events tell nothing any more of what `name` holds; if it `is_empty`, that is because it holds nothing."""
        backend = self.holder(name)
        self.index.clear(name)
        self._overflowed.discard(name)
        self.parity.cleared(backend)
        if is_empty and not self._chooses(backend):
            self._speculation.forget(backend)
            self._residency.restarted(backend)

    def left_out(self, name: str) -> None:
        """Events of `name` told of more blocks than are remembered, so that it holds some which are not known here."""
        self._overflowed.add(name)

    def trust(self, backend: str, rank: int, confidence: float, *, is_whole: bool = False) -> None:
        """What the feed of one rank of `backend` told is true with this probability; 1: it is live.

        `is_whole`: no block is there that it has not told of.
        """
        name = self.joined(backend, rank)
        self.index.trust(name, confidence)
        for names, belongs in (
            (self._live, confidence == 1.0),
            (self._whole, is_whole and name not in self._overflowed),
        ):
            ranks = names.setdefault(backend, set())
            (ranks.add if belongs else ranks.discard)(name)

    def hears(self, backend: str) -> bool:
        """Is there a feed of cache events of `backend`, however well it is heard?"""
        return backend in self._server_of

    def is_live(self, backend: str) -> bool:
        """Are all events of `backend` heard, of all its ranks where it chooses among them?"""
        # while one rank is not heard, what is told of a server that chooses among them is only a part of it
        return self._is_among(self._live, backend)

    def is_whole(self, backend: str) -> bool:
        """Have events told all that `backend` holds, so that no block is there from before they were heard?"""
        return self._is_among(self._whole, backend)

    def forget(self, backend: str) -> None:
        """`backend` is no longer there."""
        self.index.forget(backend)
        for name in self._ranks.pop(backend, ()):
            del self._server_of[name]
            self._unsalted.discard(name)
            self._overflowed.discard(name)
            self.index.forget(name)
        self._speculation.forget(backend)
        self._residency.forget(backend)
        self._exact.discard(backend)
        self._live.pop(backend, None)
        self._whole.pop(backend, None)
        self._last_rank.pop(backend, None)
        self.parity.forget(backend)

    def check(self) -> None:
        """Its parts are sound."""
        for part in (self.index, self._speculation, self._residency, self.parity):
            part.check()

    def _is_among(self, names: Mapping[str, set[str]], backend: str) -> bool:
        """Is `backend` in the set of its server, with all its ranks where the server chooses among them?"""
        server = self._server_of.get(backend)
        if server is None:
            return False
        ranks = names.get(server, set())
        return ranks == self._ranks[server] if self._chooses(server) else backend in ranks

    def _is_told(self, backend: str, model: str) -> bool:
        """Do events alone count for prompts of token ids?"""
        return (backend in self.parity.proven(model) and self.is_live(backend)) or self._tells(backend)

    def _hides_salts(self, backend: str) -> bool:
        """Do events of `backend` tell blocks without the domain that they belong to?"""
        return any(self.holder(name) == backend for name in self._unsalted)

    def _shared(self, prompt: PromptKeys) -> dict[str, Match]:
        """What events without salts say of `prompt`: no more than its domain itself has sent there.

        So no tenant is told what another one has cached.
        """
        keys, found = prompt.keys, dict[str, Match]()
        for name, match in self.index.longest(prompt.shared).items():
            if name in self._unsalted and (known := self._residency.known(self.holder(name), keys)):
                found[name] = match.first(known)
        return found

    def _needs_learning(self, backend: str) -> bool:
        if self._hides_salts(backend):
            return True
        return not self._tells(backend) and not (self.is_live(backend) and not self.parity.needs_learning(backend))

    def _holds(self, backend: str, key: int) -> bool:
        """Do events tell that `backend` holds the block `key` now, whatever comes before it?"""
        return any(self.holder(name) == backend for name in self.index.longest((key,)))

    def _chooses(self, server: str) -> bool:
        """Does `server` choose the rank of a request itself? Where its last rank is a candidate, all are."""
        last = self._last_rank.get(server)
        return last is not None and not self._is_candidate(last[1])

    def _hear_learnt(self, news: Learnt, at: float) -> None:
        guess = self._residency.sent(news.backend, news.keys, at)
        self._residency.answered(news.backend, news.drawn_blocks)
        if news.counts:
            self._exact.add(news.backend)
        if news.cached_share is not None:
            hint = Hint(news.cached_share, news.weight)
            self._residency.observe(replace(guess, blocks=max(news.blocks, len(news.keys))), hint)

    def _hint(self, guess: Guess, flight: Flight, seen: BackendView, key_tokens: float) -> Hint | None:
        usage = flight.usage
        if usage is not None and usage.prompt_tokens and guess.backend in self._exact:
            return from_usage(usage.cached_tokens, usage.prompt_tokens)
        # an answer in one piece does not tell when its first token was there
        if not guess.known or flight.first_at is None:
            return None
        tokens, warm = flight.request.prompt_tokens, guess.known * key_tokens
        cold_s = seen.latency.ttft_s(tokens, 0, queue_s=seen.queue_s)
        warm_s = seen.latency.ttft_s(max(1, tokens - warm), warm, queue_s=seen.queue_s)
        return from_ttft(flight.ttft_s, cold_s=cold_s, warm_s=warm_s, warm_share=guess.known / max(1, guess.blocks))

    def _joined(self, told: Mapping[str, Match]) -> dict[str, Match]:
        """`told`, but of ranks among which their server chooses one match: the best, as likely as that rank is."""
        whole: dict[str, Match] = {}
        for name, match in told.items():
            server = self._server_of.get(name, name)
            if not self._chooses(server):
                whole[name] = match
                continue
            one = match._replace(p_hit=match.p_hit / len(self._ranks[server]))
            known = whole.get(server)
            if known is None or one.expected_blocks > known.expected_blocks:
                whole[server] = one
        return whole
