"""The Protocol that every backend fulfils, and what it says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from policies.nouns import Capability, Delta, Prompt, Request


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend can do. `context_tokens` None: it does not tell.

    `speaks_tokens`: it takes token ids (`Prompt.token_ids`), and the router must tokenize for it. Otherwise it takes
    the client's own body (`Prompt.body`). `vocabulary` is the number of token ids, where it is known. `preempts`: it
    serves by rank, and takes the room of preemptible requests for those of a strictly better one. `may_answer_whole`:
    what is not to be streamed may come in one piece, so that its first token is not seen. `roots` has the place of each
    model's checkpoint, where the backend tells it: a path on its machine, or a name of the Hugging Face Hub. `adapters`
    are those that are adapters of another of its models, as the backend calls them. `tuned` are those of `models` that
    are such adapters, as clients call them, and `loadable` those of them that it has yet to load.
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


@dataclass(frozen=True, slots=True)
class Load:
    """A backend's own report: requests `running` and `waiting`, prompt tokens not yet computed, room in its KV pool
    (`free_tokens` of `total_tokens`).

    None means that the backend does not tell. `reported_at` is in seconds of the clock that the backend was given.
    So many more tokens of prompts may be pinned: `pinnable_tokens`. `draining`: it is about to stop and takes no new
    requests. Since its start it has verified so many `drafted_tokens`, which it guessed, and drawn `accepted_tokens` of
    them. `active_adapters` are the LoRA adapters that it has requests of, as clients call them; it has so many
    `adapter_slots`.
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
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    active_adapters: frozenset[str] | None = None
    adapter_slots: int | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """Of the blocks that were to be pinned, in order: so many first ones are `held` in the cache, and `pinned` stay."""

    held: int
    pinned: int


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where data-parallel `rank` of an engine publishes its cache events, and where it repeats them.

    Both are ZeroMQ addresses; `*` for a host is any address of the engine's machine.
    """

    rank: int
    events: str
    replay: str | None = None


MOST_RANKS = 1024
"""Of one server. A server that tells of more is broken."""


def rank_name(server: str, rank: int) -> str:
    """What data-parallel `rank` of the backend `server` is called in decisions and metrics; rank 0 is the server."""
    return f"{server}/{rank}" if rank else server


class CacheListener(Protocol):
    """Hears what a backend's cache holds, in order. The router's prefix index is one."""

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` now holds the blocks `keys`, parents before children."""
        ...

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` holds these no longer."""
        ...

    def clear(self, backend: str) -> None:
        """`backend` holds nothing: it is new, was restarted or lost touch."""
        ...


class Backend(Protocol):
    """Anything that can generate.

    `generate` yields Deltas until every choice has finished; the last one carries usage. It raises BackendFailed or
    Overloaded (try elsewhere), BackendRefused or InvalidRequest (do not). Closing the iterator cancels the request down
    to its last KV block. `probe` returns when the backend is known to be well, and raises BackendFailed when it is not.
    """

    name: str
    pool: str
    kind: str

    @property
    def address(self) -> str:
        """host:port, for people and traces; empty where there is none."""
        ...

    def describe(self) -> Description | None:
        """What it can do; None until it was reached for the first time."""
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
        """The model's own files by name (tokenizer.json, tokenizer_config.json, ...); empty where there are none."""
        ...

    async def close(self) -> None:
        """Cancel what runs and let go of every connection and task."""
        ...


@runtime_checkable
class Ranked(Protocol):
    """A server that runs its model in several data-parallel ranks, each with a cache and a load of its own.

    The backend itself is rank 0. It alone is started, probed and closed: its ranks share one server.
    """

    def ranks(self) -> Sequence[Backend]:
        """The backends of ranks 1, 2, ... as the last probe told them; always the same object for the same rank.

        Empty where there is one rank, or where the server chooses the rank itself.
        """
        ...


@runtime_checkable
class CacheKeeper(Protocol):
    """What a backend with Capability.PINS does beside answering. All of it raises BackendFailed."""

    async def pin(self, name: str, keys: Sequence[int], *, domain: str, for_s: float) -> Pinned:
        """Keep the blocks `keys` of cache `domain`, parents before children, from eviction for so long.

        `name` is the pin's, for all routers; pinning it again adds to it and may prolong it.
        """
        ...

    async def unpin(self, name: str) -> int:
        """End the pin `name`; how many blocks nobody pins any more."""
        ...

    async def clear_domain(self, domain: str) -> int:
        """Forget all that is cached of `domain`, pinned or not; how many blocks that was."""
        ...


@runtime_checkable
class CacheSalter(Protocol):
    """A backend of a server that keeps prompts with different salts apart in its cache."""

    @property
    def sends_salts(self) -> bool:
        """Is each prompt sent with its cache domain as the salt?"""
        ...


@runtime_checkable
class EventPublisher(Protocol):
    """A backend that can be asked where it publishes cache events."""

    async def event_addresses(self) -> tuple[EventAddress, ...]:
        """One address for each rank; none if it publishes nothing or cannot say. Raises BackendFailed."""
        ...


class Tokenized(NamedTuple):
    """A prompt as an engine reads it: token ids, and the text of each one where it was asked for and is told."""

    ids: Sequence[int]
    texts: Sequence[str] | None = None


@runtime_checkable
class TextReader(Protocol):
    """A backend with a server that also makes tokens of text for others.

    Both raise BackendFailed, and BackendRefused or InvalidRequest for what the server refuses.
    """

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        """The prompt of an OpenAI `body` with `messages` or a text as `prompt`, as `model` (clients' name) reads it.

        None: this server cannot tell. `return_token_strs` in the body asks for texts.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        """The text of `token_ids` of `model`, special tokens included; None: this server cannot tell."""
        ...
