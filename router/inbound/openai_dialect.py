"""OpenAI's text API as dialects: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from policies.errors import ExpectedError
from policies.nouns import Usage
from router.ask import Ask
from router.inbound.answer import Answer, Head
from router.inbound.dialect import Failure
from router.inbound.openai import chat_ask, completion_ask
from router.inbound.openai_answers import ChatShape, Chunks, CompletionShape, Shape, whole_body
from router.inbound.status import openai_error, status_of

Parse = Callable[[Mapping[str, Any], Mapping[str, str]], Ask]


class OpenAIDialect:
    """One endpoint: `read` makes an Ask of its bodies, `shape` knows the shapes of its answers."""

    def __init__(self, shape: Shape, read: Parse) -> None:
        self.prefix, self._shape, self._read = shape.prefix, shape, read

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """What `body` asks for. Raises InvalidRequest."""
        return self._read(body, headers)

    def stream(self, head: Head, ask: Ask) -> Chunks:
        """Chunks, until [DONE]."""
        return Chunks(self._shape, head, include_usage=ask.include_usage)

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
        """One object with all choices; the backend's own, where it speaks the dialect."""
        return answers[0].body or whole_body(self._shape, head, answers, usage)

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        return openai_failure(error)


def openai_failure(error: ExpectedError, status: int | None = None) -> Failure:
    """`error` as OpenAI's API answers it, with `status` if it is not its own."""
    return Failure(status or status_of(error).http, msgspec.json.encode(openai_error(error)))


def chat_dialect() -> OpenAIDialect:
    """`/v1/chat/completions`."""
    return OpenAIDialect(ChatShape(), chat_ask)


def completion_dialect() -> OpenAIDialect:
    """`/v1/completions`."""
    return OpenAIDialect(CompletionShape(), completion_ask)
