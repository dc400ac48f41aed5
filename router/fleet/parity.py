"""Compares engines' answers and cache events with the router's own computation, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from policies.nouns import Usage
from policies.prefix.match import Match
from policies.prefix.parity import Doubt, Parity, ParityReport, Trust, Watch, Watched
from router.fleet.prompt_keys import Expected, PromptKeys
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES

_GRACE_S = 3.0
"""Seconds after an answer within which its blocks may be reported: events wait in queues of engine and network."""

_LEAST_HELD_TOKENS = 2 * BLOCK_TOKENS
"""Matches of fewer tokens prove nothing: engines always compute the end of a prompt."""

_MOST_RECORDS = 4096
_NOWHERE: Set[str] = frozenset()


class ParityListener(Protocol):
    """Gets the results of comparisons. Its methods must be cheap, because calls wait for them."""

    def compared(self, backend: str, what: Doubt, *, is_equal: bool) -> None:
        """One answer of `backend` was compared."""
        ...

    def trusted(self, report: ParityReport) -> None:
        """The trust in the events of a backend has changed, or the reason for it."""
        ...


class Unheard:
    """A ParityListener that does nothing."""

    def compared(self, backend: str, what: Doubt, *, is_equal: bool) -> None:
        """Nothing is done."""

    def trusted(self, report: ParityReport) -> None:
        """Nothing is done."""


@dataclass(slots=True)
class _Record:
    """One model at one backend; `ours` and `theirs` are the latest two counts of a prompt's tokens that differed."""

    parity: Parity
    since: float
    ours: int = 0
    theirs: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A last block that is not in events yet; `may_be_reused`: the engine may have had it before the feed began."""

    due_at: float
    backend: str
    model: str
    key: int
    watched: Watched
    may_be_reused: bool


class ParityMonitor:
    """Compares answers and events of engines with the router's own computation, and decides which events are used.

    `holds`: whether a backend holds a block now by its events; `is_live`: whether all its events are received;
    `is_whole`: whether its events cover all that it holds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        holds: Callable[[str, int], bool],
        is_live: Callable[[str], bool],
        is_whole: Callable[[str], bool],
    ) -> None:
        self._clock, self._holds, self._is_live, self._is_whole = clock, holds, is_live, is_whole
        self._records: dict[tuple[str, str], _Record] = {}
        self._watches: dict[str, Watch] = {}
        self._block_tokens: dict[str, int] = {}
        self._pending: list[_Pending] = []
        self._by_trust: dict[tuple[Trust, str], set[str]] = {}
        self.listener: ParityListener = Unheard()

    def __repr__(self) -> str:
        return f"<ParityMonitor of {len(self._records)} models at backends, {len(self._pending)} comparisons pending>"

    def proven(self, model: str) -> Set[str]:
        """The backends with events that count alone for `model`, while their feeds are live."""
        return self._by_trust.get((Trust.PROVEN, model), _NOWHERE)

    def broken(self, model: str) -> Set[str]:
        """The backends with events that are not used for `model`."""
        return self._by_trust.get((Trust.BROKEN, model), _NOWHERE)

    def needs_learning(self, backend: str) -> bool:
        """Whether `backend` has no model with comparisons, or a model for which its events do not count alone."""
        trusts = [record.parity.trust for (name, _), record in self._records.items() if name == backend]
        return not trusts or any(trust is not Trust.PROVEN for trust in trusts)

    def reports_of(self, backend: str) -> tuple[ParityReport, ...]:
        """A report for every model at `backend` with a comparison."""
        return tuple(self._report(*key, record) for key, record in self._records.items() if key[0] == backend)

    def block_tokens(self, backend: str, tokens: int) -> None:
        """Set the block size of `backend`, as its events report it."""
        self._block_tokens[backend] = tokens

    def stored(self, backend: str, keys: Sequence[int]) -> None:
        """Events of `backend` report that it stored these blocks."""
        if watch := self._watches.get(backend):
            watch.stored(keys)

    def lost(self, backend: str, keys: Sequence[int]) -> None:
        """Events of `backend` report that it evicted these blocks."""
        if watch := self._watches.get(backend):
            watch.lost(keys)

    def cleared(self, backend: str) -> None:
        """The contents of `backend` are unknown from now on."""
        if watch := self._watches.get(backend):
            watch.cleared()

    def expect(self, backend: str, prompt: PromptKeys, keys: tuple[int, ...], match: Match | None) -> Expected | None:
        """The values to compare the answer of `backend` to `prompt` with; None: no comparison with events.

        `keys` are the prompt's keys in its events, and `match` is how much of the prompt it holds by them now.
        """
        block_tokens = self._block_tokens.get(backend)
        if block_tokens is None or not (prompt.token_ids and prompt.compares and self._is_live(backend)):
            return None
        # the last token is not always in a block: some engines hash pairs of tokens
        whole = (_tokens_of(prompt) - 1) // block_tokens * block_tokens
        depth, now, expected = min(whole // BLOCK_TOKENS, len(keys)), self._clock(), Expected()
        watch = self._watches.setdefault(backend, Watch())
        if depth:
            expected.last_key = keys[depth - 1]
            expected.last = watch.begin(expected.last_key, now)
            expected.was_there = match is not None and match.blocks >= depth
        if match is not None:
            expected.event_tokens = match.blocks * BLOCK_TOKENS
        # with several ranks it is unknown which one answers
        if match is not None and match.p_hit == 1.0 and match.device_blocks:
            expected.held_key = keys[match.device_blocks - 1]
            expected.held = watch.begin(expected.held_key, now)
            expected.held_tokens = match.device_blocks * BLOCK_TOKENS - block_tokens
        return expected

    def answered(
        self, backend: str, prompt: PromptKeys, expected: Expected | None, usage: Usage | None, *, counts_cached: bool
    ) -> None:
        """`backend` has answered `prompt`. `counts_cached`: it reports its cached tokens, so zeros are meant."""
        ours, is_equal = _tokens_of(prompt), True
        if usage is not None and usage.prompt_tokens and prompt.token_ids and prompt.compares:
            is_equal = usage.prompt_tokens == ours
            if not is_equal:
                record = self._record(backend, prompt.model)
                record.ours, record.theirs = ours, usage.prompt_tokens
            self._note(backend, prompt.model, Doubt.COUNT, is_equal=is_equal)
        if expected is None:
            return
        if usage is not None and counts_cached:
            self._compare_cached(backend, prompt.model, expected, usage.cached_tokens)
        # without a report of the engine, it may have had any prompt before the feed began
        may_be_reused = usage is None or not counts_cached or usage.cached_tokens > expected.event_tokens
        self._compare_last(backend, prompt.model, expected, is_counted_alike=is_equal, may_be_reused=may_be_reused)
        self.dismiss(backend, expected)

    def dismiss(self, backend: str, expected: Expected) -> None:
        """Drop the comparison with `expected`."""
        watch = self._watches.get(backend)
        if watch is None:
            return
        for key, watched in ((expected.last_key, expected.last), (expected.held_key, expected.held)):
            if key is not None and watched is not None:
                watch.end(key, watched)
        expected.last = expected.held = None

    def tick(self) -> None:
        """Time has passed: compare the blocks that should have been in events by now."""
        now, pending, self._pending = self._clock(), self._pending, []
        for block in pending:
            watch = self._watches.get(block.backend)
            is_there = block.watched.was_stored or self._holds(block.backend, block.key)
            if watch is None or not self._is_live(block.backend) or (block.watched.was_lost and not is_there):
                pass
            elif is_there:
                self._note_reported(block.backend, block.model)
            elif now < block.due_at:
                self._pending.append(block)
                continue
            elif block.may_be_reused and not self._is_whole(block.backend):
                self._note(block.backend, block.model, Doubt.UNREPORTED, is_equal=False)
            else:
                self._note(block.backend, block.model, Doubt.BLOCKS, is_equal=False)
            if watch is not None:
                watch.end(block.key, block.watched)

    def forget(self, backend: str) -> None:
        """`backend` is no longer there."""
        for key in [key for key in self._records if key[0] == backend]:
            self._leave(*key)
            del self._records[key]
        self._watches.pop(backend, None)
        self._block_tokens.pop(backend, None)
        self._pending = [each for each in self._pending if each.backend != backend]

    def check(self) -> None:
        """Assert that watches are sound and that the sets agree with the records."""
        for watch in self._watches.values():
            watch.check()
        for (trust, model), backends in self._by_trust.items():
            for backend in backends:
                assert self._records[backend, model].parity.trust is trust, f"{backend} is not {trust} for {model}"

    def _compare_last(
        self, backend: str, model: str, expected: Expected, *, is_counted_alike: bool, may_be_reused: bool
    ) -> None:
        key, last = expected.last_key, expected.last
        if key is None:
            return
        if expected.was_there or (last is not None and last.was_stored) or self._holds(backend, key):
            self._note_reported(backend, model)
        elif not is_counted_alike:
            # events may be late, but these blocks will never be in them
            self._note(backend, model, Doubt.BLOCKS, is_equal=False)
        elif last is not None and not last.was_lost:
            last.users += 1
            self._pending.append(_Pending(self._clock() + _GRACE_S, backend, model, key, last, may_be_reused))

    def _compare_cached(self, backend: str, model: str, expected: Expected, cached_tokens: int) -> None:
        # a block that was evicted while the prompt waited is no error of the events
        if expected.held is None or expected.held.was_lost or expected.held_tokens < _LEAST_HELD_TOKENS:
            return
        self._note(backend, model, Doubt.CACHED, is_equal=2 * cached_tokens >= expected.held_tokens)

    def _note_reported(self, backend: str, model: str) -> None:
        """Events have a block as the router computes it."""
        self._note(backend, model, Doubt.BLOCKS, is_equal=True)
        self._note(backend, model, Doubt.UNREPORTED, is_equal=True)

    def _note(self, backend: str, model: str, what: Doubt, *, is_equal: bool) -> None:
        self.listener.compared(backend, what, is_equal=is_equal)
        record = self._record(backend, model)
        if record.parity.note(what, is_equal=is_equal):
            record.since = self._clock()
            self._leave(backend, model)
            self._by_trust.setdefault((record.parity.trust, model), set()).add(backend)
            self.listener.trusted(self._report(backend, model, record))

    def _record(self, backend: str, model: str) -> _Record:
        record = self._records.get((backend, model))
        if record is None:
            while len(self._records) >= _MOST_RECORDS:
                self._leave(*(oldest := next(iter(self._records))))
                del self._records[oldest]
            record = self._records[backend, model] = _Record(Parity(), self._clock())
        return record

    def _leave(self, backend: str, model: str) -> None:
        for trust in Trust:
            backends = self._by_trust.get((trust, model), set())
            backends.discard(backend)
            if not backends:
                self._by_trust.pop((trust, model), None)

    def _report(self, backend: str, model: str, record: _Record) -> ParityReport:
        parity = record.parity
        return ParityReport(backend, model, parity.trust, parity.doubt, _reason(record), record.since)


def _reason(record: _Record) -> str:
    match record.parity.doubt:
        case Doubt.COUNT:
            return f"it counts {record.theirs} tokens in a prompt with {record.ours} tokens by the router's count"
        case Doubt.BLOCKS:
            return "its events lack the blocks that the router expects: tokenizer or chat template differ"
        case Doubt.CACHED:
            return "it computes prompts again that are cached by its events"
        case Doubt.UNREPORTED:
            return "it may reuse blocks that it stored before the router received its events"
    return ""


def _tokens_of(prompt: PromptKeys) -> int:
    return len(prompt.token_ids) // TOKEN_BYTES
