"""OpenAI's text API, written: Deltas become chunks of a stream or one whole body. Pure; bytes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from policies.nouns import Delta, TokenLogprob, Usage

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all pieces of one answer repeat. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str


class Dialect(Protocol):
    """The shapes of one endpoint."""

    prefix: str
    chunk_object: str
    whole_object: str

    def chunk_choice(self, index: int, delta: Delta, offset: int | None) -> dict[str, Any]:
        """One choice of a chunk. `offset` counts the characters of this choice before it; None: it is the first."""
        ...

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of a whole body."""
        ...


@dataclass(slots=True)
class Answer:
    """One choice of a whole answer, while its Deltas arrive."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Take one more piece."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.message:
            merge_message(self.message, delta.message)


def merge_message(message: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add `piece` of a streamed message to `message`: texts grow, tool calls are matched by their index."""
    for name, value in piece.items():
        if name == "tool_calls" and isinstance(value, list):
            calls = message.setdefault("tool_calls", [])
            for call in value:
                _merge_call(calls, call)
        elif isinstance(value, str) and isinstance(message.get(name), str) and name not in ("role", "id", "type"):
            message[name] += value
        elif isinstance(value, Mapping) and isinstance(message.get(name), dict):
            merge_message(message[name], value)
        elif value is not None or name not in message:
            message[name] = dict(value) if isinstance(value, Mapping) else value


def _merge_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    index = call.get("index", len(calls))
    known = next((one for one in calls if one.get("index") == index), None)
    if known is None:
        known = {}
        calls.append(known)
    merge_message(known, {"index": index, **call})


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_sum(usages: Iterable[Usage]) -> Usage:
    """What all prompts of a call used together."""
    known = list(usages)
    return Usage(
        sum(usage.prompt_tokens for usage in known),
        sum(usage.completion_tokens for usage in known),
        sum(usage.cached_tokens for usage in known),
    )


def whole_body(dialect: Dialect, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
    """The JSON body of an answer that is not streamed."""
    body = {
        "id": head.id,
        "object": dialect.whole_object,
        "created": head.created,
        "model": head.model,
        "choices": [dialect.whole_choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage_body(usage),
    }
    return _encode(body)


class Chunks:
    """Renders the chunks of one streamed answer as server-sent events."""

    def __init__(self, dialect: Dialect, head: Head, *, include_usage: bool) -> None:
        self._dialect, self._include_usage = dialect, include_usage
        opening = {"id": head.id, "object": dialect.chunk_object, "created": head.created, "model": head.model}
        # what every chunk repeats is encoded once: a chunk costs 1 us instead of 2
        self._before = b"data: " + _encode(opening)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._offsets: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Chunks {self._dialect.prefix} of {len(self._offsets)} choices>"

    def render(self, index: int, delta: Delta) -> bytes:
        """The event for one piece of choice `index`; empty if it has nothing that a client would see."""
        if not (delta.text or delta.finish_reason or delta.logprobs or delta.message):
            return b""
        choice = self._dialect.chunk_choice(index, delta, self._offsets.get(index))
        self._offsets[index] = self._offsets.get(index, 0) + len(delta.text)
        return self._before + _encode(choice) + self._after

    def end(self, usage: Usage) -> bytes:
        """The events that end the stream."""
        if not self._include_usage:
            return DONE
        return self._before + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n" + DONE


class ChatDialect:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def chunk_choice(self, index: int, delta: Delta, offset: int | None) -> dict[str, Any]:
        """One choice of a chunk; the first of each choice names the role."""
        piece: dict[str, Any] = {"role": "assistant", "content": ""} if offset is None else {}
        if delta.text:
            piece["content"] = delta.text
        if delta.message:
            piece.update(delta.message)
        logprobs = {"content": [_chat_logprob(one) for one in delta.logprobs]} if delta.logprobs else None
        return {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of a whole body."""
        message = {"role": "assistant", "content": answer.text, **answer.message}
        if message.get("tool_calls") and not answer.text:
            message["content"] = None
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
        logprobs = {"content": [_chat_logprob(one) for one in answer.logprobs]} if answer.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


class CompletionDialect:
    """`/v1/completions`."""

    prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def chunk_choice(self, index: int, delta: Delta, offset: int | None) -> dict[str, Any]:
        """One choice of a chunk."""
        logprobs = _completion_logprobs(delta.logprobs, offset or 0) if delta.logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of a whole body."""
        logprobs = _completion_logprobs(answer.logprobs, 0) if answer.logprobs else None
        return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    return {**_token(one), "top_logprobs": [_token(other) for other in one.top]}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode())}


def _completion_logprobs(drawn: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for one in drawn:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [one.token for one in drawn],
        "token_logprobs": [one.logprob for one in drawn],
        "top_logprobs": [{other.token: other.logprob for other in one.top} for one in drawn],
        "text_offset": offsets,
    }
