"""The Protocol of one HTTP endpoint's format: parses bodies, renders answers and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from policies.errors import ExpectedError
from policies.nouns import Delta, Usage
from router.ask import Ask
from router.protocols.answer import Answer, Head


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
    """One endpoint, the same for all calls. `prefix` begins the ids of its answers."""

    prefix: str

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. `headers` have lower-case names. Raises InvalidRequest."""
        ...

    def stream(self, head: Head, ask: Ask) -> Stream:
        """A renderer for the streamed answer to `ask`."""
        ...

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON body of the answer to `ask`, if that is not streamed."""
        ...

    def failure(self, error: ExpectedError) -> Failure:
        """The reply to a call that failed before any part of its answer was sent."""
        ...


def comment(text: str) -> bytes:
    """`text` as a comment of server-sent events, which clients skip (WHATWG HTML, section 9.2)."""
    return f": {text}\n\n".encode()
