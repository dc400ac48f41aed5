"""What goes into the engine and what comes out of a step. Torch-free; the server translates them to the wire."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

MOST_CHOICES = 128
"""Of one request."""


class GrammarForm(enum.Enum):
    """How a grammar is written down."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A list of texts, as JSON."""
    RULES = "rules"
    """Lark's dialect of llguidance, or GBNF as llama.cpp has it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be, written down in `form`; None is one that nobody here can read."""

    form: GrammarForm | None
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and penalties 1 / 0 / 0 are off.

    `top_logprobs` None: no logprobs; 0: the drawn token's only. An answer with a `grammar` is of it, as far as it gets:
    it ends nowhere else, unless a stop string, a stop token or its length ends it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the engine takes it. `key` is the caller's name for it, unique while it lives.

    Its prompt (`prompt_tokens` in all) arrives by `Engine.extend`. `deadline_s` is a time of the engine's clock.
    `choices` sequences are drawn from the one prompt. One that is `preemptible` may lose its place to a better rank,
    and goes on later as if nothing had been.
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

    @property
    def ends(self) -> int:
        """How many times it is told to have finished: once per choice, and once if it asks for no possible number."""
        return self.choices if 1 <= self.choices <= MOST_CHOICES else 1


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"
    DEADLINE = "deadline"


class Cause(enum.Enum):
    """Why a request was rejected, for machines."""

    INVALID = "invalid"
    CONTEXT = "context"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one drawn token and of the most likely ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that one choice of one request drew in one step; `logprobs` is empty or one per token."""

    key: Hashable
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a prompt's KV exists; `cached_tokens` of it were found in the cache."""

    key: Hashable
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice. `stop` is the stop string that ended it; `message` is for people, `cause` for machines."""

    key: Hashable
    choice: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop: str = ""
    message: str = ""
    cause: Cause | None = None


class CacheChange(enum.Enum):
    """What happened to cached blocks."""

    STORED = "stored"
    EVICTED = "evicted"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of what this shard holds; keys of parents come before those of children."""

    change: CacheChange
    keys: tuple[int, ...] = ()
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is. `waiting_tokens`: prompt tokens not computed yet, over all requests.

    `blocks_pinnable` more blocks may be pinned. Since the start so many tokens were `drafted_tokens`, which were
    verified, and `accepted_tokens` of them drawn. `draining`: its server is about to stop and refuses new ones.
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


@dataclass(frozen=True, slots=True)
class Pinned:
    """Of the blocks that were to be pinned, in order: so many first ones are `held` in the cache, and `pinned` stay."""

    held: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that one step changed.

    `predictions`: seconds until each request that has not drawn is expected to draw, by its key. They come every tenth
    of a second or so, and are empty in between.
    """

    step: int
    drawn: tuple[Drawn, ...]
    progress: tuple[Progress, ...]
    finished: tuple[Finished, ...]
    cache: tuple[CacheEvent, ...]
    load: Load
    predictions: Mapping[Hashable, float] = field(default_factory=dict)
