"""OpenAI's text API as dialects: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.errors import ExpectedError
from policies.nouns import Usage
from router.ask import Ask
from router.protocols import untranslated
from router.protocols.dialect import Answer, Failure, Head
from router.protocols.openai.answers import ChatShape, Chunks, CompletionShape, Shape, merged_body, whole_body
from router.protocols.openai.request import chat_ask, completion_ask
from router.protocols.status import openai_error, status_of
from router.protocols.untranslated import Parse, passing


class OpenAIDialect:
    """One endpoint: `parse` makes an Ask of a body, `shape` gives the shapes of the answers."""

    passes_on = True

    def __init__(self, shape: Shape, parse: Parse) -> None:
        self.prefix, self._shape, self.parse = shape.prefix, shape, parse

    def stream(self, head: Head, ask: Ask) -> Chunks:
        """Chunks, until [DONE]."""
        return Chunks(self._shape, head, include_usage=ask.include_usage, usage_so_far=ask.usage_so_far)

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:
        """One object with all choices."""
        for answer in answers:
            if answer.body:
                return merged_body(self._shape, head, answers, usage, ask.sampling.choices)
        return whole_body(self._shape, head, answers, usage)

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        return openai_failure(error)


def openai_failure(error: ExpectedError, status: int | None = None) -> Failure:
    """`error` in the shape of OpenAI's API, with `status` if given."""
    return Failure(status or status_of(error).http, msgspec.json.encode(openai_error(error)))


CHATS = OpenAIDialect(ChatShape(), passing(chat_ask, untranslated.CHATS))
"""`/v1/chat/completions`."""

COMPLETIONS = OpenAIDialect(CompletionShape(), passing(completion_ask, untranslated.TEXTS))
"""`/v1/completions`."""
