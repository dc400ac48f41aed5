"""Parses an engine's answer as a gateway passes it on, into Deltas: times of tokens, and usage. Pure but for memory.

Sources: OpenAI API reference, "Responses", "Streaming events"; Anthropic API reference, "Messages", version 2023-06-01.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backends.http.errors import error_in_stream
from backends.http.exchange import Answer, WholeBody
from backends.http.lenient_json import read_json
from backends.http.nonsense import nonsense
from backends.http.sse import SseDecoder
from backends.messages.answer import MESSAGES_PATH, AnthropicAnswer
from backends.nesting import MOST_AT_ONCE, has_many_values
from backends.openai.answer import OpenAIAnswer, ReadWhole
from backends.openai.pooled import POOLED, PooledAnswer
from backends.openai.responses import RESPONSES_PATH
from policies.errors import BackendErred, BackendFailed
from policies.nouns import Delta, Request, Usage
from router.protocols.openai.fields import MOST_CHOICES, MOST_PROMPTS

_MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, msgspec.DecodeError)
_ENDS = {"response.completed": "stop", "response.incomplete": "length"}


def reader_of(path: str, backend: str, request: Request, *, is_streamed: bool) -> Answer:
    """The parser for a 200 of `backend` to a request to `path`, as server-sent events or whole."""
    if path in POOLED:
        return Collected(backend, PooledAnswer(backend, path, request.prompt_tokens))
    if path == MESSAGES_PATH and is_streamed:
        return AnthropicAnswer(backend)
    if path == RESPONSES_PATH and is_streamed:
        return ResponseEvents(backend)
    if path in (MESSAGES_PATH, RESPONSES_PATH):
        return Collected(backend, UsageAlone(backend))
    # the body may have several prompts, each with its choices
    answer = OpenAIAnswer(backend, request, is_streamed=is_streamed, most_choices=MOST_PROMPTS * MOST_CHOICES)
    return answer if is_streamed else Collected(backend, ReadWhole(answer))


class ResponseEvents:
    """A streamed answer of OpenAI's Responses: each piece of text or arguments, and usage from the last event."""

    def __init__(self, backend: str) -> None:
        self.is_over = False
        self._backend, self._events = backend, SseDecoder()

    def __repr__(self) -> str:
        return f"<ResponseEvents of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed for invalid events, and the error in an error event."""
        for event in self._events.feed(data):
            if self.is_over:
                return
            try:
                deltas = list(self._hear(read_json(event.data)))
            except _MISSHAPEN as error:
                raise nonsense(self._backend, event.data) from error
            yield from deltas

    def end(self) -> Iterator[Delta]:
        """No Delta. Raises BackendFailed if the stream ended too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._backend} ended its stream without response.completed")
        return iter(())

    def _hear(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        kind = event["type"]
        if kind == "error":
            raise error_in_stream(self._backend, event)
        if kind == "response.failed":
            raise error_in_stream(self._backend, event["response"].get("error") or {})
        if kind in _ENDS:
            self.is_over = True
            yield Delta(finish_reason=_ENDS[kind], usage=_usage_of(event["response"].get("usage") or {}))
        elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
            yield Delta(text=event["delta"])


class Collected:
    """An answer in one piece that comes in several: `body` reads it at its end."""

    def __init__(self, backend: str, body: WholeBody) -> None:
        self.is_over = False
        self._backend, self.body = backend, body
        self._whole = bytearray()

    def __repr__(self) -> str:
        return f"<Collected of {self._backend}: {len(self._whole)} bytes>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """No Delta yet. Raises BackendFailed if the answer is too long."""
        self._whole += data
        if len(self._whole) > self.body.limit_bytes:
            raise BackendFailed(f"{self._backend} answered more than {self.body.limit_bytes} bytes")
        return iter(())

    def end(self) -> Iterator[Delta]:
        """What `body` reads. Raises as that does."""
        if has_many_values(self._whole):
            # the gateway's client has it already, and others would wait for what it used
            raise BackendErred(f"{self._backend} answered more than {MOST_AT_ONCE} values")
        deltas = self.body.read(bytes(self._whole))
        self.is_over = True
        return iter(deltas)


class UsageAlone(WholeBody):
    """The usage in one JSON object, as answered by Responses and Anthropic's Messages."""

    backend: str

    def read(self, whole: bytes) -> list[Delta]:
        """The end, with usage. Raises BackendFailed for an invalid answer."""
        try:
            usage = _usage_of(read_json(whole)["usage"])
        except _MISSHAPEN as error:
            raise nonsense(self.backend, whole) from error
        return [Delta(finish_reason="stop", usage=usage)]


def _usage_of(usage: Mapping[str, Any]) -> Usage:
    """Usage as in Responses (cached tokens are part of the input's) or Anthropic's API (they are separate)."""
    cached = int(usage.get("cache_read_input_tokens") or 0)
    written = int(usage.get("cache_creation_input_tokens") or 0)
    prompt = int(usage.get("input_tokens") or 0) + cached + written
    details = usage.get("input_tokens_details") or {}
    read = cached or int(details.get("cached_tokens") or 0)
    return Usage(prompt, int(usage.get("output_tokens") or 0), read, cache_write_tokens=written)
