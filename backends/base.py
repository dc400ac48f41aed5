"""The Protocol of every backend, and its records."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from policies.nouns import Capability, Delta, Prompt, Request, Usage


@dataclass(frozen=True, slots=True)
class Description:
    """The abilities of a backend. `context_tokens` None: it does not report its context.

    `speaks_tokens`: it takes token ids (`Prompt.token_ids`), and the router must tokenize for it. Otherwise it takes
    the client's own body (`Prompt.body`). `vocabulary` is the number of token ids, if known. `preempts`: it
    serves by rank, and preempts preemptible requests for those of a strictly better rank. `may_answer_whole`:
    an answer that is not streamed may come in one piece, so its first token is not observed. `roots` has the place of
    each model's checkpoint, if the backend reports it: a path on its machine, or a name of the Hugging Face Hub.
    `adapters` are its LoRA adapters, by the backend's names. `tuned` are the adapters among `models`, by clients'
    names, and `loadable` those of them that it must load first. `needs_prefill`: it computes no prompts, and can only
    answer those that another backend computes for it.
    """

    models: frozenset[str]
    context_tokens: int | None = None
    vocabulary: int | None = None
    speaks_tokens: bool = False
    reports_cache: bool = False
    preempts: bool = False
    may_answer_whole: bool = False
    capabilities: frozenset[Capability] = frozenset()
    roots: Mapping[str, str] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    tuned: frozenset[str] = frozenset()
    loadable: frozenset[str] = frozenset()
    needs_prefill: bool = False


class Fetched(NamedTuple):
    """KV that a backend has fetched from other backends since its start, for prompts: so many `fetches`, their tokens
    and bytes, and the sum of the seconds that each of them was transferred. Backends that stopped handed over
    `taken_over` tokens more.
    """

    fetches: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    taken_over: int = 0


class DraftedTokens(NamedTuple):
    """Drafted tokens that a backend has `verified` since its start, and those of them that it `accepted`."""

    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Load:
    """A backend's own report: requests `running` and `waiting`, prompt tokens not yet computed, room in its KV pool
    (`free_tokens` of `total_tokens`).

    None means that the backend does not report it. `reported_at` is in seconds of the clock that the backend was given.
    `pinnable_tokens` more prompt tokens may be pinned. `draining`: it is about to stop and takes no new requests.
    `drafts` are its drafted tokens by what guessed them: `prompt` (prompt lookup) or `model` (a draft model).
    `active_adapters` are the LoRA adapters with requests, by clients' names, and `ready_adapters` those in its memory;
    `adapter_slots` is the number of slots. `worked_at` is when it last reported a step of its engine, on the clock of
    `reported_at`: until shortly before then no request hangs there. `disk_blocks` has the blocks of its directory for
    KV, by what became of them; empty if it has none. `fetched` is the KV that it fetched from other backends; None if
    it cannot fetch. `uncaptured_steps` were computed without a CUDA graph since a capture failed.
    """

    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    free_tokens: int | None = None
    total_tokens: int | None = None
    max_requests: int | None = None
    prefill_s_per_token: float | None = None
    reported_at: float | None = None
    draining: bool = False
    pinnable_tokens: int | None = None
    drafts: Mapping[str, DraftedTokens] = field(default_factory=dict)
    active_adapters: frozenset[str] | None = None
    ready_adapters: frozenset[str] | None = None
    adapter_slots: int | None = None
    worked_at: float | None = None
    disk_blocks: Mapping[str, int] = field(default_factory=dict)
    fetched: Fetched | None = None
    uncaptured_steps: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """Result of a pin: of its blocks, in order, the first `held` are in the cache, and the first `pinned` stay."""

    held: int
    pinned: int


@dataclass(frozen=True, slots=True)
class EventAddress:
    """The addresses where data-parallel `rank` of an engine publishes and replays its cache events.

    Both are ZeroMQ addresses; `*` for a host is any address of the engine's machine.
    """

    rank: int
    events: str
    replay: str | None = None


MOST_RANKS = 1024
"""Most ranks of one server. A server that reports more is broken."""


def rank_name(server: str, rank: int) -> str:
    """Name of data-parallel `rank` of the backend `server` in decisions and metrics; rank 0 has the server's name."""
    return f"{server}/{rank}" if rank else server


class CacheListener(Protocol):
    """Receives the changes of a backend's cache, in order. The router's prefix index is one."""

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` now holds the blocks `keys`, parents before children."""
        ...

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` holds these no longer."""
        ...

    def clear(self, backend: str) -> None:
        """`backend` holds nothing: it is new, was restarted or lost touch."""
        ...


class Taker(Protocol):
    """Gets the Deltas of one answer."""

    def take(self, delta: Delta) -> bool:
        """Take `delta`; False: `ready` is to be awaited before the next one. What it raises ends the answer."""
        ...

    async def ready(self) -> None:
        """Return once the next Delta may come."""
        ...


async def give(deltas: Iterable[Delta], to: Taker) -> None:
    """Give all `deltas` to `to`. Raises what either raises."""
    for delta in deltas:
        if not to.take(delta):
            await to.ready()


async def give_all(deltas: AsyncIterator[Delta], to: Taker) -> None:
    """The same for `deltas` of a backend, which are closed at the end."""
    async with aclosing(cast("AsyncGenerator[Delta]", deltas)):
        async for delta in deltas:
            if not to.take(delta):
                await to.ready()


class Backend(Protocol):
    """Anything that can generate.

    `generate` yields Deltas until every choice has finished; the last one carries usage. It raises BackendFailed,
    Overloaded or BackendLacks (try elsewhere), BackendRefused or InvalidRequest (do not). Closing the iterator cancels
    the request down to its last KV block. `probe` returns when the backend is known to be well, and raises
    BackendFailed when it is not.
    """

    name: str
    pool: str
    kind: str

    @property
    def address(self) -> str:
        """host:port, for people and traces; empty if it has none."""
        ...

    def describe(self) -> Description | None:
        """Its abilities; None until it was reached for the first time."""
        ...

    def load(self) -> Load:
        """The newest report, without asking for one."""
        ...

    async def start(self) -> None:
        """Begin to connect in the background; returns at once, also when the backend is away."""
        ...

    async def probe(self) -> None:
        """Return if the backend is well, else raise BackendFailed."""
        ...

    def generate(self, request: Request, prompt: Prompt) -> AsyncIterator[Delta]:
        """Stream the answer to `prompt`."""
        ...

    def assets(self) -> Mapping[str, bytes]:
        """The model's own files by name (tokenizer.json, tokenizer_config.json, ...); empty without any."""
        ...

    async def close(self) -> None:
        """Cancel running requests and release every connection and task."""
        ...


@runtime_checkable
class Ranked(Protocol):
    """A server that runs its model in several data-parallel ranks, each with a cache and a load of its own.

    The backend itself is rank 0. It alone is started, probed and closed: its ranks share one server.
    """

    def ranks(self) -> Sequence[Backend]:
        """The backends of ranks 1, 2, ... from the last probe; always the same object for the same rank.

        Empty if there is one rank, or if the server chooses the rank itself.
        """
        ...


@runtime_checkable
class CacheKeeper(Protocol):
    """Commands of a backend with Capability.PINS. All of them raise BackendFailed."""

    async def pin(self, name: str, keys: Sequence[int], *, domain: str, for_s: float) -> Pinned:
        """Keep the blocks `keys` of cache `domain`, parents before children, from eviction for `for_s` seconds.

        `name` is the pin's, for all routers; pinning it again adds to it and may prolong it.
        """
        ...

    async def unpin(self, name: str) -> int:
        """End the pin `name`; returns the number of blocks without a pin now."""
        ...

    async def clear_domain(self, domain: str) -> int:
        """Forget all that is cached of `domain`, pinned or not; how many blocks that was."""
        ...


@runtime_checkable
class CacheSalter(Protocol):
    """A backend of a server that keeps prompts with different salts apart in its cache."""

    @property
    def sends_salts(self) -> bool:
        """Whether each prompt is sent with its cache domain as the salt."""
        ...


@runtime_checkable
class EventPublisher(Protocol):
    """A backend that can report where it publishes cache events."""

    async def event_addresses(self) -> tuple[EventAddress, ...]:
        """One address for each rank; none if it publishes nothing or cannot say. Raises BackendFailed."""
        ...


class Prefilled(NamedTuple):
    """A prompt that was computed: how another backend fetches its KV (`Prompt.transfer`), and what it took."""

    transfer: Mapping[str, Any]
    usage: Usage


@runtime_checkable
class Prefiller(Protocol):
    """A backend that computes prompts for others."""

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """Compute `prompt` and keep its KV until another backend of the kind has fetched it, or a time has passed.

        Cancelling this cancels it. Raises as `Backend.generate` does.
        """
        ...


@runtime_checkable
class PairedPrefiller(Prefiller, Protocol):
    """A backend that hands KV over to one that awaits it: both get the prompt at the same time, with one transfer."""

    def pair(self) -> Mapping[str, Any]:
        """The `Prompt.transfer` of both for one prompt. Then `prefill` ends when the KV was handed over.

        Raises BackendFailed if it hands no KV over.
        """
        ...


@runtime_checkable
class Lender(Protocol):
    """A backend that exchanges KV with others: it lends what it holds, and fetches what it is told to."""

    @property
    def kv_group(self) -> str | None:
        """Backends of one group can fetch each other's KV; None: it cannot lend or fetch now."""
        ...

    def lend(self, tokens: int) -> Mapping[str, Any] | None:
        """What the backend that fetches the first `tokens` of a prompt from this one gets as `Prompt.transfer`; None if
        it cannot lend them now."""
        ...


@runtime_checkable
class Leaver(Lender, Protocol):
    """A lender that hands its KV over before it stops."""

    def hand_over(self, heirs: Sequence[Mapping[str, Any]]) -> None:
        """Offer the KV to `heirs`, each as `lend` describes it; once it has reported that it is draining.

        Does nothing if it is not reachable any more.
        """
        ...


class Tokenized(NamedTuple):
    """A prompt as an engine reads it: token ids, and the text of each one if it was requested and is reported."""

    ids: Sequence[int]
    texts: Sequence[str] | None = None


@runtime_checkable
class TextReader(Protocol):
    """A backend with a server that also makes tokens of text for others.

    Both raise BackendFailed, and BackendRefused or InvalidRequest if the server refuses.
    """

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        """The prompt of an OpenAI `body` with `messages` or a text as `prompt`, as `model` (clients' name) reads it.

        None: this server cannot tokenize. `return_token_strs` in the body asks for texts.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        """The text of `token_ids` of `model`, special tokens included; None: this server cannot detokenize."""
        ...


def as_text_reader(backend: object) -> TextReader | None:
    """`backend` if it is a TextReader: 0.1 us instead of the 10 us that `isinstance` takes with a protocol."""
    kind: Any = type(backend)
    return cast("TextReader", backend) if _reads_text(kind) else None


@cache
def _reads_text(kind: type) -> bool:
    return issubclass(kind, TextReader)
