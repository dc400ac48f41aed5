"""Renders Anthropic's messages API: Deltas become events of a stream or one message. Pure; returns bytes.

Source: Anthropic API reference, "Messages", "Streaming messages", "Errors"; versions 2023-06-01 and 2026-10-21.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.nesting import decode_json
from policies.errors import ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, Usage
from router.ask import Ask
from router.protocols.anthropic.request import messages_ask, untranslated_messages
from router.protocols.calls_in_order import CallsInOrder
from router.protocols.dialect import Answer, Failure, Head, comment, refusal_in, thought_in
from router.protocols.overflow import anthropic_words
from router.protocols.status import status_of

_encode = msgspec.json.encode

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_OVERLOADED_STATUS = 529

SIGNATURE = "unsigned"
"""Stands for the signature of thinking that no provider signed.

Clients drop thinking without one, so that a model which thinks between calls of tools does not get it back, or end the
turn. Sources: QwenLM/qwen-code#6893, routatic/proxy#51; "Streaming messages": a signature_delta ends each thinking.
"""


class MessagesDialect:
    """`/v1/messages`."""

    prefix = "msg_"
    passes_on = True

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. Raises InvalidRequest."""
        try:
            return messages_ask(body, headers)
        except InvalidRequest as refusal:
            return untranslated_messages(body, headers, refusal)

    def stream(self, head: Head, ask: Ask) -> MessageStream:  # noqa: ARG002 - usage always comes
        """Events from message_start to message_stop."""
        return MessageStream(head)

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:  # noqa: ARG002 - one answer
        """One message."""
        (answer,) = answers
        finish = "content_filter" if refusal_in(answer.message) else answer.finish_reason
        ending = _ending(finish, answer.stop, has_calls=bool(answer.message.get("tool_calls")))
        return _encode(_message(head) | {"content": list(_blocks(answer)), **ending, "usage": _usage(usage)})

    def failure(self, error: ExpectedError) -> Failure:
        """{"type": "error", ...}."""
        return anthropic_failure(error)


def anthropic_failure(error: ExpectedError, status: int | None = None) -> Failure:
    """`error` in the shape of Anthropic's API, with `status` if given; overload has a status of its own there."""
    if isinstance(error, Overloaded):
        return Failure(_OVERLOADED_STATUS, _encode(_error(error)))
    return Failure(status or status_of(error).http, _encode(_error(error, status)))


class MessageStream:
    """Renders one streamed message: blocks of thinking, text and tool use, one open at a time."""

    has_begun = False
    """Pings come before message_start too."""

    def __init__(self, head: Head) -> None:
        self._head, self._prompt_tokens = head, 0
        self._is_begun = False
        self._open: str | int | None = None
        """The open block: "thinking", "text", or the number of a tool call; None if none is open."""
        self._blocks, self._has_calls, self._has_refused = 0, False, False
        self._signed, self._turns = 0, CallsInOrder()
        self._finish: str | None = None
        self._stop: str | None = None

    def __repr__(self) -> str:
        return f"<MessageStream {self._head.id}: {self._blocks} blocks, {self._open!r} open>"

    def begin(self, prompt_tokens: int) -> None:
        """Keep the prompt's length for message_start."""
        self._prompt_tokens = prompt_tokens

    def resume(self, raw: bytes, characters: int) -> None:
        """Do nothing: no answer of this dialect is continued behind a backend's own events."""

    def progress(self, text: str) -> bytes:
        """A ping, and a comment for people."""
        return comment(text) + _event({"type": "ping"})

    def render(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002 - a message has one choice
        """The events for one piece."""
        self._finish = delta.finish_reason or self._finish
        self._stop = delta.stop or self._stop
        events = b"".join(_event(event) for piece in self._turns.feed(delta) for event in self._events(piece))
        return self._start() + events if events else b""

    def merge(self, first: int, raw: bytes) -> bytes:  # noqa: ARG002 - a call has one prompt
        """`raw`."""
        return raw

    def end(self, usage: Usage) -> bytes:
        """The stop reason, usage, and message_stop."""
        waited = [event for piece in self._turns.end() for event in self._events(piece)]
        finish = "content_filter" if self._has_refused else self._finish
        ending = _ending(finish, self._stop, has_calls=self._has_calls)
        last = {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
        closing = b"".join(map(_event, (*waited, *self._close())))
        return self._start() + closing + _event(last) + _event({"type": "message_stop"})

    def fail(self, error: ExpectedError) -> bytes:
        """An error event; no message_stop follows."""
        return _event(_error(error))

    def _start(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = _usage(Usage(self._prompt_tokens))
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event({"type": "message_start", "message": _message(self._head) | empty})

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        message = delta.message or {}
        if thought := thought_in(message):
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": thought})
        yield from self._sign(message.get("thinking_blocks") or ())
        refusal = refusal_in(message)
        self._has_refused |= bool(refusal)
        if text := delta.text + refusal:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": text})
        for call in message.get("tool_calls") or ():
            yield from self._call(call)

    def _sign(self, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The signature of the previous thinking, or a redacted block."""
        for block in blocks[self._signed :]:
            if block.get("type") == "thinking":
                yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield from self._close(block.get("signature") or SIGNATURE)
            else:
                yield from self._switch("redacted", block)
                yield from self._close()
        self._signed = max(self._signed, len(blocks))

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call.get("function") or {}
        number = int(call.get("index") or 0)
        self._has_calls = True
        block: dict[str, Any] = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
        yield from self._switch(number, block)
        if function.get("arguments"):
            yield self._piece({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _switch(self, kind: str | int, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Close the open block, unless it is of `kind`, and begin `block`."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield {"type": "content_block_start", "index": self._blocks, "content_block": dict(block)}

    def _close(self, signature: str = SIGNATURE) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            if self._open == "thinking":
                yield self._piece({"type": "signature_delta", "signature": signature})
            yield {"type": "content_block_stop", "index": self._blocks}
            self._open = None
            self._blocks += 1

    def _piece(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}


def _event(event: Mapping[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _message(head: Head) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _ending(finish: str | None, stop: str | None, *, has_calls: bool) -> dict[str, Any]:
    reason = "tool_use" if has_calls and finish == "stop" else _STOP_REASONS.get(finish or "stop", "end_turn")
    return {"stop_reason": "stop_sequence" if stop is not None else reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """`usage` as Anthropic counts: input tokens are the uncached ones."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **({"blended_tokens": usage.blended_tokens} if usage.blended_tokens else {}),
    }


def _blocks(answer: Answer) -> Iterator[Mapping[str, Any]]:
    """The content of a whole message: thinking, text, and tool calls."""
    thought = thought_in(answer.message)
    if answer.message.get("thinking_blocks"):
        yield from answer.message["thinking_blocks"]
    elif thought:
        yield {"type": "thinking", "thinking": thought, "signature": SIGNATURE}
    if text := answer.text + refusal_in(answer.message):
        yield {"type": "text", "text": text}
    for call in answer.message.get("tool_calls") or ():
        function = call.get("function") or {}
        called = _arguments(function.get("arguments") or "{}")
        yield {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": called}


def _arguments(text: str) -> Mapping[str, Any]:
    """Arguments as an object; text that is not an object is put under the name that Anthropic recommends for that."""
    try:
        arguments = decode_json(text)
    except msgspec.MsgspecError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def _error(error: ExpectedError, status: int | None = None) -> dict[str, Any]:
    usual = "api_error" if status is None else "invalid_request_error"
    kind = _ERROR_TYPES.get(status or status_of(error).http, usual)
    kind = "overloaded_error" if isinstance(error, Overloaded) else kind
    message = anthropic_words(error) if isinstance(error, ContextExceeded) else error.public_message
    return {"type": "error", "error": {"type": kind, "message": message}}
