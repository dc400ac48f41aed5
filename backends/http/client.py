"""Parts that every adapter of an HTTP server shares: a session, deadlines, cancellation, errors as sentences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from backends.http.errors import error_of
from backends.http.silence import Silence
from policies.errors import BackendFailed, DeadlineExceeded, ExpectedError, InvalidRequest, Unreached
from policies.nouns import Delta

MOST_ERROR_BYTES = 64 << 10
MOST_PAGE_BYTES = 8 << 20

_LAST_CHUNK_S = 0.1


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to talk to a server.

    `models` maps clients' names of models to the server's; `served` are the names that it serves, if it should not be
    asked. `max_requests` and `context_tokens` are told to policies where the server does not tell them. `idle_s` is the
    longest silence in an answer.
    """

    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] = field(default_factory=dict)
    served: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    max_requests: int | None = None
    context_tokens: int | None = None
    connect_s: float = 5.0
    idle_s: float = 600.0
    probe_s: float = 5.0


class Post(NamedTuple):
    """Path and body of a post, and whether the answer will be streamed."""

    path: str
    content: bytes
    is_streamed: bool = True


class Answer(Protocol):
    """Reads one reply: fed with the bytes of its body, gives Deltas. Pure but for its own memory."""

    @property
    def is_over(self) -> bool:
        """The answer is whole, whatever else the body may hold."""
        ...

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error that a body may contain."""
        ...

    def end(self) -> Iterator[Delta]:
        """The Deltas of the end of the body. Raises BackendFailed if it came too early."""
        ...


ErrorOf = Callable[[str, int, bytes, Mapping[str, str]], ExpectedError]
"""(backend, status, body, headers) -> the error of a reply other than 200."""


class Exchange(NamedTuple):
    """One generation over HTTP: the `post`, the reader of the reply, and the meaning of its errors.

    `abort` is sent if the answer is left before it is over, for servers that a closed connection does not stop. The
    server may be silent for `quiet_s` longer than for other answers.
    """

    post: Post
    answer: Answer
    error_of: ErrorOf = error_of
    abort: Post | None = None
    quiet_s: float = 0.0


@dataclass(slots=True)
class _Connection:
    """State of the connection of a post."""

    was_idle: bool = False


class Page(NamedTuple):
    """A small reply, read whole."""

    status: int
    body: bytes


def encoded(body: object) -> bytes:
    """`body` as JSON. Raises InvalidRequest if the client put something into it that JSON cannot say."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def base_url(url: str) -> str:
    """`url` without the /v1 that OpenAI's clients add."""
    return url.rstrip("/").removesuffix("/v1")


def bearer(key: str) -> Mapping[str, str]:
    """The default header for `key` (RFC 6750)."""
    return {"authorization": f"Bearer {key}"}


class HttpClient:
    """The connections to one server. `name` is the backend's, for messages; `key_headers` is how its key is sent."""

    def __init__(
        self,
        name: str,
        url: str,
        options: HttpOptions,
        key_headers: Callable[[str], Mapping[str, str]] = bearer,
    ) -> None:
        self.name, self.url = name, url
        self.open_requests = 0
        self._options = options
        self._key_headers = key_headers(options.key) if options.key else {}
        self._http: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._replies: set[aiohttp.ClientResponse] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<HttpClient of {self.name} at {self.url}: {self.open_requests} requests>"

    @property
    def headers(self) -> Mapping[str, str]:
        """Those that every request to the server has; its key is among them."""
        return self._headers({})

    def session(self) -> aiohttp.ClientSession:
        """The session, made when it is first needed; connections are opened when they are. Raises Unreached once it was
        closed."""
        if self._is_closed:
            raise Unreached(f"{self.name} was removed")
        if self._http is None:
            # The router bounds running requests by tenant and by backend; a limit here would hide a queue from it.
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            # a cookie would bind requests of all tenants to the tenant that it was set for
            jar = aiohttp.DummyCookieJar()
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(connector=connector, cookie_jar=jar, trace_configs=[trace])
        return self._http

    async def close(self) -> None:
        """Close every connection, which cancels running requests."""
        # from here on no abort begins: a closed connection says the same
        self._is_closed = True
        http, self._http = self._http, None
        for reply in tuple(self._replies):
            # closing a session does not wake the readers of its bodies
            reply.close()
        await asyncio.gather(*self._aborts)
        if http is not None:
            await http.close()

    async def get(self, path: str) -> Page:
        """The reply to GET `path` within `probe_s`, of at most MOST_PAGE_BYTES. Raises BackendFailed without one."""
        return await self._ask(self.session(), "GET", path)

    async def ask(self, post: Post) -> Page:
        """The reply to a small `post`, bounded as in `get`."""
        return await self._ask(self.session(), "POST", post.path, post.content)

    async def stream(
        self, exchange: Exchange, headers: Mapping[str, str], deadline_s: float | None
    ) -> AsyncGenerator[Delta]:
        """The Deltas of `exchange`; closing the iterator closes the connection.

        Raises BackendFailed where the server cannot be reached or breaks off, DeadlineExceeded after `deadline_s`, and
        the error that `exchange` defines.
        """
        answer = exchange.answer
        self.open_requests += 1
        try:
            reply = await self._send(exchange, headers, deadline_s)
            self._replies.add(reply)
            try:
                if reply.status != 200:
                    body = await _read_at_most(reply, MOST_ERROR_BYTES)
                    raise exchange.error_of(self.name, reply.status, body, reply.headers)
                with closing(Silence(reply, self._options.idle_s + exchange.quiet_s)) as silence:
                    while data := await silence.read():
                        for delta in answer.feed(data):
                            yield delta
                        if answer.is_over:
                            break
                for delta in answer.end():
                    yield delta
                await _read_to_end(reply)
            finally:
                # A connection with a completely read body went back to the pool by itself; any other is closed.
                reply.close()
                self._replies.discard(reply)
        except aiohttp.ServerTimeoutError as error:
            raise self._unreachable(error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} could not finish before the deadline") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        finally:
            self.open_requests -= 1
            if exchange.abort is not None and not answer.is_over:
                self._send_abort(exchange.abort)

    async def _send(
        self, exchange: Exchange, headers: Mapping[str, str], deadline_s: float | None
    ) -> aiohttp.ClientResponse:
        """The reply to a post, at its body.

        An idle connection may be closed by the server at this moment: then another one is used.
        """
        while True:
            connection = _Connection()
            try:
                return await self._post(exchange, headers, deadline_s, connection)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.was_idle:
                    raise

    async def _post(
        self, exchange: Exchange, headers: Mapping[str, str], deadline_s: float | None, connection: _Connection
    ) -> aiohttp.ClientResponse:
        options, post = self._options, exchange.post
        silence_s = options.idle_s + exchange.quiet_s
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=options.connect_s, sock_read=silence_s)
        return await self.session().post(
            self.url + post.path,
            data=post.content,
            headers={"content-type": "application/json", **self._headers(headers)},
            timeout=timeout,
            allow_redirects=False,
            trace_request_ctx=connection,
        )

    async def _ask(self, http: aiohttp.ClientSession, method: str, path: str, content: bytes | None = None) -> Page:
        timeout = aiohttp.ClientTimeout(total=self._options.probe_s)
        headers = self._headers({"content-type": "application/json"} if content is not None else {})
        call = http.request(
            method, self.url + path, data=content, headers=headers, timeout=timeout, allow_redirects=False
        )
        try:
            async with call as reply:
                body = await _read_at_most(reply, MOST_PAGE_BYTES + 1)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if len(body) > MOST_PAGE_BYTES:
            raise BackendFailed(f"{self.name} answered more than {MOST_PAGE_BYTES} bytes to {path}")
        return Page(reply.status, body)

    def _send_abort(self, post: Post) -> None:
        """Send `post` without waiting for it; the server may be gone."""
        http = self._http
        if http is None:
            return

        async def send() -> None:
            with suppress(BackendFailed):
                await self._ask(http, "POST", post.path, post.content)

        task = asyncio.get_running_loop().create_task(send(), name=f"abort at {self.name}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _headers(self, of_request: Mapping[str, str]) -> dict[str, str]:
        return {**self._options.headers, **of_request, **self._key_headers}

    def _unreachable(self, error: BaseException) -> BackendFailed:
        is_unreached = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        kind = Unreached if is_unreached else BackendFailed
        return kind(f"{self.name} cannot be reached: {error or type(error).__name__}", hint=f"is {self.url} up?")


def decoded(page: Page, name: str, what: str) -> Any:
    """The JSON of a 200. Raises BackendFailed for any other reply, with `what` as the subject of the question."""
    if page.status != 200:
        raise BackendFailed(f"{name} answered {page.status} when asked for {what}")
    try:
        return msgspec.json.decode(page.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendFailed(f"{name} answered nonsense when asked for {what}") from error


async def _note_reuse(
    session: aiohttp.ClientSession,  # noqa: ARG001
    context: Any,
    params: aiohttp.TraceConnectionReuseconnParams,  # noqa: ARG001
) -> None:
    connection = context.trace_request_ctx
    if isinstance(connection, _Connection):
        connection.was_idle = True


async def _read_at_most(reply: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The first `limit_bytes` of the body."""
    body = bytearray()
    while len(body) < limit_bytes and (data := await reply.content.read(limit_bytes - len(body))):
        body += data
    return bytes(body)


async def _read_to_end(reply: aiohttp.ClientResponse) -> None:
    """Let the connection be reused, if the server ends its reply soon after the last event."""
    if reply.content.at_eof():
        return
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_LAST_CHUNK_S):
            await reply.read()
