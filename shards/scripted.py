"""An engine without a model: deterministic, for tests of the layers above an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, block_keys, root_key
from shards.nouns import (
    AdapterUse,
    CacheChange,
    CacheEvent,
    Cause,
    DiskUse,
    Drawn,
    Finished,
    FinishReason,
    Load,
    Pinned,
    Progress,
    Report,
    Submission,
    TokenLogprobs,
)

Answer = Callable[[Submission, bytes, int], tuple[int, ...]]
"""Submission, the token ids of its prompt without the beginning of an answer, and a choice -> the whole answer."""


@dataclass(frozen=True, slots=True)
class ScriptedNetwork:
    """The shape of a network that does not exist."""

    context_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """A model by name only; `path` may hold a tokenizer."""

    name: str = "scripted"
    path: Path | None = None
    dtype: str = "none"
    network: ScriptedNetwork = ScriptedNetwork()
    vocabulary: int = 1000


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """The limits of an engine. `prefill_tokens` of each prompt are computed in a step."""

    window_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 512
    prefill_tokens: int = 256


@dataclass(slots=True)
class _Sequence:
    submission: Submission
    prompt: bytearray = field(default_factory=bytearray)
    computed_tokens: int = 0
    cached_tokens: int = 0
    drawn: int = 0
    paused: bool = False


def count_up(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
    """`max_new_tokens` tokens that count up from the prompt's last token plus the choice."""
    last = int.from_bytes(prompt[-TOKEN_BYTES:], "little")
    tokens = submission.answered_tokens + submission.max_new_tokens
    return tuple((last + choice + step) % 1000 for step in range(1, tokens + 1))


class ScriptedEngine:
    """Answers with `answer`, one token per step and choice; caches the prompts' full blocks like a prefix cache.

    An answer shorter than `max_new_tokens` ends with STOP. `is_held` keeps every request from drawing. A `failure` is
    raised by the next step. At most `pinnable` blocks can be pinned; only `clear_cache` evicts. It reports `disk` and
    `drafts` (drafted and accepted tokens, and those by a draft model), and exchanges KV as far as `kv_address` and
    `kv_group` claim. The adapters of `adapter_use` compute what it does.
    """

    def __init__(
        self,
        answer: Answer = count_up,
        *,
        model: ScriptedModel = ScriptedModel(),
        options: ScriptedOptions = ScriptedOptions(),
        adapters: AdapterUse | None = None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.model, self.options = model, options
        self.is_held = False
        self.failure: Exception | None = None
        self.submitted: list[Submission] = []
        self.cancelled: list[Hashable] = []
        self.paced: list[tuple[Hashable, int | None, int | None, bool | None]] = []
        self.sequences: dict[Hashable, _Sequence] = {}
        self.shapes_answers = False
        self.pinnable = 512
        self.disk: DiskUse | None = None
        self.drafts = (0, 0, 0, 0)
        self.kv_address: str | None = None
        self.kv_group: str | None = None
        self.adapter_use = self._adapters_told = adapters
        self.handed_over: list[tuple[str, ...]] = []
        self.is_handing_over = False
        self.pins: dict[str, dict[int, float]] = {}
        self._answer = answer
        self._ended: list[Finished] = []
        self._events: list[CacheEvent] = []
        self._cache: dict[int, str] = {}
        self._step = 0

    def __repr__(self) -> str:
        return f"<ScriptedEngine {len(self.sequences)} requests, {len(self._cache)} blocks, step {self._step}>"

    def remember(self, keys: Iterable[int], domain: str = "") -> None:
        """Put blocks `keys` into the cache, as if earlier prompts of `domain` had stored them."""
        self._cache.update(dict.fromkeys(keys, domain))

    def submit(self, submission: Submission) -> None:
        """Open a request, or reject one that does not fit the context."""
        assert submission.key not in self.sequences, "a key is taken"
        self.submitted.append(submission)
        if submission.prompt_tokens + submission.max_new_tokens > self.model.network.context_tokens:
            self._reject(submission, "prompt and answer do not fit the context", Cause.CONTEXT)
        elif submission.adapter and submission.adapter not in (self.adapter_use or AdapterUse()).known:
            self._reject(submission, f"there is no adapter {submission.adapter}", Cause.INVALID)
        elif len(self.sequences) == self.options.max_running + self.options.max_waiting:
            self._reject(submission, "too many wait here", Cause.OVERLOADED)
        else:
            self.sequences[submission.key] = _Sequence(submission)

    def extend(self, key: Hashable, token_ids: bytes) -> None:
        """Append to a prompt; bytes that are not whole tokens end the request."""
        if len(token_ids) % TOKEN_BYTES and (broken := self.sequences.pop(key, None)):
            self._reject(broken.submission, "no whole number of tokens", Cause.INVALID)
        elif sequence := self.sequences.get(key):
            sequence.prompt += token_ids

    def pace(
        self,
        key: Hashable,
        *,
        rank: int | None = None,
        prefill_slice: int | None = None,
        paused: bool | None = None,
    ) -> None:
        """Record the call, and pause or resume if it asks for that."""
        self.paced.append((key, rank, prefill_slice, paused))
        if (sequence := self.sequences.get(key)) and paused is not None:
            sequence.paused = paused

    def cancel(self, key: Hashable) -> None:
        """End a request."""
        if sequence := self.sequences.pop(key, None):
            self.cancelled.append(key)
            self._end(sequence, FinishReason.CANCELLED)

    def pin(self, name: str, keys: Collection[int], *, domain: str, for_s: float) -> Pinned:
        """Record the pin, as far as its keys are cached and there is room; it does not expire."""
        held = list(takewhile(lambda key: self._cache.get(key) == domain, keys))
        elsewhere = {key for other, pinned in self.pins.items() if other != name for key in pinned}
        room = max(0, self.pinnable - len(elsewhere))
        self.pins.setdefault(name, {}).update(dict.fromkeys(held[:room], for_s))
        return Pinned(len(held), len(held[:room]))

    def unpin(self, name: str) -> int:
        """Forget the pin."""
        return len(self.pins.pop(name, {}))

    def hand_over(self, heirs: Sequence[str], *, within_s: float) -> None:  # noqa: ARG002
        """Note the call."""
        self.handed_over.append(tuple(heirs))

    def clear_cache(self, domain: str | None = None) -> int:
        """Forget the blocks of `domain`, or all blocks."""
        gone = tuple(key for key, of in self._cache.items() if domain in (None, of))
        for key in gone:
            del self._cache[key]
        for pinned in self.pins.values():
            for key in gone:
                pinned.pop(key, None)
        if gone:
            self._events.append(CacheEvent(CacheChange.EVICTED, gone))
        return len(gone)

    @property
    def has_work(self) -> bool:
        """Would a step do or report anything?"""
        return (
            bool(self._ended or self._events or self.adapter_use != self._adapters_told)
            or self.failure is not None
            or any(map(self._can_run, self.sequences.values()))
        )

    @property
    def next_deadline_s(self) -> float | None:
        """None: deadlines are not watched."""
        return None

    def step(self) -> Report:
        """Compute a slice of each prompt, or draw a token for each choice."""
        if self.failure is not None:
            raise self.failure
        self._step += 1
        drawn: list[Drawn] = []
        progress: list[Progress] = []
        stored, self._events = self._events, []
        for sequence in list(self.sequences.values()):
            if not self._can_run(sequence):
                continue
            if sequence.computed_tokens < sequence.submission.prompt_tokens:
                stored += self._prefill(sequence)
                done = sequence.computed_tokens, sequence.cached_tokens
                progress.append(Progress(sequence.submission.key, *done))
            else:
                drawn += self._draw(sequence)
        ended, self._ended = tuple(self._ended), []
        adapters = self.adapter_use if self.adapter_use != self._adapters_told else None
        self._adapters_told = self.adapter_use
        return Report(self._step, tuple(drawn), tuple(progress), ended, tuple(stored), self._load(), adapters=adapters)

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """All blocks as one event."""
        return (CacheEvent(CacheChange.STORED, tuple(self._cache)),) if self._cache else ()

    def check(self) -> None:
        """Raise AssertionError if a request is in an impossible state."""
        for sequence in self.sequences.values():
            assert sequence.computed_tokens * TOKEN_BYTES <= len(sequence.prompt), "computed tokens that never arrived"

    def _reject(self, submission: Submission, message: str, cause: Cause) -> None:
        for choice in range(submission.ends):
            end = Finished(submission.key, choice, FinishReason.REJECTED, 0, 0, 0, message=message, cause=cause)
            self._ended.append(end)

    def _can_run(self, sequence: _Sequence) -> bool:
        if sequence.paused:
            return False
        if sequence.computed_tokens == sequence.submission.prompt_tokens:
            return not self.is_held
        return sequence.computed_tokens < len(sequence.prompt) // TOKEN_BYTES

    def _prefill(self, sequence: _Sequence) -> list[CacheEvent]:
        submission, arrived = sequence.submission, len(sequence.prompt) // TOKEN_BYTES
        keys = block_keys(bytes(sequence.prompt), root_key(submission.adapter or self.model.name, submission.domain))
        if sequence.computed_tokens == 0:
            held = next((depth for depth, key in enumerate(keys) if key not in self._cache), len(keys))
            # the last token is always computed: its logits are needed
            sequence.cached_tokens = min(held * BLOCK_TOKENS, submission.prompt_tokens - 1)
            sequence.computed_tokens = sequence.cached_tokens
        sequence.computed_tokens = min(arrived, sequence.computed_tokens + self.options.prefill_tokens)
        full = keys[: sequence.computed_tokens // BLOCK_TOKENS]
        new = tuple(key for key in full if key not in self._cache)
        self._cache.update(dict.fromkeys(new, submission.domain))
        return [CacheEvent(CacheChange.STORED, new)] if new else []

    def _draw(self, sequence: _Sequence) -> list[Drawn]:
        submission, at = sequence.submission, sequence.drawn
        sequence.drawn += 1
        drawn, lengths = [], []
        for choice in range(submission.choices):
            answer = self._rest(sequence, choice)
            lengths.append(len(answer))
            if at < len(answer):
                logprobs = _logprobs(answer[at], submission.sampling.top_logprobs)
                drawn.append(Drawn(submission.key, choice, (answer[at],), logprobs))
            if at + 1 == max(1, len(answer)):
                reason = FinishReason.LENGTH if len(answer) == submission.max_new_tokens else FinishReason.STOP
                self._ended.append(self._finished(sequence, choice, reason, len(answer)))
        if at + 1 >= max(lengths):
            del self.sequences[submission.key]
        return drawn

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        # choices with a shorter answer have ended already; in most scripts all answers have the same length
        for choice in range(sequence.submission.choices):
            answer = self._rest(sequence, choice) if sequence.drawn else ()
            if not sequence.drawn or sequence.drawn < len(answer):
                self._ended.append(self._finished(sequence, choice, reason, sequence.drawn))

    def _rest(self, sequence: _Sequence, choice: int) -> tuple[int, ...]:
        """What is to be drawn here."""
        submission, answered = sequence.submission, sequence.submission.answered_tokens
        prompt = bytes(sequence.prompt[: len(sequence.prompt) - answered * TOKEN_BYTES])
        return self._answer(submission, prompt, choice)[answered : answered + submission.max_new_tokens]

    @staticmethod
    def _finished(sequence: _Sequence, choice: int, reason: FinishReason, output_tokens: int) -> Finished:
        submission = sequence.submission
        sizes = submission.prompt_tokens, sequence.cached_tokens, output_tokens
        return Finished(submission.key, choice, reason, *sizes)

    def _load(self) -> Load:
        sequences = self.sequences.values()
        running = sum(sequence.computed_tokens > 0 for sequence in sequences)
        to_compute = sum(sequence.submission.prompt_tokens - sequence.computed_tokens for sequence in sequences)
        waiting = len(self.sequences) - running
        pinned = len({key for keys in self.pins.values() for key in keys})
        free, pinnable = 1024 - len(self._cache), self.pinnable - pinned
        return Load(
            *(running, waiting, to_compute, 1024, free, 0.001, 0.001, False, pinnable), *self.drafts, disk=self.disk
        )


def _logprobs(token: int, top: int | None) -> tuple[TokenLogprobs, ...]:
    if top is None:
        return ()
    return (TokenLogprobs(-0.5, tuple((token + other, -0.5 - other) for other in range(top))),)
