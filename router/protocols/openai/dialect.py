"""OpenAI's text API as dialects: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from policies.errors import ExpectedError
from policies.nouns import Usage
from router.ask import Ask
from router.protocols.answer import Answer, Head
from router.protocols.dialect import Failure
from router.protocols.openai.answers import ChatShape, Chunks, CompletionShape, Shape, merged_body, whole_body
from router.protocols.openai.request import chat_ask, completion_ask
from router.protocols.status import openai_error, status_of

Parse = Callable[[Mapping[str, Any], Mapping[str, str]], Ask]


class OpenAIDialect:
    """One endpoint: `read` makes an Ask of a body, `shape` gives the shapes of the answers."""

    def __init__(self, shape: Shape, read: Parse) -> None:
        self.prefix, self._shape, self._read = shape.prefix, shape, read
        self._choices = 1

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. Raises InvalidRequest."""
        ask = self._read(body, headers)
        self._choices = ask.sampling.choices
        return ask

    def stream(self, head: Head, ask: Ask) -> Chunks:
        """Chunks, until [DONE]."""
        return Chunks(self._shape, head, include_usage=ask.include_usage)

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
        """One object with all choices; the backend's own bytes if it speaks the dialect."""
        bodies = [answer.body for answer in answers if answer.body]
        if not bodies:
            return whole_body(self._shape, head, answers, usage)
        if len(answers) == self._choices:
            return bodies[0]
        return merged_body(self._shape, head, answers, usage, self._choices)

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        return openai_failure(error)


def openai_failure(error: ExpectedError, status: int | None = None) -> Failure:
    """`error` in the shape of OpenAI's API, with `status` if given."""
    return Failure(status or status_of(error).http, msgspec.json.encode(openai_error(error)))


def chat_dialect() -> OpenAIDialect:
    """`/v1/chat/completions`."""
    return OpenAIDialect(ChatShape(), chat_ask)


def completion_dialect() -> OpenAIDialect:
    """`/v1/completions`."""
    return OpenAIDialect(CompletionShape(), completion_ask)
