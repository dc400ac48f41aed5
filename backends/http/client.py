"""The client of one server over HTTP: it posts Exchanges, and asks for pages."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from backends.base import Taker, give
from backends.http.exchange import Answer, Exchange, HttpOptions, Page, Post, WholeBody
from backends.http.own_keys import OwnKeys
from backends.nesting import FEW_BYTES, has_many_values
from http1.client import Answer as Reply
from http1.client import HttpClient as Http1Client
from http1.errors import AnswerError, Disconnected, IdleDisconnected, Unconnected
from http1.limits import ClientLimits
from http1.message import header_lines
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLost,
    DeadlineExceeded,
    ExpectedError,
    IdleLost,
    Unreached,
)
from policies.nouns import ACCEPTED, Delta
from tls.errors import sentence_of, why_unanswered

MOST_ERROR_BYTES = 64 << 10
MOST_PAGE_BYTES = 8 << 20
MOST_DECODED_BYTES = 1 << 30

_LAST_CHUNK_S = 0.1

_KINDS: Mapping[type[AnswerError], type[BackendFailed]] = {
    Unconnected: Unreached,
    IdleDisconnected: IdleLost,
    Disconnected: BackendLost,
}
"""What an exchange without a whole answer fails with; else BackendErred: it was silent, or is no HTTP."""


def bearer(key: str) -> Mapping[str, str]:
    """The default header for `key` (RFC 6750)."""
    return {"authorization": f"Bearer {key}"}


class HttpClient:
    """The connections to one server. `name` is the backend's, for messages; `key_headers` is how its key is sent.

    `making` is held while a large request is made. `own_keys` are those that every request has.
    """

    def __init__(
        self,
        name: str,
        url: str,
        options: HttpOptions,
        key_headers: Callable[[str], Mapping[str, str]] = bearer,
    ) -> None:
        self.name, self.url = name, url
        self.making = asyncio.Semaphore(1)
        self._options = options
        self._key_headers = key_headers(options.key) if options.key else {}
        self.own_keys = OwnKeys({**options.headers, **self._key_headers}, options.key, options.of_file)
        self._post_headers = {"content-type": "application/json", **options.headers}
        self._post_lines: bytes | None = None
        self._http: Http1Client | None = None
        self._is_closed = False
        self._calls: set[_Call] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<HttpClient of {self.name} at {self.url}: {self.open_requests} requests>"

    @property
    def open_requests(self) -> int:
        """Exchanges that are under way."""
        return len(self._calls)

    @property
    def headers(self) -> Mapping[str, str]:
        """Those that every request to the server has; its key is among them."""
        return self._headers({})

    def require_open(self) -> None:
        """Raise Unreached if it was closed."""
        if self._is_closed:
            raise Unreached(f"{self.name} was removed")

    async def close(self) -> None:
        """Close every connection, which cancels running requests."""
        # from here on no abort begins: a closed connection has the same effect
        self._is_closed = True
        http, self._http = self._http, None
        for call in tuple(self._calls):
            if call.reply is not None:
                call.reply.close()
        await asyncio.gather(*self._aborts)
        if http is not None:
            await http.close()

    async def get(self, path: str) -> Page:
        """The reply to GET `path` within `probe_s`, of at most MOST_PAGE_BYTES. Raises BackendFailed without one."""
        return await self._ask(self._connections(), "GET", path)

    async def ask(self, post: Post) -> Page:
        """The reply to a small `post` that changes nothing, bounded as in `get`."""
        try:
            return await self._ask(self._connections(), "POST", post.path, post.content)
        except IdleLost:
            return await self._ask(self._connections(), "POST", post.path, post.content)

    async def stream(
        self, exchange: Exchange, headers: Mapping[str, str], deadline_s: float | None
    ) -> AsyncGenerator[Delta]:
        """ACCEPTED, then the Deltas of `exchange`; closing the iterator closes the connection.

        Raises BackendFailed where the server cannot be reached or breaks off, DeadlineExceeded after `deadline_s`, and
        the error that `exchange` defines.
        """
        answer = exchange.answer
        call = _Call(exchange)
        self._calls.add(call)
        try:
            reply = call.reply = await self._posted(call, headers, deadline_s)
            if reply.status != 200 or "content-encoding" in reply.headers.lowered:
                await self._look_at(call, reply)
            yield ACCEPTED
            if isinstance(answer, WholeBody):
                for delta in await _read(answer, await self._whole(reply, answer.limit_bytes)):
                    yield delta
                return
            while data := await reply.read():
                for delta in answer.feed(data):
                    yield delta
                if answer.is_over:
                    break
            for delta in answer.end():
                yield delta
            if not reply.is_ended:
                await _read_to_end(reply)
        except (TimeoutError, AnswerError) as error:
            raise self._failure(error) from error
        except ExpectedError as error:
            self.own_keys.hide_in(error)
            raise
        finally:
            self._end(call)

    async def relay(self, exchange: Exchange, headers: Mapping[str, str], deadline_s: float | None, to: Taker) -> None:
        """The same, but `to` gets each Delta in the moment that it comes, without a switch of tasks. An answer that
        came whole is not ACCEPTED before.

        Cancelling this closes the connection. Raises as `stream` does, and what `to` raises.
        """
        answer = exchange.answer
        call = _Call(exchange)
        self._calls.add(call)
        try:
            reply = call.reply = await self._posted(call, headers, deadline_s)
            is_plain = reply.status == 200 and "content-encoding" not in reply.headers.lowered
            if not is_plain:
                await self._look_at(call, reply)
            # of most, the body came with the head
            whole = reply.arrived(answer.limit_bytes) if is_plain and isinstance(answer, WholeBody) else None
            if whole is None and not to.take(ACCEPTED):
                await to.ready()
            if not isinstance(answer, WholeBody):
                await _pour(reply, answer, to)
                return
            if whole is None:
                whole = await self._whole(reply, answer.limit_bytes)
            for delta in answer.read(whole) if len(whole) <= FEW_BYTES else await _read(answer, whole):
                if not to.take(delta):
                    await to.ready()
        except (TimeoutError, AnswerError) as error:
            raise self._failure(error) from error
        except ExpectedError as error:
            self.own_keys.hide_in(error)
            raise
        finally:
            self._end(call)

    def _posted(self, call: _Call, headers: Mapping[str, str], deadline_s: float | None) -> Coroutine[Any, Any, Reply]:
        """The reply to the post of `call`, at its body."""
        http, post = self._http or self._connections(), call.exchange.post
        lines = self._post_lines if self._post_lines and not headers else self._lines(headers)
        silence_s = self._options.idle_s + call.exchange.quiet_s
        posted = http.request("POST", post.path, lines, post.content, silence_s=silence_s)
        return posted if deadline_s is None else _in_time(call, posted, deadline_s)

    async def _look_at(self, call: _Call, reply: Reply) -> None:
        """Raise the error of a `reply` that is no 200; one that was compressed unasked is decoded from now on."""
        if "content-encoding" in reply.headers.lowered:
            reply.decode(MOST_DECODED_BYTES)
        if reply.status != 200:
            body = await _read_at_most(reply, MOST_ERROR_BYTES)
            raise call.exchange.error_of(self.name, reply.status, self.own_keys.hidden_bytes(body), reply.headers)

    async def _whole(self, reply: Reply, limit_bytes: int) -> bytes:
        """All of the body. Raises BackendFailed if it is longer."""
        whole = await _read_at_most(reply, limit_bytes + 1)
        if len(whole) > limit_bytes:
            raise BackendErred(f"{self.name} answered more than {limit_bytes} bytes")
        return whole

    def _failure(self, error: BaseException) -> ExpectedError:
        """What an exchange fails with, because of `error`."""
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"{self.name} could not finish before the deadline")
        return self._unreachable(error)

    def _end(self, call: _Call) -> None:
        """The answer is whole, or is left: then the connection is closed, or the server sent an abort."""
        self._calls.discard(call)
        exchange, reply = call.exchange, call.reply
        if call.timer is not None:
            call.timer.cancel()
        if reply is not None and not reply.is_ended:
            reply.close()
        if exchange.abort is None:
            return
        answer = exchange.answer
        is_over = reply is not None and reply.is_ended if isinstance(answer, WholeBody) else answer.is_over
        if not is_over:
            self._send_abort(exchange.abort)

    async def _ask(self, http: Http1Client, method: str, path: str, content: bytes | None = None) -> Page:
        headers = self._headers({"content-type": "application/json"} if content is not None else {})
        try:
            async with (
                asyncio.timeout(self._options.probe_s),
                await http.request(method, path, headers, content) as reply,
            ):
                if "content-encoding" in reply.headers.lowered:
                    reply.decode(MOST_DECODED_BYTES)
                body = await _read_at_most(reply, MOST_PAGE_BYTES + 1)
        except (AnswerError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if len(body) > MOST_PAGE_BYTES:
            raise BackendFailed(f"{self.name} answered more than {MOST_PAGE_BYTES} bytes to {path}")
        return Page(reply.status, body if reply.status == 200 else self.own_keys.hidden_bytes(body))

    def _connections(self) -> Http1Client:
        """Made when they are first needed. Raises Unreached."""
        if self._http is None:
            self.require_open()
            # The router bounds running requests by tenant and by backend; a limit here would hide a queue from it.
            try:
                context = None if self._options.tls is None else self._options.tls.live()
                limits = ClientLimits(connect_s=self._options.connect_s)
                self._http = Http1Client(self.url, limits, ssl_context=context)
            except ValueError as error:
                raise Unreached(f"{self.name} cannot be reached: {error}", hint="correct its address") from error
        return self._http

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

    def _lines(self, of_request: Mapping[str, str]) -> bytes:
        """The header lines of a post. What every post has is written once."""
        if self._post_lines is None:
            self._post_lines = header_lines({**self._post_headers, **self._key_headers}.items())
        if not of_request:
            return self._post_lines
        return header_lines({**self._post_headers, **of_request, **self._key_headers}.items())

    def _unreachable(self, error: BaseException) -> BackendFailed:
        kind = next((kind for cause, kind in _KINDS.items() if isinstance(error, cause)), BackendErred)
        reason = str(error) or type(error).__name__
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            if self._options.tls is not None:
                self._options.tls.refusals.refuse(self.url, cause)
            reason = sentence_of(cause)
        elif isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
            reason, _ = why_unanswered(self.url, cause)
        return kind(f"{self.name} cannot be reached: {reason}", hint=f"is {self.url} up?")


class _Call(msgspec.Struct, eq=False):
    """One exchange that is under way."""

    exchange: Exchange
    reply: Reply | None = None
    timer: asyncio.TimerHandle | None = None
    """That of its deadline."""


async def _read(answer: WholeBody, whole: bytes) -> list[Delta]:
    """What `answer` reads, on a thread where that would take too long here."""
    return await asyncio.to_thread(answer.read, whole) if has_many_values(whole) else answer.read(whole)


async def _read_at_most(reply: Reply, limit_bytes: int) -> bytes:
    """The first `limit_bytes` of the body."""
    body = bytearray()
    while len(body) < limit_bytes and (data := await reply.read()):
        body += data
    return bytes(body[:limit_bytes])


async def _in_time(call: _Call, posted: Coroutine[Any, Any, Reply], deadline_s: float) -> Reply:
    """The reply that is `posted`. Raises TimeoutError after `deadline_s`, and then has readers of its body raise it."""
    loop = asyncio.get_running_loop()
    due_at = loop.time() + deadline_s
    async with asyncio.timeout_at(due_at):
        reply = await posted
    call.timer = loop.call_at(due_at, reply.stop, TimeoutError("the deadline passed"))
    return reply


async def _pour(reply: Reply, answer: Answer, to: Taker) -> None:
    """Give `to` what `answer` makes of the body, in the moment that it comes."""
    deltas: Iterator[Delta] = iter(())

    def take(data: bytes) -> bool:
        nonlocal deltas
        deltas = answer.feed(data)
        for delta in deltas:
            if not to.take(delta):
                return False
        return not answer.is_over

    pour, is_end = reply.pour_decoded if "content-encoding" in reply.headers.lowered else reply.pour, False
    while not is_end and not answer.is_over:
        is_end = await pour(take)
        if not is_end:
            await to.ready()
            await give(deltas, to)
    for delta in answer.end():
        if not to.take(delta):
            await to.ready()
    if not is_end and not reply.is_ended:
        await _read_to_end(reply)


async def _read_to_end(reply: Reply) -> None:
    """Let the connection be reused, if the server ends its reply soon after the last event."""
    with suppress(AnswerError, TimeoutError):
        async with asyncio.timeout(_LAST_CHUNK_S):
            while await reply.read():
                pass
