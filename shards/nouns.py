"""Input of the engine and output of its steps. Torch-free; the server translates them to the wire."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

MOST_CHOICES = 128
"""Most choices of one request."""


class GrammarForm(enum.Enum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A list of texts, as JSON."""
    RULES = "rules"
    """The Lark dialect of llguidance, or llama.cpp's GBNF."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer, written in `form`; None is a form that this shard does not know."""

    form: GrammarForm | None
    text: str


def _dial(default: float, holds: Callable[[float], bool], must: str) -> Any:
    """A number among the parameters of a draw: values that do not hold are rejected (NaN holds nowhere)."""
    return field(default=default, metadata={"holds": holds, "must": must})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and penalties 1 / 0 / 0 are off.

    `top_logprobs` None: no logprobs; 0: the drawn token's only. With a `grammar` every prefix of the answer satisfies
    it, and the answer ends only where the grammar allows, or by a stop string, a stop token or its length.
    """

    temperature: float = _dial(0.0, lambda value: 0 <= value < math.inf, "must be 0 or more")
    top_p: float = _dial(1.0, lambda value: 0 < value <= 1, "must be above 0 and at most 1")
    top_k: int = _dial(0, lambda value: value >= 0, "must be 0 (off) or more")
    min_p: float = _dial(0.0, lambda value: 0 <= value <= 1, "must be between 0 and 1")
    repetition_penalty: float = _dial(1.0, lambda value: 0 < value < math.inf, "must be above 0")
    presence_penalty: float = _dial(0.0, math.isfinite, "must be a finite number")
    frequency_penalty: float = _dial(0.0, math.isfinite, "must be a finite number")
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None


DIALS: tuple[Field[Any], ...] = tuple(each for each in fields(SamplingParams) if "holds" in each.metadata)
"""The numbers among the parameters of a draw; 0 on the wire stands for their defaults."""


class KvSource(NamedTuple):
    """The first `tokens` of a prompt have KV at the shard with this `address` (host:port) for KV."""

    address: str
    tokens: int


class DocumentSpan(NamedTuple):
    """A document of a prompt: its tokens from `start` up to `stop`."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Blend:
    """Permission to take the KV of `documents`, in order, from chunks: from wherever they stood before.

    `budget` is the share (0 to 1) of a document's tokens that is computed again.
    """

    documents: tuple[DocumentSpan, ...]
    budget: float


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to the engine. `key` is the caller's name for it, unique while the request is open.

    Its prompt (`prompt_tokens` in total) arrives by `Engine.extend`. `deadline_s` is a time of the engine's clock.
    `choices` sequences are drawn from the one prompt. A `preemptible` request may lose its place to a better rank, and
    continues later with the same result.

    The last `answered_tokens` of the prompt are the beginning of the answer, drawn elsewhere: the next draw depends on
    them as if they had been drawn here. `max_new_tokens` more are drawn.

    KV of the prompt's beginning is at `source`, if it is given, and may be fetched from there. With `blend` the KV of
    the prompt may be approximate; a shard that does not blend computes it exactly.

    `adapter` names the LoRA adapter that computes it; empty: the model itself.
    """

    key: Hashable
    prompt_tokens: int
    max_new_tokens: int
    domain: str = ""
    rank: int = 0
    deadline_s: float | None = None
    prefill_slice: int | None = None
    choices: int = 1
    sampling: SamplingParams = SamplingParams()
    preemptible: bool = True
    answered_tokens: int = 0
    source: KvSource | None = None
    blend: Blend | None = None
    adapter: str = ""

    @property
    def ends(self) -> int:
        """The number of Finished records that it gets: one per choice, or one if the number of choices is invalid."""
        return self.choices if 1 <= self.choices <= MOST_CHOICES else 1


class FinishReason(enum.Enum):
    """The reason why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"
    DEADLINE = "deadline"


class Cause(enum.Enum):
    """The reason why a request was rejected, for machines."""

    INVALID = "invalid"
    CONTEXT = "context"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one drawn token, and of the most likely tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawn(NamedTuple):
    """Tokens that one choice of one request drew in one step; `logprobs` is empty or one per token."""

    key: Hashable
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of a prompt that has KV; `cached_tokens` of it were found in the cache, and `blended_tokens` were taken
    from chunks that had been computed before.
    """

    key: Hashable
    computed_tokens: int
    cached_tokens: int
    blended_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice. `stop` is the stop string that ended it; `by_token`: a stop token did. `message` is for
    people, `cause` for machines.
    """

    key: Hashable
    choice: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop: str = ""
    message: str = ""
    cause: Cause | None = None
    blended_tokens: int = 0
    by_token: bool = False


class CacheChange(enum.Enum):
    """The kind of a change to cached blocks."""

    STORED = "stored"
    EVICTED = "evicted"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of this shard's cache; parents' keys come before their children's."""

    change: CacheChange
    keys: tuple[int, ...] = ()
    tier: str = "device"


class PeerUse(NamedTuple):
    """KV that was fetched from other shards since the start, for prompts: so many `fetches` with `blocks` that came,
    the bytes that came, and the seconds for which something was on its way. `failed` blocks did not come, and
    `taken_over` were fetched from shards that stopped.
    """

    fetches: int = 0
    blocks: int = 0
    failed: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    taken_over: int = 0


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The directory for KV: `held` blocks are there.

    Since the start, blocks `written`, `read` and used, `broken` (damaged, and so computed again), `failed` writes, and
    `skipped`, for which there was no room.
    """

    held: int = 0
    written: int = 0
    read: int = 0
    broken: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load. `waiting_tokens`: prompt tokens not computed yet, over all requests.

    `blocks_pinnable` more blocks can be pinned. `drafted_tokens` were verified since the start, `accepted_tokens` of
    them drawn; of both, a draft model guessed `model_drafted_tokens` and `model_accepted_tokens`. `draining`: the
    server is about to stop and refuses new requests. `disk` is None without a directory, `peers` without a port for KV.
    `uncaptured_steps` ran without a CUDA graph since a capture failed.
    """

    running: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    blocks_free: int
    prefill_s_per_token: float
    step_s: float
    draining: bool = False
    blocks_pinnable: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    model_drafted_tokens: int = 0
    model_accepted_tokens: int = 0
    disk: DiskUse | None = None
    peers: PeerUse | None = None
    uncaptured_steps: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """Result of a pin: of the requested blocks, in order, the first `held` are cached, and the first `pinned` stay."""

    held: int
    pinned: int


class AdapterUse(NamedTuple):
    """The LoRA adapters of a shard: those `known`, those `loaded`, and those that requests run with or wait for.

    At most `slots` are loaded at a time.
    """

    known: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """All changes of one step.

    `predictions`: predicted seconds until the first token, by request key, for requests that have not drawn yet. They
    come about every tenth of a second, and are empty in between. `adapters` is None if nothing about them changed.
    """

    step: int
    drawn: tuple[Drawn, ...]
    progress: tuple[Progress, ...]
    finished: tuple[Finished, ...]
    cache: tuple[CacheEvent, ...]
    load: Load
    predictions: Mapping[Hashable, float] = field(default_factory=dict)
    adapters: AdapterUse | None = None
