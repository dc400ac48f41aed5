"""The nouns of every decision: immutable, one meaning each. `docs/glossary.md` defines them.

Values that each call creates are Structs: a frozen dataclass of eight fields takes 2.6 µs to make, fourteen times as
long.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from policies.errors import InvalidRequest
from policies.learning.cost import TYPICAL, Latency


class Outcome(enum.StrEnum):
    """How a request ended. A metric label, so the list is closed."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EVICTED = "evicted"
    FAILED = "failed"


class Capability(enum.StrEnum):
    """An ability that only some backends have. A request may need it."""

    STRUCTURED_OUTPUT = "structured_output"
    """Answers that fit a grammar or JSON schema (OpenAI's `response_format`)."""

    TOKEN_IDS = "token_ids"  # noqa: S105 - tokens of a model, not of a login
    """Prompts that come as token ids, not as text."""

    LOGPROBS = "logprobs"
    """Log-probabilities of the tokens drawn."""

    CHOICES = "choices"
    """Several answers to one prompt (OpenAI's `n`)."""

    EMBEDDINGS = "embeddings"
    """Vectors for texts, instead of an answer to them."""

    RERANK = "rerank"
    """Scores of documents and texts against a query."""

    MEDIA = "media"
    """Images, sound, video or files beside the text of a chat."""

    SUFFIX = "suffix"
    """Texts to be completed in front of a given one (`suffix` of OpenAI's completions)."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the prompt's own tokens (`echo` with `logprobs` of OpenAI's completions)."""

    PINS = "pins"
    """Prefixes that are pinned in the cache for a time, and cache domains that can be cleared."""

    CONTINUES_TOKENS = "continues_tokens"
    """The rest of an answer that another backend began, of which the tokens are known."""

    CONTINUES_TEXT = "continues_text"
    """The rest of an answer that another backend began, of which only the text is known."""

    CHATS = "chats"
    """Bodies of OpenAI's chats as they came, whatever is in them. The next three are for bodies of other dialects."""

    TEXTS = "texts"
    """Bodies of OpenAI's completions as they came."""

    RESPONSES = "responses"
    """Bodies of OpenAI's Responses as they came."""

    MESSAGES = "messages"
    """Bodies of Anthropic's messages as they came."""


DIALECTS = frozenset({Capability.CHATS, Capability.TEXTS, Capability.RESPONSES, Capability.MESSAGES})
"""Abilities that a request needs only if its body cannot be translated."""

USUAL_HEDGE_BUDGET = 0.05
"""Default share of second requests."""


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """An SLA by name. `rank` 0 is served first; targets are in seconds, None if the file has none."""

    name: str
    rank: int
    ttft_s: float | None = None
    ttft_quantile: float = 0.95
    tpot_s: float | None = None
    tpot_quantile: float = 0.95
    deadline_s: float | None = None
    weight: float = 1.0
    floor: float = 0.0
    """Share of the served seconds that it gets while it has work, even if better ranks wait."""
    preemptible: bool = False
    prefill_slice_tokens: int | None = None
    hedge_quantile: float | None = None
    """A request that waits longer than this share of all for its first token goes to a second backend too; None: never.
    """
    hedge_budget: float = USUAL_HEDGE_BUDGET
    """Most second requests, as a share of all of a tenant in this class."""


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A `cost` in whole units for all requests from the first to the last day, both included, in days since 1970.

    None: for ever. On other days it binds nothing. While it has the same `name`, its use goes on when it changes, but
    begins anew if its first day is put off.
    """

    name: str
    cost: int
    first_day: int = 0
    last_day: int | None = None
    is_soft: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on use. None: no limit. Costs are in whole units; `currency` is that of which a unit is a millionth.

    A soft one refuses nothing: operators and clients are told when it is reached. `fixed` are budgets of fixed periods.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    cost_per_hour: int | None = None
    cost_per_day: int | None = None
    cost_per_week: int | None = None
    cost_per_month: int | None = None
    currency: str | None = None
    soft_cost_per_hour: int | None = None
    soft_cost_per_day: int | None = None
    soft_cost_per_week: int | None = None
    soft_cost_per_month: int | None = None
    fixed: tuple[FixedBudget, ...] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether one of them depends on the number of tokens."""
        of_tokens = (
            self.tokens_per_minute,
            self.cost_per_hour,
            self.cost_per_day,
            self.cost_per_week,
            self.cost_per_month,
            self.soft_cost_per_hour,
            self.soft_cost_per_day,
            self.soft_cost_per_week,
            self.soft_cost_per_month,
        )
        return bool(self.fixed) or any(limit is not None for limit in of_tokens)


NO_LIMITS = Limits()

NO_TENANT = "unknown"
"""The name under which requests are counted that no key or token gives to a tenant. No tenant has it."""

USUAL_PINNED_TOKENS = 256_000
"""Default limit of a tenant's pinned tokens."""

USUAL_STORED_DOCUMENTS, USUAL_STORED_BYTES = 10_000, 64 * 2**20
"""Default limits of a tenant's document sets: all their documents, and the bytes of their texts."""

USUAL_REUSE_BUDGET = 0.15
"""The share of a reused document's tokens that is computed again, where none is given."""


@dataclass(frozen=True, slots=True)
class Organization:
    """Tenants that share `limits`, which hold in addition to those of each."""

    name: str
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class Team:
    """A part of a tenant, with keys of its own. Its limits hold in addition to its tenant's."""

    name: str
    limits: Limits = NO_LIMITS
    model_limits: Mapping[str, Limits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The party that pays for requests; its data is kept apart.

    `key_hashes` are sha256 hex digests. Empty `models` or `classes` allow all. `domain` is the cache domain: tenants
    with equal domains share KV. `limits` are those of the whole tenant; in addition `model_limits` are those of one
    model, and `key_limits` those of one of its keys, by its hash. `team_by_key` is the name of a team of `teams` by the
    hash of its key. `user_limits` hold for each end user that its clients name; `needs_user`: they must name one.
    `tag_limits` are those of all its requests with a tag, by the tags that its clients may give them.
    At most `pinned_tokens` of its prefixes are kept at a time, each counted once for every backend. Its document sets
    have at most `stored_documents` with `stored_bytes` of text. `reuse_budget` is that of its requests with documents
    which give none.
    """

    name: str
    domain: str
    key_hashes: frozenset[str] = frozenset()
    weight: float = 1.0
    models: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    limits: Limits = NO_LIMITS
    model_limits: Mapping[str, Limits] = field(default_factory=dict)
    key_limits: Mapping[str, Limits] = field(default_factory=dict)
    teams: Mapping[str, Team] = field(default_factory=dict)
    team_by_key: Mapping[str, str] = field(default_factory=dict)
    user_limits: Limits = NO_LIMITS
    needs_user: bool = False
    organization: Organization | None = None
    tag_limits: Mapping[str, Limits] = field(default_factory=dict)
    pinned_tokens: int = USUAL_PINNED_TOKENS
    stored_documents: int = USUAL_STORED_DOCUMENTS
    stored_bytes: int = USUAL_STORED_BYTES
    reuse_budget: float | None = None


class Grammar(msgspec.Struct, frozen=True):
    """The allowed answers: `text` is a JSON schema, a regular expression, ... as `form` names it.

    `field` is the field of the client's request. The text is empty if only some backends can read the field's value.
    """

    form: str
    text: str
    field: str


class Sampling(msgspec.Struct, frozen=True):
    """Parameters for drawing an answer. The defaults are OpenAI's; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1
    are off.

    With `shows_stop` the stop string, or the token, that ends an answer is part of its text.

    Annotated fields are dials: numbers that every client names like this, with the bounds that clients must keep.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    shows_stop: bool = False
    ignore_eos: bool = False
    min_new_tokens: int = 0
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    choices: int = 1
    grammar: Grammar | None = None


DIALS: Mapping[str, Any] = MappingProxyType(
    {
        name: hint
        for name, hint in get_type_hints(Sampling, include_extras=True).items()
        if get_origin(hint) is Annotated
    }
)
"""The dials of Sampling by name, with their types and bounds. HTTP, gRPC and adapters read this table."""

_OF_OPENAI = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty"})
BEYOND_OPENAI = tuple(name for name in DIALS if name not in _OF_OPENAI)
"""The dials that OpenAI's API does not have, but servers of open models do."""


class Request(msgspec.Struct, frozen=True):
    """One prompt to one model for one tenant, as policies see it: sizes and keys, never text.

    `block_keys` are the chained keys of the prompt's full blocks, first block first. `rank` and `service_class` come
    from the rules. `prompt_tokens` is exact if `least_prompt_tokens` is None. Otherwise it is the best estimate: the
    interval `likely_prompt_tokens` holds nine of ten such prompts, and all have at least `least_prompt_tokens`, which
    is compared with limits that refuse a request. `expected_new_tokens` is the expected length of its answer, by
    earlier ones; None if it is unknown. `promised` is its service class with the targets. `may_transfer`: its prompt
    may be computed at another backend than its answer. `may_fetch`: a backend may fetch KV of its prompt from another.
    """

    id: str
    tenant: str
    model: str
    domain: str
    prompt_tokens: int
    max_new_tokens: int
    service_class: str
    rank: int = 0
    priority: str | None = None
    block_keys: tuple[int, ...] = ()
    pools: tuple[str, ...] | None = None
    policy: str = "default"
    session: str | None = None
    deadline_s: float | None = None
    prefill_slice_tokens: int | None = None
    preemptible: bool = False
    stream: bool = False
    needs: frozenset[Capability] = frozenset()
    sampling: Sampling = Sampling()
    least_prompt_tokens: int | None = None
    likely_prompt_tokens: tuple[int, int] | None = None
    expected_new_tokens: int | None = None
    promised: ServiceClass | None = None
    may_transfer: bool = False
    may_fetch: bool = False
    documents: tuple[str, ...] = ()
    """Ids of its documents, in the order in which the prompt has them."""

    @property
    def surely_tokens(self) -> int:
        """The tokens that the prompt certainly has; only these may justify a refusal."""
        return self.prompt_tokens if self.least_prompt_tokens is None else self.least_prompt_tokens


class Native(msgspec.Struct, frozen=True):
    """A client's request in its own dialect: the JSON `body` that it sent to the endpoint `path`.

    `raw` are the received bytes, if `body` represents them exactly; else empty. `untranslated` is why nothing but this
    body can be sent; None: it was translated.
    """

    path: str
    body: Mapping[str, Any]
    raw: bytes = b""
    untranslated: InvalidRequest | None = None


class Beginning(msgspec.Struct, frozen=True):
    """The beginning of an answer, which its client has already: `tokens` of them, with this `text`.

    `token_ids` are little-endian uint32; empty if they are unknown.
    """

    tokens: int
    text: str = ""
    token_ids: bytes = b""

    @property
    def needs(self) -> Capability:
        """What a backend must be able to do to continue it."""
        return Capability.CONTINUES_TOKENS if self.token_ids else Capability.CONTINUES_TEXT


class Reuse(msgspec.Struct, frozen=True):
    """Permission to take the KV of documents from wherever they stood before, so that it is approximate.

    `spans` are the first tokens of the documents in the prompt, and the tokens behind their last ones. `budget` is the
    share (0 to 1) of each document's tokens that is computed again.
    """

    spans: tuple[tuple[int, int], ...]
    budget: float


class Prompt(msgspec.Struct, frozen=True):
    """The input that a backend continues.

    `token_ids` are little-endian uint32; empty if the prompt was not tokenized. `body` is the client's own request
    (OpenAI dialect, unknown fields included) and `path` its endpoint, for backends that speak the dialect;
    None if the client spoke another one. `headers` are those for the backend (trace context, and how the body is to
    be read).
    """

    token_ids: bytes = b""
    body: Mapping[str, Any] | None = None
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    native: Native | None = None
    """The client's own request, for backends that speak its dialect; `body` is then an equivalent OpenAI chat or text.
    None if it came over gRPC."""
    beginning: Beginning | None = None
    """The part of the answer that the client has: only the rest is wanted, and usage of the whole answer."""
    transfer: Mapping[str, Any] | None = None
    """Where the KV of this prompt is to be fetched, in the words of the backend that computed it; None: nowhere."""
    reuse: Reuse | None = None
    """None: all KV must be exact, as it always is at backends that cannot blend."""


class Usage(msgspec.Struct, frozen=True):
    """What one request used, over all its choices. `cached_tokens` are prompt tokens that were not computed again,
    `cache_write_tokens` those that were computed and written to a cache at a price, as Anthropic's. `reasoning_tokens`
    are completion tokens of reasoning, None if the backend does not report them. `is_guess`: the backend reports no
    usage, and `prompt_tokens` is the router's own count or estimate. The router adds the `images` of the prompt, and
    `backend_ms`, the milliseconds from when its backend got it until it ended."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    is_guess: bool = False
    cache_write_tokens: int = 0
    images: int = 0
    backend_ms: int = 0
    blended_tokens: int = 0
    """Prompt tokens with KV from documents that had been computed at another place; none of them is cached exactly."""

    def and_(self, more: Usage) -> Usage:
        """The sum of both. Tokens of reasoning are known only if they are for both."""
        thoughts = (self.reasoning_tokens, more.reasoning_tokens)
        return Usage(
            self.prompt_tokens + more.prompt_tokens,
            self.completion_tokens + more.completion_tokens,
            self.cached_tokens + more.cached_tokens,
            None if None in thoughts else sum(filter(None, thoughts)),
            self.is_guess or more.is_guess,
            self.cache_write_tokens + more.cache_write_tokens,
            self.images + more.images,
            self.backend_ms + more.backend_ms,
            self.blended_tokens + more.blended_tokens,
        )


class TokenLogprob(msgspec.Struct, frozen=True):
    """One drawn token with its natural-log probability and the most likely alternatives.

    `octets` are its bytes where these are not those of its text: a token may be a part of a character.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    octets: bytes | None = None


class Delta(msgspec.Struct, frozen=True, gc=False, repr_omit_defaults=True):
    """One piece of an answer.

    `finish_reason` (stop | length | tool_calls | content_filter) ends a choice; the last Delta of a request carries
    `usage`. `computed_tokens` reports prefill progress and comes alone, or with `expected_s`: seconds until the first
    token, if the backend predicts it. `stop` is the stop string that ended the choice, if the backend reports it.
    `body` is a whole reply in JSON as the backend wrote it, and comes once.
    `message` holds what the backend added to OpenAI's delta or message beside text (tool calls, reasoning, ...).

    `raw` are bytes of the answer itself, if the client speaks the backend's dialect: they are passed on unchanged.
    Of OpenAI's dialect `text` repeats their text, and `message` is empty if they hold more than text; of others neither
    is parsed. `tokens` is the number of drawn tokens, if neither text nor ids give it.
    `is_whole`: it is a complete answer, so its arrival is not the time of the first token. The `tokens`
    of the first such Delta are those of all choices, 0 if the backend does not report them.
    `is_repeat`: it repeats the beginning of an answer that is continued, for parsers; the client has it.
    """

    text: str = ""
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    computed_tokens: int | None = None
    expected_s: float | None = None
    message: Mapping[str, Any] | None = None
    stop: str | None = None
    body: bytes | None = None
    raw: bytes | None = None
    tokens: int = 0
    is_whole: bool = False
    is_repeat: bool = False


ACCEPTED = Delta(computed_tokens=0)
"""The backend has begun to answer, and nothing of the answer is there yet: an HTTP server has sent its head."""


class Link(msgspec.Struct, frozen=True, gc=False):
    """The exchange of KV between one backend and the others of its `group`.

    A fetch takes it `fixed_s` and `token_s` for each token. What this router has sent for takes `lends_s` more seconds
    to leave the backend, and `fetches_s` to arrive there.
    """

    group: str
    fixed_s: float
    token_s: float
    lends_s: float = 0.0
    fetches_s: float = 0.0


class Fetch(msgspec.Struct, frozen=True):
    """KV of a prompt that one backend can fetch from another: `tokens` behind those that it holds, from `backend`.

    `seconds` is the predicted time until it has them, `computing_s` that of computing them instead. `saved` is the
    difference that the fetch makes to the placement's marginal cost, in seconds; 0 before the costs are compared.
    `crowd` is the mean number of requests at a backend of the group; one that waits counts as three that run.
    """

    backend: str
    tokens: int
    seconds: float
    computing_s: float
    saved: float = 0.0
    crowd: float = 0.0


class BackendView(msgspec.Struct, frozen=True, gc=False):
    """One backend as one request sees it. A decision makes one of each backend and reads most of it more than once: a
    frozen dataclass takes four times as long to make, a tuple three times as long to read.

    Counts of requests and tokens are the backend's own report plus what this router has sent since. `held_tokens` is
    how much of the prompt's beginning it is believed to hold; None if unknown. `reported_s_ago` is the age of
    the report; None before the first.

    `latency` is its latency model, and `doubt` are the times of prefill and decode at the pace that it surely has, in
    those of the model. `queue_s` is how long a prompt sent now would wait before its prefill, including the time to
    make its LoRA adapter ready. The backend runs `max_requests` at once; if it does not report that, `adaptive_limit`
    is learned from its speed. Reclaimable tokens and requests are held by preemptible requests of a strictly worse
    rank, which the request may preempt. `may_take` is the number of further requests that it may get on trial or while
    it warms up; None: as many as it has room for. `adapter` is the readiness of the request's LoRA adapter in one word;
    None if the request names none, or the backend does not report its adapters. `unfit` is a permanent reason, in one
    word, why the request cannot go there. `fresh_tokens` are prompt tokens that it computed lately, with older ones
    counted less, and `cache_tokens` is the size of its KV cache; None if it is not reported. `decoding_tokens` are the
    contexts of this router's requests that decode there, and `mean_weight` is the mean weight of the classes of its
    requests there, 1 without any. Of those that run and wait, so many are `yielding` to the request. `awaited` requests
    wait in this router for a place there, and get it first. It can
    fetch the KV of prompts from the backends of the pool `prefill`; None: from no other. If it `needs_prefill`, it
    computes no prompt itself. `link` is its exchange of KV with backends of its group; None: it has none. `offer` is
    what it can best fetch of this prompt.
    """

    name: str
    pool: str
    kind: str
    models: frozenset[str]
    healthy: bool = True
    draining: bool = False
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    max_requests: int | None = None
    free_tokens: int | None = None
    context_tokens: int | None = None
    held_tokens: int | None = None
    reported_s_ago: float | None = None
    capabilities: frozenset[Capability] = frozenset()
    weight: float = 1.0
    latency: Latency = TYPICAL
    queue_s: float = 0.0
    adaptive_limit: int | None = None
    reclaimable_tokens: int = 0
    reclaimable_requests: int = 0
    may_take: int | None = None
    adapter: str | None = None
    unfit: str | None = None
    fresh_tokens: float = 0.0
    cache_tokens: int | None = None
    decoding_tokens: float = 0.0
    yielding: int = 0
    mean_weight: float = 1.0
    awaited: int = 0
    doubt: tuple[float, float] = (1.0, 1.0)
    prefill: str | None = None
    needs_prefill: bool = False
    link: Link | None = None
    offer: Fetch | None = None


class ClusterView(msgspec.Struct, frozen=True):
    """Backends at one moment (`taken_at`, seconds of the router's clock): all but those `left_out` of a shortlist."""

    backends: tuple[BackendView, ...]
    taken_at: float
    left_out: int = 0


class PrefillLeg(msgspec.Struct, frozen=True):
    """The prompt is computed at `backend` and its KV transferred: `seconds` from now, as predicted.

    `saved` is what that makes the placement cheaper, in seconds of marginal cost: negative only where the answering
    backend computes no prompts.
    """

    backend: str
    seconds: float
    saved: float


class Decision(msgspec.Struct, frozen=True):
    """A policy's decision with its reasons: `chosen` is a backend or None, `dropped` has (backend, filter).

    `scores` lists (backend, total); `details` the same broken down: (backend, score name, value or None).
    `predicted_ttft_s` is that of the chosen backend. `left_out` backends were not considered.

    Without a chosen one, `awaits` is the backend that is worth waiting for, if there is one. If others have room, but
    are worse, `wait_s` is how long that wait should take. `prefill` is the backend that computes the prompt for the
    chosen one; None: that does it itself. `fetch` is what the chosen one fetches of the prompt's KV; None: nothing.
    """

    chosen: str | None
    policy: str
    dropped: tuple[tuple[str, str], ...] = ()
    scores: tuple[tuple[str, float], ...] = ()
    details: tuple[tuple[str, str, float | None], ...] = ()
    predicted_ttft_s: float | None = None
    left_out: int = 0
    awaits: str | None = None
    wait_s: float | None = None
    prefill: PrefillLeg | None = None
    fetch: Fetch | None = None
