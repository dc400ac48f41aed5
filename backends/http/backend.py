"""Base class of backends behind HTTP. A kind adds the posts to send and the probe of the server."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

from yarl import URL

from backends.base import Description, Load, Taker, give_all, rank_name
from backends.http.client import HttpClient, bearer
from backends.http.errors import error_of
from backends.http.exchange import ErrorOf, Exchange, HttpOptions, Post, decoded, encoded
from backends.http.json_members import ABSENT, maybe_twice, with_members, with_more_members
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Capability, Delta, Native, Prompt, Request

RANK_HEADER = "X-data-parallel-rank"
"""Which data-parallel rank is to serve a request. Source: vLLM since 0.11 and SGLang since 0.5.10."""

_INLINE_BYTES = 256 * 2**10
"""Requests up to this size are made on the event loop: 2 ms."""

_NO_REPORT = Load()


class Forward(NamedTuple):
    """A proxy's changes to a client's own request for a server, and the meaning of the server's errors.

    `headers` are set, `fields` of the body too; one that is None is left out. `idle_s` is the longest silence in its
    answer.
    """

    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    error_of: ErrorOf
    idle_s: float


class HttpBackend(ABC):
    """One server at `url` (http://host:port, with or without a trailing /v1).

    A kind says what to send (`exchange`) and how to look after it (`probe`, which learns `_served`, `_context_tokens`,
    `_roots`, `_adapters` and `_loads`, one for each data-parallel rank). `options` are of the kind's `options_type`.
    `clock` dates the server's reports.
    """

    kind: str
    options_type: ClassVar[type[HttpOptions]] = HttpOptions
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    own_paths: ClassVar[frozenset[str]] = frozenset()
    """Endpoints of clients that the server has itself, so that a proxy may send their requests straight there."""
    is_polled: ClassVar[bool] = True
    """Its description and its load change while it is probed, and at no other time: a router keeps them meanwhile."""
    _options: HttpOptions
    rank = 0
    _first: Self | None = None
    _slots: int | None = None
    """Requests that it runs at once, where its reports do not tell that."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        pool: str,
        options: HttpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.pool, self.url = name, pool, base_url(url)
        self._options, self._clock = options or self.options_type(), clock
        self.client = HttpClient(name, self.url, self._options, self._key_headers)
        self._served, self._context_tokens = self._options.served, self._options.context_tokens
        self._adapters: frozenset[str] = frozenset()
        # adapters that it would load when it is asked for them
        self._loadable: frozenset[str] = frozenset()
        self._loads: tuple[Load, ...] = (Load(),)
        self._completed = (_NO_REPORT, _NO_REPORT)
        self._others: list[Self] = []
        # names the rank to the server; empty if there is only one
        self._rank_headers: Mapping[str, str] = {}
        self._roots: Mapping[str, str] = {}
        self._needs_prefill = False
        self._known: tuple[object, ...] | None = None
        self._description: Description | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self.pool} at {self.url}: {self.client.open_requests} requests>"

    @property
    def address(self) -> str:
        """host:port."""
        there = URL(self.url)
        return f"{there.host_subcomponent}:{there.port}"

    @property
    def endpoint(self) -> str | None:
        """ip:port where a proxy reaches it over plain HTTP; None where it has a name, a path or TLS."""
        there = URL(self.url)
        try:
            ipaddress.ip_address(there.host or "")
        except ValueError:
            return None
        return self.address if there.scheme == "http" and there.path in ("", "/") else None

    def is_like(self, other: HttpBackend) -> bool:
        """Does it get the same requests as `other`, so that a proxy may use either?"""
        is_like = type(self) is type(other) and self._options == other._options
        return is_like and self._rank_headers == other._rank_headers

    def ranks(self) -> Sequence[Self]:
        """The other ranks of the server with rank 0: as many as reported their load."""
        while len(self._others) < len(self._loads) - 1:
            self._others.append(self._rank(len(self._others) + 1))
        return self._others[: len(self._loads) - 1]

    def _rank(self, rank: int) -> Self:
        name = rank_name(self.name, rank)
        other = type(self)(name, self.url, pool=self.pool, options=self._options, clock=self._clock)
        other.rank, other.client, other._first = rank, self.client, self
        other._rank_headers = {RANK_HEADER: str(rank)}
        return other

    @property
    def _server(self) -> Self:
        """Rank 0, which learns for all."""
        return self._first or self

    @property
    def open_requests(self) -> int:
        """Generations that are under way."""
        return self.client.open_requests

    def describe(self) -> Description | None:
        """The models from its configuration, else those that it reports; None until either is known."""
        if self._first is not None:
            return self._first.describe()
        known = (
            *(self._served, self._context_tokens, self._able),
            *(self._roots, self._adapters, self._loadable, self._needs_prefill),
        )
        if known != self._known:
            self._known, self._description = known, self._describe()
        return self._description

    def _describe(self) -> Description | None:
        aliases = self._options.models
        if not (aliases or self._served):
            return None
        # if the pool names models, it serves only these, even if the server has others
        named = frozenset(ours for ours, theirs in aliases.items() if theirs in self._served or not self._served)
        models = named if aliases else self._served
        return Description(
            models,
            context_tokens=self._context_tokens,
            capabilities=self._able,
            may_answer_whole=self._may_answer_whole,
            roots={ours: root for ours in models if (root := self._roots.get(aliases.get(ours, ours)))},
            adapters=self._adapters,
            tuned=self._clients_names(self._adapters | self._loadable) & models,
            loadable=self._clients_names(self._loadable) & models,
            needs_prefill=self._needs_prefill,
        )

    @property
    def _able(self) -> frozenset[Capability]:
        """What it can do: of its kind, and of the server's endpoints."""
        return self.capabilities

    @property
    def _may_answer_whole(self) -> bool:
        """May an answer that the client wants whole be asked whole of the server?"""
        return False

    def load(self) -> Load:
        """The newest report of this rank; configured values override the server's."""
        loads = (self._first or self)._loads
        # a server that was started anew with fewer ranks reports nothing of this one
        load = loads[self.rank] if self.rank < len(loads) else _NO_REPORT
        most = self._options.max_requests
        if most is None:
            most = self._slots if load.max_requests is None else load.max_requests
        if most == load.max_requests:
            return load
        # part of each decision, which compares it with the previous one
        if self._completed[0] is not load or self._completed[1].max_requests != most:
            self._completed = (load, replace(load, max_requests=most))
        return self._completed[1]

    def assets(self) -> Mapping[str, bytes]:
        """Nothing: the server keeps its files to itself."""
        return {}

    async def start(self) -> None:
        """Make ready; connections are opened when they are needed."""
        self.client.require_open()

    async def close(self) -> None:
        """Close every connection, which cancels running requests. Rank 0 does so for all."""
        if self._first is None:
            await self.client.close()

    @staticmethod
    def _key_headers(key: str) -> Mapping[str, str]:
        """How the server is sent its key."""
        return bearer(key)

    async def _check_health(self, path: str = "/health") -> None:
        """Return if GET `path` answers 200, else raise BackendFailed."""
        page = await self.client.get(path)
        if page.status != 200:
            raise BackendFailed(f"{self.name} is not well: {path} answered {page.status}")

    async def _take_report(self, path: str, read: Callable[[bytes, float], Load]) -> None:
        """Let `read` make a Load of GET `path`, dated from when it was asked.

        A server without such a page makes no reports; if the page fails, the last report stays and ages.
        """
        await self._take_reports(path, lambda page, asked_at: (read(page, asked_at),), ranks=1)

    async def _take_reports(self, path: str, read: Callable[[bytes, float], tuple[Load, ...]], *, ranks: int) -> None:
        """As `_take_report`, with one Load for each rank. `ranks` is their number if the page does not have it."""
        asked_at = self._clock()
        try:
            page = await self.client.get(path)
            if page.status == 200:
                self._loads = read(page.body, asked_at) or (Load(),) * ranks
            elif page.status == 404:
                self._loads = (Load(),) * ranks
        except BackendFailed:
            return
        self._rank_headers = {RANK_HEADER: str(self.rank)} if len(self._loads) > 1 else {}

    async def _asked(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The object in the reply to a small post to `path`. Raises BackendFailed, and the error of a refusal."""
        page = await self.client.ask(Post(path, encoded(body), is_streamed=False))
        if page.status != 200:
            raise error_of(self.name, page.status, page.body, {})
        answer = decoded(page, self.name, f"{path[1:]}")
        if not isinstance(answer, Mapping):
            raise BackendFailed(f"{self.name} answered nonsense at {path}")
        return answer

    @abstractmethod
    async def probe(self) -> None:
        """Learn the server's models and abilities; raises BackendFailed if it is not well."""

    @abstractmethod
    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The post for `prompt`, and the reader of its answer. Raises InvalidRequest."""

    def forward(self, request: Request, path: str) -> Forward:  # noqa: ARG002 - kinds that have own fields look at it
        """The changes that a proxy must make to the client's own body for `path`."""
        fields = {"model": self._backends_name(request)}
        headers = {**self.client.headers, **self._rank_headers}
        return Forward(headers, fields, error_of, self._options.idle_s)

    def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the answer; closing the iterator closes the connection.

        Raises BackendFailed, BackendRefused, InvalidRequest, ContextExceeded, Overloaded, DeadlineExceeded.
        """
        if prompt.native is not None and len(prompt.native.raw) > _INLINE_BYTES:
            return self._generate_large(request, prompt)
        headers = {**prompt.headers, **self._rank_headers}
        return self.client.stream(self._made(request, prompt), headers, request.deadline_s)

    def relay(self, request: Request, prompt: Prompt, to: Taker) -> Coroutine[Any, Any, None]:
        """The same answer, given to `to` in the moment that it comes; cancelling this closes the connection.

        Raises as `generate` does, and what `to` raises.
        """
        if type(self).generate is not HttpBackend.generate:
            # a kind that asks its server in a way of its own
            return give_all(self.generate(request, prompt), to)
        if prompt.native is not None and len(prompt.native.raw) > _INLINE_BYTES:
            return self._relay_large(request, prompt, to)
        headers = {**prompt.headers, **self._rank_headers}
        try:
            exchange = self.exchange(request, prompt)
        except InvalidRequest as refusal:
            refusal.is_of_kind = True
            raise
        return self.client.relay(exchange, headers, request.deadline_s, to)

    async def _relay_large(self, request: Request, prompt: Prompt, to: Taker) -> None:
        exchange = await self._large_exchange(request, prompt)
        headers = {**prompt.headers, **self._rank_headers}
        await self.client.relay(exchange, headers, request.deadline_s, to)

    async def _large_exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """An exchange that is made in a thread: to change members of 16 MB takes 50 to 130 ms.

        One after the other, because each thread that runs makes the event loop wait for the interpreter.
        """
        async with self.client.making:
            return await asyncio.to_thread(self._made, request, prompt)

    def _made(self, request: Request, prompt: Prompt) -> Exchange:
        """The exchange, or what this kind cannot be told."""
        try:
            return self.exchange(request, prompt)
        except InvalidRequest as refusal:
            refusal.is_of_kind = True
            raise

    async def _generate_large(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        exchange = await self._large_exchange(request, prompt)
        headers = {**prompt.headers, **self._rank_headers}
        async with aclosing(self.client.stream(exchange, headers, request.deadline_s)) as deltas:
            async for delta in deltas:
                yield delta

    def _clients_names(self, names: Collection[str]) -> frozenset[str]:
        """The clients' names of the models that the server calls by `names`."""
        aliases = self._options.models
        return frozenset(ours for ours, theirs in aliases.items() if theirs in names) if aliases else frozenset(names)

    def _backends_name(self, request: Request) -> str:
        """The server's name for the model of `request`."""
        return self._options.models.get(request.model, request.model)


def base_url(url: str) -> str:
    """`url` without the /v1 that OpenAI's clients add."""
    return url.rstrip("/").removesuffix("/v1")


def native_post(native: Native, members: Mapping[str, Any], *, is_streamed: bool) -> Post:
    """The client's own bytes with only `members` changed; those that are None are removed."""
    raw, body = native.raw or encoded(native.body), native.body
    changes: dict[str, Any] = {}
    twice = maybe_twice(raw, members.keys() & body.keys())
    # the fewest changes so that every reader finds `members` there
    for name, value in members.items():
        changed = ABSENT if value is None else value
        if name in twice or body.get(name, ABSENT) != changed:
            changes[name] = changed
    if changes:
        raw = with_more_members(raw, changes) if changes.keys().isdisjoint(body) else with_members(raw, changes)
    return Post(native.path, raw, is_streamed)


def ids_in(answer: Any, name: str) -> Sequence[int]:
    """The token ids in the answer of backend `name`. Raises BackendFailed for anything else."""
    if not isinstance(answer, list) or not all(type(item) is int and 0 <= item < 2**32 for item in answer):
        raise BackendFailed(f"{name} answered nonsense when asked for the tokens of a prompt")
    return answer
