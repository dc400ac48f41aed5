"""A backend that answers from a script, for tests of code that uses backends, in this project and others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from backends.base import Description, Load, Pinned
from policies.errors import BackendFailed, ExpectedError, Unreached
from policies.nouns import DIALECTS, Capability, Delta, Prompt, Request, Usage
from shards.kv.keys import BLOCK_TOKENS

MOST_KEPT = 1000
"""A FakeBackend keeps its last requests, so many of them."""

_ALL = frozenset(Capability) - DIALECTS
"""A script may say anything."""

_ALL_BUT_PINS = _ALL - {Capability.PINS}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    `texts` become one Delta each, `delay_s` apart; without that all of them come at once. `error` is raised before
    Delta number `error_at` (0: at once; the number of texts: instead of the finish). `hangs_at` stops there until the
    backend is closed. `message` and `body` go with the last Delta.
    """

    texts: tuple[str, ...] = ("Hello", ", ", "world", ".")
    delay_s: float = 0.0
    finish_reason: str = "stop"
    error: ExpectedError | None = None
    error_at: int = 0
    hangs_at: int | None = None
    cached_tokens: int = 0
    message: Mapping[str, object] | None = None
    body: bytes | None = None


Script = Answer | Sequence[Answer] | Callable[[Request, Prompt], Answer]
"""One Script for all requests; a list, in turn, with the last one repeated; or a function of the request."""


@dataclass(slots=True)
class FakeBackend:
    """Answers by `script`. Keeps the last of what it `received`, and counts how generations ended.

    Attributes may be changed at any time: `is_well` is what `probe` looks at, `reported` is its load. One that `pins`
    has a cache: blocks of prompts that it answered, by key, each with its domain; at most `most_pinned` of them stay.
    """

    name: str
    pool: str = "fake"
    script: Script = field(default_factory=Answer)
    models: frozenset[str] = frozenset({"fake"})
    address: str = ""
    kind: str = "fake"
    speaks_tokens: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    context_tokens: int | None = None
    is_well: bool = True
    reported: Load = field(default_factory=Load)
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    received: deque[tuple[Request, Prompt]] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    begun: int = 0
    open_requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    is_started: bool = False
    pins: bool = False
    most_pinned: int = 1000
    cache: dict[int, str] = field(default_factory=dict)
    pinned: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def __repr__(self) -> str:
        counts = (
            f"{self.open_requests} open, {self.finished} finished, {self.cancelled} cancelled, {self.failed} failed"
        )
        return f"<FakeBackend {self.name} of {self.pool}: {counts}>"

    def describe(self) -> Description | None:
        """The models and the abilities."""
        return Description(
            self.models,
            context_tokens=self.context_tokens,
            speaks_tokens=self.speaks_tokens,
            capabilities=_ALL if self.pins else _ALL_BUT_PINS,
        )

    def load(self) -> Load:
        """The test's load, and the room for pins."""
        if not self.pins:
            return self.reported
        return replace(self.reported, pinnable_tokens=BLOCK_TOKENS * (self.most_pinned - self._pinned_blocks()))

    def assets(self) -> Mapping[str, bytes]:
        return self.files

    async def start(self) -> None:
        """Remember that it was started."""
        self.is_started = True

    async def probe(self) -> None:
        if not self.is_well:
            raise BackendFailed(f"{self.name} is not well")

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the script's answer."""
        self.received.append((request, prompt))
        self.begun += 1
        script = self.script
        answer = script if isinstance(script, Answer) else self._answer(script, request, prompt)
        self.open_requests += 1
        ended = "cancelled"
        try:
            if not self.is_well:
                raise Unreached(f"{self.name} cannot be reached")
            begun = 0 if prompt.beginning is None else prompt.beginning.tokens
            stumbles = answer.error is not None or answer.hangs_at is not None
            await self.sleep(answer.delay_s)
            for at, text in enumerate(answer.texts[begun:], start=begun):
                if stumbles:
                    await self._stumble(answer, at)
                yield Delta(text=text)
                if answer.delay_s:
                    await self.sleep(answer.delay_s)
            if stumbles:
                await self._stumble(answer, len(answer.texts))
            # before the last yield: a reader of the last Delta need not ask for another
            ended = "finished"
            if self.pins:
                self.cache.update(dict.fromkeys(request.block_keys, request.domain))
            usage = Usage(request.prompt_tokens, len(answer.texts), answer.cached_tokens)
            yield Delta(finish_reason=answer.finish_reason, message=answer.message, usage=usage, body=answer.body)
        except ExpectedError:
            ended = "failed"
            raise
        finally:
            self.open_requests -= 1
            setattr(self, ended, getattr(self, ended) + 1)

    async def pin(self, name: str, keys: Sequence[int], *, domain: str, for_s: float) -> Pinned:
        """See CacheKeeper. No time ends it."""
        self._require_well()
        held = tuple(takewhile(lambda key: self.cache.get(key) == domain, keys))
        room = max(0, self.most_pinned - self._pinned_blocks(but=name))
        self.pinned[name] = (held[:room], for_s)
        return Pinned(len(held), len(held[:room]))

    async def unpin(self, name: str) -> int:
        self._require_well()
        return len(self.pinned.pop(name, ((), 0.0))[0])

    async def clear_domain(self, domain: str) -> int:
        self._require_well()
        gone = {key for key, of in self.cache.items() if of == domain}
        self.cache = {key: of for key, of in self.cache.items() if of != domain}
        self.pinned = {name: pin for name, pin in self.pinned.items() if gone.isdisjoint(pin[0])}
        return len(gone)

    async def close(self) -> None:
        self.closed.set()

    def check(self) -> None:
        """Raise AssertionError if a generation was lost count of."""
        ended = self.finished + self.cancelled + self.failed
        assert self.begun == ended + self.open_requests, "a generation was lost count of"

    def _pinned_blocks(self, but: str = "") -> int:
        return len({key for name, (keys, _) in self.pinned.items() if name != but for key in keys})

    def _require_well(self) -> None:
        if not self.is_well:
            raise BackendFailed(f"{self.name} is not well")

    def _answer(
        self, script: Sequence[Answer] | Callable[[Request, Prompt], Answer], request: Request, prompt: Prompt
    ) -> Answer:
        return script(request, prompt) if callable(script) else script[min(self.begun, len(script)) - 1]

    async def _stumble(self, answer: Answer, at: int) -> None:
        if answer.hangs_at == at:
            await self.closed.wait()
            raise BackendFailed(f"{self.name} was closed")
        if answer.error is not None and answer.error_at == at:
            raise answer.error
