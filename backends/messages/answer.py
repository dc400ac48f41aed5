"""Parses answers of Anthropic's API: a streamed message as Deltas, and its errors. Pure but for its own memory.

Source: Anthropic API reference, "Streaming messages", "Errors"; version 2023-06-01.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backends.http.errors import details_of, error_of, retry_after_s
from backends.http.event_answer import EventAnswer
from backends.http.lenient_json import read_json
from backends.http.nonsense import REQUIRED, counts_in, reported_usage
from policies.errors import ContextExceeded, ExpectedError, Overloaded
from policies.nouns import Delta, Usage

MESSAGES_PATH = "/v1/messages"

_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 529,
}
_TOO_LONG = re.compile(r"prompt is too long|exceed context limit|input length and `max_tokens`")
_OVERLOADED = 529


class AnthropicAnswer(EventAnswer):
    """Fed with the body of a 200. `message_stop` is the end.

    Thinking becomes `reasoning_content`, and once a block of it is over `thinking_blocks`: all so far, signed.
    """

    last_word = "message_stop"

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self._usage: dict[str, int] = {}
        self._thinking: list[dict[str, Any]] = []
        self._calls = -1
        self._open = ""

    def _read(self, data: bytes) -> Iterator[Delta]:
        event = read_json(data)
        kind = event["type"]
        if kind == "error":
            raise error_in_stream(self._backend, event)
        if kind == "message_start":
            self.add_usage(event["message"].get("usage") or {})
        elif kind == "content_block_start":
            yield from self._begin(event["content_block"])
        elif kind == "content_block_delta":
            yield from self._piece(event["delta"])
        elif kind == "content_block_stop":
            if self._open in ("thinking", "redacted_thinking"):
                yield Delta(message={"thinking_blocks": [dict(block) for block in self._thinking]})
            self._open = ""
        elif kind == "message_delta":
            self.add_usage(event.get("usage") or {})
            reason = event["delta"].get("stop_reason")
            if reason:
                yield Delta(finish_reason=finish_of(reason), stop=event["delta"].get("stop_sequence"))
        elif kind == "message_stop":
            self.is_over = True
            yield Delta(usage=self.add_usage({}))

    def _begin(self, block: Mapping[str, Any]) -> Iterator[Delta]:
        self._open = block["type"]
        if self._open == "tool_use":
            self._calls += 1
            # the whole input, if it does not come in pieces
            given = msgspec.json.encode(block["input"]).decode() if block.get("input") else ""
            function = {"name": block["name"], "arguments": given}
            call = {"index": self._calls, "id": block["id"], "type": "function", "function": function}
            yield Delta(message={"tool_calls": [call]})
        elif self._open in ("thinking", "redacted_thinking"):
            self._thinking.append(dict(block))
            if block.get("thinking"):
                yield Delta(message={"reasoning_content": block["thinking"]})
        elif block.get("text"):
            yield Delta(text=block["text"])

    def _piece(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        kind = delta["type"]
        if kind == "text_delta":
            yield Delta(text=delta["text"])
        elif kind == "input_json_delta" and self._open == "tool_use" and delta["partial_json"]:
            call = {"index": self._calls, "function": {"arguments": delta["partial_json"]}}
            yield Delta(message={"tool_calls": [call]})
        elif kind == "thinking_delta":
            self._thinking[-1]["thinking"] = self._thinking[-1].get("thinking", "") + delta["thinking"]
            yield Delta(message={"reasoning_content": delta["thinking"]})
        elif kind == "signature_delta":
            self._thinking[-1]["signature"] = delta["signature"]

    def add_usage(self, usage: Any) -> Usage:
        """The usage so far, including the event's `usage`.

        Its counts are of the whole message so far; a missing count, or one that is none, stays as it was.
        """
        self._usage |= {name: value for name, value in counts_in(usage).items() if isinstance(value, int)}
        cached = self._usage.get("cache_read_input_tokens", 0)
        written = self._usage.get("cache_creation_input_tokens", 0)
        uncached = self._usage.get("input_tokens")
        prompt = None if uncached is None else uncached + cached + written
        output = self._usage.get("output_tokens", REQUIRED)
        return reported_usage(REQUIRED if prompt is None else prompt, output, cached, written=written)


def finish_of(stop_reason: str) -> str:
    """OpenAI's word for why a message ended."""
    return _FINISHES.get(stop_reason, "stop")


def error_of_anthropic(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
    """The error for an HTTP `status` with its `body` {type: error, error: {type, message}}."""
    message = str(details_of(body).get("message") or f"status {status}")[:2000]
    if status == _OVERLOADED:
        return Overloaded(f"{backend} is busy: {message}", retry_after_s=retry_after_s(headers))
    return ContextExceeded(message) if _TOO_LONG.search(message) else error_of(backend, status, body, headers)


def error_in_stream(backend: str, event: Mapping[str, Any]) -> ExpectedError:
    """The error for an error event behind a status of 200."""
    status = _STATUSES.get(event["error"].get("type"), 500)
    return error_of_anthropic(backend, status, msgspec.json.encode(event), {})
