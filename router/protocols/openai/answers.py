"""Renders OpenAI's text API: Deltas become chunks of a stream or one whole body. Pure; returns bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from backends.http.lenient_json import read_json
from backends.http.sse import SseBlocks, data_in
from policies.errors import ExpectedError
from policies.nouns import Delta, TokenLogprob, Usage
from router.protocols.dialect import Answer, Head
from router.protocols.dialect import comment as sse_comment
from router.protocols.status import openai_error

_encode = msgspec.json.encode

_LAST = b"[DONE]"
DONE = b"data: " + _LAST + b"\n\n"


class Shape(Protocol):
    """The shapes of one endpoint's answers."""

    prefix: str
    chunk_object: str
    whole_object: str

    def chunk_choice(self, index: int, delta: Delta, offset: int | None) -> dict[str, Any]:
        """One choice of a chunk. `offset`: its characters so far; None in its first chunk."""
        ...

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of a whole body."""
        ...


def blended_in(usage: Usage) -> dict[str, int]:
    """The member for blended tokens, if there are any."""
    return {"blended_tokens": usage.blended_tokens} if usage.blended_tokens else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` in OpenAI's shape."""
    thought = usage.reasoning_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **blended_in(usage)},
        **({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}),
    }


def whole_body(shape: Shape, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
    """The JSON body of an answer that is not streamed."""
    body = {
        "id": head.id,
        "object": shape.whole_object,
        "created": head.created,
        "model": head.model,
        "choices": [shape.whole_choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage_body(usage),
    }
    return _encode(body)


def merged_body(shape: Shape, head: Head, answers: Sequence[Answer], usage: Usage, choices: int) -> bytes:
    """The answers to several prompts, `choices` to each, as one body, if backends answered in the dialect: the fields
    of the first body, all choices in order, and the sum of usage.
    """
    whole: dict[str, Any] = {}
    merged: list[dict[str, Any]] = []
    for first in range(0, len(answers), choices):
        some = answers[first : first + choices]
        body = next((each.body for each in some if each.body), None)
        if body is None:
            body = whole_body(shape, head, some, Usage())
        part = read_json(body)
        merged += [choice | {"index": first + (choice.get("index") or 0)} for choice in part.get("choices") or ()]
        usages = _added(whole.get("usage"), part.get("usage"))
        whole = part | whole | {"usage": usages}
    if not all(any(each.body for each in answers[at : at + choices]) for at in range(0, len(answers), choices)):
        # a sum over some prompts would look like the sum over all
        whole["usage"] = usage_body(usage)
    return _encode(whole | {"choices": merged})


def _added(left: Any, right: Any) -> Any:
    """The sum of two usage objects, member by member; null counts as absent."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: _added(left.get(name), right.get(name)) for name in {**left, **right}}
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left + right
    return right if left is None else left


class Chunks:
    """Renders the chunks of one streamed answer as server-sent events."""

    has_begun = False
    """Chunks say nothing of which there may be one alone."""

    def __init__(self, shape: Shape, head: Head, *, include_usage: bool, usage_so_far: bool = False) -> None:
        self._shape, self._include_usage = shape, include_usage
        opening = {"id": head.id, "object": shape.chunk_object, "created": head.created, "model": head.model}
        # all that chunks repeat is encoded once: a chunk costs 1 us instead of 2
        self._before = _opened(opening)
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._offsets: dict[int, int] = {}
        self._blocks: dict[int, SseBlocks] = {}
        self._id: Any = None
        self._used: dict[str, Any] | None = None
        self._prompt_tokens = 0
        self._drawn: dict[int, int] | None = {} if usage_so_far else None
        """Tokens of each choice so far, where each chunk tells them."""

    def __repr__(self) -> str:
        return f"<Chunks {self._shape.prefix} of {len(self._offsets)} choices>"

    def begin(self, prompt_tokens: int) -> None:
        """Keep the prompt's length for the usage so far."""
        self._prompt_tokens = prompt_tokens

    def resume(self, raw: bytes, characters: int) -> None:
        """Repeat what the events in `raw` have beside their choices: to its client the answer is one."""
        contents = [data for block in SseBlocks().feed(raw) if (data := data_in(block)) is not None]
        if contents:
            chunk: dict[str, Any] = read_json(contents[-1])
            self._before = _opened({name: chunk[name] for name in chunk if name not in ("choices", "usage")})
            self._offsets[0] = characters

    def progress(self, comment: str) -> bytes:
        """A comment."""
        return sse_comment(comment)

    def render(self, index: int, delta: Delta) -> bytes:
        """The event for one piece of choice `index`; empty if it has nothing for the client."""
        after = self._after
        if self._drawn is not None:
            # as flights count them
            more = delta.tokens or len(delta.token_ids) or bool(delta.text)
            drawn = self._drawn[index] = self._drawn.get(index, 0) + more
            after = b'],"usage":' + _encode(_usage_so_far(self._prompt_tokens, drawn)) + b"}\n\n"
        if not (delta.text or delta.finish_reason or delta.logprobs or delta.message):
            return b""
        choice = self._shape.chunk_choice(index, delta, self._offsets.get(index))
        self._offsets[index] = self._offsets.get(index, 0) + len(delta.text)
        return self._before + _encode(choice) + after

    def merge(self, first: int, raw: bytes) -> bytes:
        """A backend's events `raw` for one of several prompts, as events of one answer: all with one id, and with
        choices numbered from `first`. Usage is summed up for the end.
        """
        blocks = self._blocks.setdefault(first, SseBlocks())
        return b"".join(self._merged(first, block) for block in blocks.feed(raw))

    def _merged(self, first: int, block: bytes) -> bytes:
        data = data_in(block)
        if data is None:
            return block
        if data == _LAST:
            return b""
        chunk = read_json(data)
        self._id = chunk.get("id") if self._id is None else self._id
        chunk["id"] = self._id
        if not chunk.get("choices") and chunk.get("usage"):
            used = _added((self._used or {}).get("usage"), chunk["usage"])
            self._used = chunk | {"usage": used}
            return b""
        for choice in chunk.get("choices") or ():
            choice["index"] = first + (choice.get("index") or 0)
        return b"data: " + _encode(chunk) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        """The events that end the stream."""
        if not self._include_usage:
            return DONE
        if self._used is not None:
            return b"data: " + _encode(self._used) + b"\n\n" + DONE
        return self._before + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n" + DONE

    def fail(self, error: ExpectedError) -> bytes:
        """An error as the last event; no [DONE] follows."""
        return b"data: " + _encode(openai_error(error)) + b"\n\n"


def _usage_so_far(prompt_tokens: int, drawn_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn_tokens,
        "total_tokens": prompt_tokens + drawn_tokens,
    }


def _opened(members: dict[str, Any]) -> bytes:
    """The beginning of an event with these `members`, up to its choices."""
    return b"data: " + _encode(members)[:-1] + b',"choices":['


class ChatShape:
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
        logprobs = {"content": [chat_logprob(token) for token in delta.logprobs]} if delta.logprobs else None
        return {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of a whole body."""
        message = {"role": "assistant", "content": answer.text, **answer.message}
        if message.get("tool_calls") and not answer.text:
            message["content"] = None
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
        logprobs = {"content": [chat_logprob(token) for token in answer.logprobs]} if answer.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


class CompletionShape:
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


def chat_logprob(drawn: TokenLogprob) -> dict[str, Any]:
    """One token of a chat's `logprobs.content`."""
    return {**_token(drawn), "top_logprobs": [_token(other) for other in drawn.top]}


def _token(drawn: TokenLogprob) -> dict[str, Any]:
    octets = drawn.token.encode() if drawn.octets is None else drawn.octets
    return {"token": drawn.token, "logprob": drawn.logprob, "bytes": list(octets)}


def _completion_logprobs(drawn: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for token in drawn:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in drawn],
        "token_logprobs": [token.logprob for token in drawn],
        "top_logprobs": [{other.token: other.logprob for other in token.top} for token in drawn],
        "text_offset": offsets,
    }
