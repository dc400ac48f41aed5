"""Streamed chats with a router, or any server with OpenAI's API, and what each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from backends.http.sse import SseDecoder
from backends.nesting import decode_json
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from router.direct import client_context, with_scheme
from tls.errors import why_unanswered
from tls.settings import TlsSettings

KEY_VARIABLE = "POINTSMAN_KEY"
"""The environment variable with the client's API key."""

_MOST_LIST_BYTES = 4 << 20
_MOST_ERROR_BYTES = 64 << 10

Clock = Callable[[], float]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Times are seconds since the request was sent: to its first and to its last piece.

    `headers` are the names of backend, class and tenant that a router sends; empty from other servers. `cached_tokens`
    is None if the server does not tell. `finish` is the reason of the end; None if the stream has none.
    """

    text: str
    first_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    finish: str | None
    headers: Mapping[str, str]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is no second, or if all came at once."""
        if self.output_tokens < 2 or self.end_s <= self.first_s:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


class ChatClient:
    """Chats with the server at `url`, as an async context manager. `key` is the client's API key.

    `most` connections are open at a time. Requests have no limit of time, only of silence: `silence_s`.
    `tls` names files for https.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        most: int = 1000,
        silence_s: float = 300.0,
        clock: Clock = time.perf_counter,
        tls: TlsSettings | None = None,
    ) -> None:
        self._url, self._clock, self._context = root_of(with_scheme(url, tls)), clock, client_context(tls)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._most, self._silence_s = most, silence_s
        self._http: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<ChatClient of {self._url}>"

    async def __aenter__(self) -> ChatClient:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._most, ssl=self._context),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=self._silence_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def models(self) -> tuple[str, ...]:
        """The names of the models that the server lists. Raises ExpectedError."""
        assert self._http is not None
        try:
            async with self._http.get(f"{self._url}/v1/models") as reply:
                if reply.status != 200:
                    raise await refusal_in(reply)
                listed = await reply.content.read(_MOST_LIST_BYTES)
                while chunk := await reply.content.read(_MOST_LIST_BYTES):
                    listed += chunk
                    if len(listed) > _MOST_LIST_BYTES:
                        raise BackendFailed(f"the list of models at {self._url} is too long", hint="is it a router?")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreached(self._url, error) from error
        try:
            return tuple(card.id for card in decode_json(listed, _Cards).data)
        except msgspec.MsgspecError as error:
            raise BackendFailed(f"{self._url}/v1/models is no list of models", hint="is it a router?") from error

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        model: str,
        *,
        max_tokens: int | None = None,
        fields: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Reply:
        """The whole answer to `messages`; `on_text` gets each piece as it comes. `fields` go into the body too.

        Raises ExpectedError if the request is refused, or if the stream breaks off.
        """
        assert self._http is not None
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        body |= {} if max_tokens is None else {"max_tokens": max_tokens}
        began = self._clock()
        stream = _Answer(on_text)
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body | dict(fields or {})) as reply:
                if reply.status != 200:
                    raise await refusal_in(reply)
                async for data in reply.content.iter_any():
                    stream.feed(data, self._clock() - began)
                headers = {name.lower(): value for name, value in reply.headers.items()}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreached(self._url, error) from error
        return stream.reply(self._clock() - began, headers)


class _Answer:
    """Puts an answer together from its stream."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._events = SseDecoder()
        self._texts: list[str] = []
        self._first_s: float | None = None
        self._last_s = 0.0
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._is_done = False

    def __repr__(self) -> str:
        return f"<_Answer of {len(self._texts)} pieces{', done' if self._is_done else ''}>"

    def feed(self, data: bytes, at_s: float) -> None:
        """Take bytes that came `at_s` after the request was sent."""
        for event in self._events.feed(data):
            if event.data == b"[DONE]":
                self._is_done = True
                continue
            try:
                chunk = decode_json(event.data, _Chunk)
            except msgspec.MsgspecError as error:
                raise BackendFailed(
                    f"the stream has an event that is no chunk of a chat: {error}", hint="is it a router?"
                ) from error
            if chunk.error is not None:
                raise BackendFailed(f"the answer was broken off: {_message(chunk.error)}", hint="try again")
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices:
                self._finish = choice.finish_reason or self._finish
                thought = choice.delta.reasoning_content or choice.delta.reasoning
                if thought or choice.delta.content:
                    self._first_s = at_s if self._first_s is None else self._first_s
                    self._last_s = at_s
                if choice.delta.content:
                    self._texts.append(choice.delta.content)
                    self._on_text(choice.delta.content)

    def reply(self, end_s: float, headers: Mapping[str, str]) -> Reply:
        """The answer; its stream has ended after `end_s`. Raises BackendFailed if it is not whole."""
        if not self._is_done:
            raise BackendFailed("the stream ended without [DONE]", hint="try again")
        usage = self._usage or _Usage()
        prefix = "x-pointsman-"
        return Reply(
            text="".join(self._texts),
            first_s=end_s if self._first_s is None else self._first_s,
            end_s=self._last_s or end_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish=self._finish,
            headers={name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)},
        )


def root_of(url: str) -> str:
    """The server's URL without /v1. Raises InvalidRequest."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # brackets without an IPv6 address, or a port above 65535
        is_address = False
    if not is_address:
        raise InvalidRequest(f"'{url}' is not an address", hint="write one like http://127.0.0.1:8080", param="at")
    return whole.rstrip("/").removesuffix("/v1")


def unreached(url: str, error: Exception) -> ExpectedError:
    """What a person is told of `error`, by which the server at `url` did not answer."""
    reason, hint = why_unanswered(url, error)
    return BackendFailed(f"no answer from {url}: {reason}", hint=hint or "is a router running there? see --at")


async def refusal_in(reply: aiohttp.ClientResponse, *, missing: str = "is it a router? see --at") -> ExpectedError:
    """The error that `reply` has, with the server's own words; `missing` is the hint for a path or name that it does
    not know, unless the server has a hint of its own, or names the model."""
    raw = await reply.content.read(_MOST_ERROR_BYTES)
    hint = {401: f"keys are read from ${KEY_VARIABLE}", 404: missing}.get(reply.status, "")
    try:
        body = decode_json(raw)
        error = body.get("error") if isinstance(body, dict) else None
        message = _message(error) if error is not None else raw.decode()
        if isinstance(error, dict) and reply.status == 401:
            # a router's hint is about the header, which is not the user's to write here
            message = message.removesuffix(f" ({error.get('hint')})")
        elif isinstance(error, dict) and (error.get("param") == "model" or message.endswith(f"({error.get('hint')})")):
            hint = ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = ""
    why = f"answered {reply.status}: {message[:500]}" if message else f"answered {reply.status}"
    return InvalidRequest(f"{reply.url.path} {why}", hint=hint)


def _message(error: object) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
