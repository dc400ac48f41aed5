"""One exchange with a server over HTTP: the post, the reader of the reply, and the options of all exchanges. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from backends.http.errors import error_of
from backends.http.lenient_json import read_json
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from policies.nouns import Delta
from tls.certificates import Certificates


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to talk to a server.

    `models` maps clients' names of models to the server's; `served` are the names that it serves, if it should not be
    asked. `max_requests` and `context_tokens` stand in for what the server does not report. `idle_s` is the
    longest silence in an answer. `tls` has certificates for an https:// address; None: the system's authorities.
    `of_file` gives the secrets of the SLA file in force, which no error of a server may show.
    """

    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] = field(default_factory=dict)
    served: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    max_requests: int | None = None
    context_tokens: int | None = None
    connect_s: float = 5.0
    idle_s: float = 600.0
    probe_s: float = 5.0
    tls: Certificates | None = None
    of_file: Callable[[], frozenset[str]] = field(default=frozenset, repr=False)


class Post(NamedTuple):
    """Path and body of a post, and whether the answer will be streamed."""

    path: str
    content: bytes
    is_streamed: bool = True


class Answer(Protocol):
    """Reads one reply as it comes: fed with the bytes of its body, gives Deltas. Pure but for its own memory."""

    @property
    def is_over(self) -> bool:
        """The answer is complete, even if the body goes on."""
        ...

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error that a body may contain."""
        ...

    def end(self) -> Iterator[Delta]:
        """The Deltas of the end of the body. Raises BackendFailed if it came too early."""
        ...


class WholeBody(msgspec.Struct):
    """Reads one reply in one piece, of at most `limit_bytes`, once all of it came. Pure."""

    limit_bytes: ClassVar[int] = 64 << 20

    def read(self, whole: bytes) -> list[Delta]:
        """The answer and its usage. Raises BackendFailed at nonsense, and the error in the body."""
        raise NotImplementedError


ErrorOf = Callable[[str, int, bytes, Mapping[str, str]], ExpectedError]
"""(backend, status, body, headers) -> the error of a reply other than 200."""


class Exchange(NamedTuple):
    """One generation over HTTP: the `post`, the reader of the reply, and the meaning of its errors.

    `abort` is sent if the answer is left before it is over, for servers that a closed connection does not stop. The
    server may be silent for `quiet_s` longer than for other answers.
    """

    post: Post
    answer: Answer | WholeBody
    error_of: ErrorOf = error_of
    abort: Post | None = None
    quiet_s: float = 0.0


class Page(NamedTuple):
    """A small reply, read whole."""

    status: int
    body: bytes


def encoded(body: object) -> bytes:
    """`body` as JSON. Raises InvalidRequest if the client put something into it that JSON cannot say."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def decoded(page: Page, name: str, what: str) -> Any:
    """The JSON of a 200. Raises BackendFailed for any other reply, with `what` as the subject of the question."""
    if page.status != 200:
        raise BackendFailed(f"{name} answered {page.status} when asked for {what}")
    try:
        return read_json(page.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendFailed(f"{name} answered nonsense when asked for {what}") from error
