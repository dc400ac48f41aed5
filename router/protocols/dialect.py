"""The Protocol of one HTTP endpoint's format: parses bodies, renders errors and answers, which are collected here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

import msgspec

from backends.openai.gathered import merge_message
from policies.errors import ExpectedError
from policies.nouns import Delta, TokenLogprob, Usage
from router.ask import Ask

_REASONING = ("reasoning_content", "reasoning")
"""Names of the model's reasoning at servers of open models; older and newer vLLM, for two."""


class Head(msgspec.Struct, frozen=True):
    """The fields that all pieces of one answer repeat. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str


class Answer(msgspec.Struct):
    """One choice of a whole answer, while its Deltas arrive."""

    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    message: dict[str, Any] = {}
    finish_reason: str | None = None
    stop: str | None = None
    body: bytes = b""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Add one piece."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop = delta.stop or self.stop
        self.body = delta.body or self.body
        if delta.message:
            merge_message(self.message, delta.message)


def usage_sum(usages: Iterable[Usage]) -> Usage:
    """The usage of all prompts of a call together."""
    each = list(usages)
    return reduce(Usage.and_, each) if each else Usage()


def refusal_in(message: Mapping[str, Any]) -> str:
    """The text of a refusal in a message or a piece of one; OpenAI's models keep it apart from the answer's text."""
    return str(message.get("refusal") or "")


def thought_in(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or a piece of one."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")


class Failure(NamedTuple):
    """An error as a reply: HTTP status and JSON body."""

    status: int
    body: bytes


class Stream(Protocol):
    """Renders one streamed answer as server-sent events. Pure but for its own memory."""

    def begin(self, prompt_tokens: int) -> None:
        """A prompt of `prompt_tokens` goes to a backend; called again if another one is tried."""
        ...

    def resume(self, raw: bytes, characters: int) -> None:
        """Another backend continues the answer, of which the client has so many `characters`.

        `raw` are the newest of the first backend's own events; empty if all events were rendered here.
        """
        ...

    def progress(self, comment: str) -> bytes:
        """Bytes that keep the connection alive during prefill. Another backend may still be tried after them."""
        ...

    def render(self, index: int, delta: Delta) -> bytes:
        """The events for one piece of choice `index`; empty if it has nothing for the client."""
        ...

    def merge(self, first: int, raw: bytes) -> bytes:
        """A backend's own events for one of several prompts; its first choice gets number `first`."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events that end the stream."""
        ...

    def fail(self, error: ExpectedError) -> bytes:
        """The events that end the stream with `error`."""
        ...


class Dialect(Protocol):
    """One endpoint, the same for all calls. `prefix` begins the ids of its answers. `passes_on`: the body of a backend
    that speaks it is the answer to a call of one prompt, as it is.
    """

    prefix: str
    passes_on: bool

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. `headers` have lower-case names. Raises InvalidRequest."""
        ...

    def stream(self, head: Head, ask: Ask) -> Stream:
        """A renderer for the streamed answer to `ask`."""
        ...

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON body of the answer to `ask`, if that is not streamed and no body was passed on."""
        ...

    def failure(self, error: ExpectedError) -> Failure:
        """The reply to a call that failed before any part of its answer was sent."""
        ...


def comment(text: str) -> bytes:
    """`text` as a comment of server-sent events, which clients skip (WHATWG HTML, section 9.2)."""
    return f": {text}\n\n".encode()
