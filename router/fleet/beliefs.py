"""Estimated cache contents of all backends, from events, answers, and prompts just sent, joined into one match."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from backends.base import rank_name
from policies.nouns import BackendView, Capability
from policies.prefix.cached_hints import Hint, from_ttft, from_usage
from policies.prefix.held_blocks import HeldBlocks
from policies.prefix.index import PrefixIndex
from policies.prefix.match import Match, best
from policies.prefix.residency import Guess, Picture, Residency
from policies.prefix.speculation import Speculation
from router.fleet.belief_news import MOST_KEYS, Belief, Learnt, Lost, Sent
from router.fleet.cluster.flights import Flight
from router.fleet.parity import ParityMonitor
from router.fleet.prompt_keys import PromptKeys

MOST_LEARNED = 8
"""Most learned caches in which single blocks are looked up: 1 µs for each of them."""


class Beliefs:
    """For each backend: blocks in its events, blocks learned from its answers, and for a moment prompts sent to it.

    `reports`: whether a backend reports its cache itself, as our shards do: then nothing is learned. Other
    engines have feeds. `parity` compares their events with the router's own computation: where both agree, events alone
    count for prompts of token ids; where they differ, learned blocks alone count; before that is known, the better
    of both. Prompts of text match no events, so learned blocks count for them at all backends with or without a feed.
    `is_candidate`: whether a request can be sent to a backend of this name. A server with data-parallel ranks that
    are no candidates is believed to hold the blocks of its ranks, each rank as likely as the others. `index` gets the
    events. Prompts sent and blocks learned here may be shared with other routers, and theirs count like this router's.
    """

    def __init__(
        self,
        reports: Callable[[str], bool],
        clock: Callable[[], float],
        is_candidate: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.index = PrefixIndex()
        self.parity = ParityMonitor(clock, holds=self._holds, is_live=self.is_live, is_whole=self.is_whole)
        self._reports, self._clock, self._is_candidate = reports, clock, is_candidate
        self._speculation, self._residency = Speculation(), Residency()
        # of servers with feeds: the name of each rank -> its server, the names of all, those that are live, and
        # those with events for all blocks that they hold
        self._server_of: dict[str, str] = {}
        self._ranks: dict[str, set[str]] = {}
        self._live: dict[str, set[str]] = {}
        self._whole: dict[str, set[str]] = {}
        # names in the index of caches with more blocks than the index keeps
        self._overflowed: set[str] = set()
        # the last rank of servers with several feeds
        self._last_rank: dict[str, tuple[int, str]] = {}
        # names in the index of caches with events that have no salts
        self._unsalted: set[str] = set()
        self._exact: set[str] = set()
        self._tell: Callable[[Belief], None] = lambda _: None
        self._trust = 1.0

    def __repr__(self) -> str:
        return f"<Beliefs {self.index!r}, {self._speculation!r}, {self._residency!r}>"

    def longest(self, prompt: PromptKeys) -> Mapping[str, Match]:
        """Backend -> how much of `prompt` it is believed to hold, and with which probability."""
        now, keys = self._clock(), prompt.keys
        matches: Mapping[str, Match] = {}
        if not keys:
            return matches
        if prompt.is_exact:
            matches = self.index.longest(keys)
            if self._unsalted and prompt.token_ids:
                matches = best(matches, self._shared(prompt))
            if self._ranks:
                prompt.reported = matches = self._joined(matches) if self._last_rank else matches
                if broken := self.parity.broken(prompt.model):
                    matches = {name: match for name, match in matches.items() if name not in broken}
            learnt = self._residency.longest(keys, now, but=lambda name: self._events_suffice(name, prompt.model))
        else:
            learnt = self._residency.longest(keys, now)
        if self._trust < 1.0:
            learnt = {name: match._replace(p_hit=match.p_hit * self._trust) for name, match in learnt.items()}
        return best(matches, learnt, self._speculation.longest(keys, now))

    def with_chunks(self, held: Mapping[str, int], prompt: PromptKeys) -> dict[str, int]:
        """`held` tokens of the beginning of `prompt` by backend, and those of its further documents that each backend
        need not compute, since it has reported their whole chunks.
        """
        spared = dict(held)
        for keys, start, stop, reused in prompt.chunks:
            for name, match in self.index.longest(keys).items():
                first = max(start, held.get(name, 0))
                if match.blocks == len(keys) and first < stop:
                    spared[name] = spared.get(name, 0) + int(reused * (stop - first))
        return spared

    def held(self, model: str, *, is_exact: bool, underway: Container[int] = ()) -> HeldBlocks:
        """Which backends hold single blocks of prompts for `model`, as its backends call it; `is_exact`: of token ids.

        Blocks `underway` are being computed, and count as if one more backend held them. Other prompts that were only
        just sent do not count. To be used at once.
        """
        broken = self.parity.broken(model) if is_exact else ()
        names = {name for backend in broken for name in (backend, *self._ranks.get(backend, ()))}
        in_index, of_index = self.index.holders(but=names)
        learned = self._residency.newest(
            MOST_LEARNED,
            but=lambda name: is_exact and self._events_suffice(name, model) and not self._hides_salts(name),
        )
        if underway:
            learned = [*learned, lambda key, _: key in underway]
        return HeldBlocks(in_index, of_index if is_exact else 0, learned)

    def sent(self, backend: str, prompt: PromptKeys) -> None:
        """`prompt` goes to `backend` now: equal prompts that follow at once should go there too."""
        if prompt.is_exact:
            # a prefix in use is evicted last from the index, however old its events are
            self.index.touch(prompt.keys)
        if prompt.keys:
            self._tell(Sent(backend, self._speculation.sent(backend, prompt.keys, self._clock())))
        if backend in self._server_of:
            keys = prompt.keys
            if prompt.token_ids and self._hides_salts(backend):
                keys = prompt.shared
                self.index.touch(keys)
            expected = self.parity.expect(backend, prompt, keys, prompt.reported.get(backend))
            if expected is not None:
                prompt.expected[backend] = expected

    def computed(self, backend: str, keys: Sequence[int]) -> None:
        """`backend` has computed the long prompt with blocks `keys`: it may have been sent there long ago."""
        if not self._reports(backend):
            self._speculation.sent(backend, keys, self._clock())

    def ended(self, prompt: PromptKeys, flight: Flight, seen: BackendView) -> None:
        """Learn from the answer of `flight` how much of `prompt` its backend had, and that it has all of it now.

        `seen` is the backend's view before. Nothing is learned if the backend reports its cache itself, or if there was
        no answer.
        """
        backend, expected = flight.backend, prompt.expected.pop(flight.backend, None)
        if not flight.answered or self._reports(backend):
            if expected is not None:
                self.parity.dismiss(backend, expected)
            return
        # what it fetched was neither in its cache nor computed there
        keys, usage = prompt.keys, None if flight.fetches else flight.usage
        if usage is not None and usage.cached_tokens:
            # a zero may mean that the backend does not count cached tokens, unless it has reported a hit before
            self._exact.add(backend)
        counts = backend in self._exact
        # engines compute the whole prompt if logprobs of its tokens are requested
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
        if not prompt.is_exact or not self._events_suffice(backend, prompt.model) or self._hides_salts(backend):
            share, weight = hint or (None, 1.0)
            self._tell(Learnt(backend, tuple(keys[:MOST_KEYS]), len(keys), drawn_blocks, share, weight, counts))

    def failed(self, backend: str) -> None:
        """`backend` failed: prompts just sent there may never have been computed."""
        self._speculation.forget(backend)
        self._tell(Lost(backend))

    def cleared(self, backend: str) -> None:
        """Part of the cache of `backend` was cleared: it reports which, but prompts just sent may be part of it."""
        self.failed(backend)

    def share(self, tell: Callable[[Belief], None]) -> None:
        """Call `tell` with news for other routers; it must be cheap."""
        self._tell = tell

    def hear(self, news: Belief, at: float) -> None:
        """Take over news of another router from the time `at`."""
        match news:
            case Sent():
                self._speculation.hear(news.backend, news.noted, self._clock(), sent_at=at)
            case Learnt() if news.keys and not self._reports(news.backend):
                self._hear_learnt(news, at)
            case Lost():
                self._speculation.forget(news.backend)

    def learnt_of(self) -> tuple[str, ...]:
        """Backends with learned blocks that count, because events do not count alone; few blocks first."""
        return tuple(name for name in self._residency.backends() if self._needs_learning(name))

    def picture(self, backend: str, most_keys: int) -> Picture | None:
        """A copy of the learned blocks of `backend`, for routers that start later."""
        return self._residency.picture(backend, most_keys, self._clock())

    def counts_cached(self, backend: str) -> bool:
        """Whether `backend` has reported cached tokens before, so that its zeros are meant."""
        return backend in self._exact

    def take_over(self, picture: Picture, *, counts: bool) -> None:
        """Take over learned blocks from another router; `counts`: the backend reports cached tokens."""
        if not self._reports(picture.backend):
            self._residency.take_over(picture, self._clock())
            if counts:
                self._exact.add(picture.backend)

    def doubt(self, trust: float) -> None:
        """Set the trust in learned blocks, in (0, 1]: less than 1 while prompts of other routers are not known."""
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
        """The backend with the blocks of `name` in the index: that rank, or the server if it chooses ranks itself."""
        server = self._server_of.get(name, name)
        return server if self._chooses(server) else name

    def set_salts(self, name: str, *, are_reported: bool) -> None:
        """Whether events of `name` have the cache salts of prompts, as far as is known.

        Without them, blocks may belong to any domain. They count only for domains that sent them there.
        """
        (self._unsalted.discard if are_reported else self._unsalted.add)(name)

    def stored(self, name: str, keys: Sequence[int], tier: str = "device") -> None:
        """Events report that the cache `name` in the index holds the blocks `keys`, parents first."""
        self.index.store(name, keys, tier)
        self.parity.stored(self.holder(name), keys)

    def evicted(self, name: str, keys: Sequence[int], tier: str = "device") -> None:
        """Events report that these blocks left this tier."""
        self.index.evict(name, keys, tier)
        self.parity.lost(self.holder(name), keys)

    def emptied(self, name: str, *, is_empty: bool) -> None:
        """The contents of `name` are unknown now; with `is_empty` it is known to hold nothing."""
        backend = self.holder(name)
        self.index.clear(name)
        self._overflowed.discard(name)
        self.parity.cleared(backend)
        if is_empty and not self._chooses(backend):
            self._speculation.forget(backend)
            self._residency.restarted(backend)

    def left_out(self, name: str) -> None:
        """Events of `name` had more blocks than the index keeps, so it holds some that are not known here."""
        self._overflowed.add(name)

    def trust(self, backend: str, rank: int, confidence: float, *, is_whole: bool = False) -> None:
        """Set the probability that the events of one rank of `backend` are still true; 1: its feed is live.

        `is_whole`: its events cover every block that it holds.
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
        """Whether there is a feed of cache events of `backend`, in whatever state."""
        return backend in self._server_of

    def is_live(self, backend: str) -> bool:
        """Whether all events of `backend` are received, of all its ranks if it chooses among them."""
        # without the feed of one rank, the known blocks of a server that chooses among its ranks are only a part
        return self._is_among(self._live, backend)

    def is_whole(self, backend: str) -> bool:
        """Whether events cover every block of `backend`, so that none is left from before its feed began."""
        return self._is_among(self._whole, backend)

    def forget(self, backend: str) -> None:
        """`backend` has left."""
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
        """Assert the invariants of its parts."""
        for part in (self.index, self._speculation, self._residency, self.parity):
            part.check()

    def _is_among(self, names: Mapping[str, set[str]], backend: str) -> bool:
        """Whether `backend` is in the set of its server, with all its ranks if the server chooses among them."""
        server = self._server_of.get(backend)
        if server is None:
            return False
        ranks = names.get(server, set())
        return ranks == self._ranks[server] if self._chooses(server) else backend in ranks

    def _events_suffice(self, backend: str, model: str) -> bool:
        """Whether events alone count for prompts of token ids."""
        return (backend in self.parity.proven(model) and self.is_live(backend)) or self._reports(backend)

    def _hides_salts(self, backend: str) -> bool:
        """Whether events of `backend` report blocks without their domain."""
        return any(self.holder(name) == backend for name in self._unsalted)

    def _shared(self, prompt: PromptKeys) -> dict[str, Match]:
        """Matches from events without salts: no more than the prompt's domain itself has sent there.

        So no tenant learns what another one has cached.
        """
        keys = prompt.keys
        found: dict[str, Match] = {}
        for name, match in self.index.longest(prompt.shared).items():
            if name in self._unsalted and (known := self._residency.known(self.holder(name), keys)):
                found[name] = match.first(known)
        return found

    def _needs_learning(self, backend: str) -> bool:
        if self._hides_salts(backend):
            return True
        return not self._reports(backend) and not (self.is_live(backend) and not self.parity.needs_learning(backend))

    def _holds(self, backend: str, key: int) -> bool:
        """Whether `backend` holds the block `key` now by its events, with or without its parents."""
        return any(self.holder(name) == backend for name in self.index.longest((key,)))

    def _chooses(self, server: str) -> bool:
        """Whether `server` chooses the rank of a request itself. If its last rank is a candidate, all are."""
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
        # an answer in one piece has no time of its first token
        if not guess.known or flight.first_at is None:
            return None
        tokens, warm = flight.request.prompt_tokens, guess.known * key_tokens
        cold_s = seen.latency.ttft_s(tokens, 0, queue_s=seen.queue_s)
        warm_s = seen.latency.ttft_s(max(1, tokens - warm), warm, queue_s=seen.queue_s)
        return from_ttft(flight.ttft_s, cold_s=cold_s, warm_s=warm_s, warm_share=guess.known / max(1, guess.blocks))

    def _joined(self, matches: Mapping[str, Match]) -> dict[str, Match]:
        """`matches`, with one for all ranks of a server that chooses among them: the best, as likely as its rank."""
        whole: dict[str, Match] = {}
        for name, match in matches.items():
            server = self._server_of.get(name, name)
            if not self._chooses(server):
                whole[name] = match
                continue
            shared = match._replace(p_hit=match.p_hit / len(self._ranks[server]))
            known = whole.get(server)
            if known is None or shared.expected_blocks > known.expected_blocks:
                whole[server] = shared
        return whole
