"""The call of one line: asked as any client asks, yielding to all others, and collected whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from policies.errors import BackendFailed, ExpectedError
from policies.explain import Explanation
from policies.nouns import Delta, Usage
from policies.quota.budget import Standing
from router.ask import Ask
from router.batches.one_line import one_line
from router.call.bodies import Held
from router.call.caller import Placement
from router.protocols.dialect import Answer, Dialect, Head, decode, usage_sum
from router.protocols.status import status_of


class LineReply(NamedTuple):
    """What a line was answered: the HTTP status that its call would have had, the body as one line of JSON, and the
    tokens."""

    status: int
    body: bytes
    usage: Usage


class LineCall:
    """See Caller. `service_class` is the one that it counts in, and it does not go to backends in `avoiding`.
    `on_placed` gets the backend that it goes to, and `on_begun` is called when the first piece of its answer comes
    from there."""

    def __init__(
        self,
        id: str,  # noqa: A002 - it is the request's id
        raw: bytes,
        dialect: Dialect,
        *,
        headers: Mapping[str, str],
        created_s: int,
        service_class: str,
        avoiding: frozenset[str],
        on_placed: Callable[[str], None],
        on_begun: Callable[[], None],
    ) -> None:
        self.id, self._raw, self._dialect, self._created_s = id, raw, dialect, created_s
        self._headers = headers
        self.key: str | None = None
        self._service_class, self._avoiding = service_class, avoiding
        self._on_placed, self._on_begun = on_placed, on_begun
        self._has_begun = False
        self._ask: Ask | None = None
        self._answers: list[Answer] = []
        self._body = b""
        self._usages: dict[int, Usage] = {}

    def __repr__(self) -> str:
        return f"<LineCall {self.id}>"

    @property
    def trace(self) -> Mapping[str, str]:
        """It is part of no trace of its client."""
        return {}

    async def read(self, held: Held) -> Ask:
        """The line's body, parsed."""
        ask = self._ask = await held.parse(self._raw, self._parsed)
        self._answers = [Answer() for _ in range(len(ask.inputs) * ask.sampling.choices)]
        return ask

    def _parsed(self, raw: bytes) -> Ask:
        body = decode(raw)
        # each answer is collected whole
        body.pop("stream", None)
        body.pop("stream_options", None)
        ask = self._dialect.parse(body, self._headers)
        return replace(
            ask,
            priority=self._service_class,
            counted_as=self._service_class,
            avoiding=ask.avoiding | self._avoiding,
            yields=True,
            explain=False,
            stream=False,
        )

    def limited(self, standing: Standing) -> None:
        """Not reported."""

    def explain(self, index: int, explanation: Explanation) -> None:
        """Not explained."""

    def place(self, index: int, placement: Placement) -> None:
        """Begin the answer to prompt `index` anew: perhaps another backend was tried before."""
        choices = placement.request.sampling.choices
        self._answers[index * choices : (index + 1) * choices] = [Answer() for _ in range(choices)]
        self._body, self._has_begun = b"", False
        self._on_placed(placement.backend)

    def write(self, index: int, delta: Delta) -> None:
        """Collect one piece."""
        assert self._ask is not None
        if delta.computed_tokens is not None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._on_begun()
        if delta.usage is not None:
            self._usages[index] = delta.usage
        if delta.body is not None and self._dialect.passes_on and len(self._ask.inputs) == 1:
            self._body = delta.body
        else:
            self._answers[index * self._ask.sampling.choices + delta.choice].add(delta)

    def has_seen(self, index: int) -> bool:  # noqa: ARG002 - the client gets whole answers
        """Never: another backend may always try."""
        return False

    def reply(self) -> LineReply:
        """The whole answer. Raises BackendFailed if it is no JSON."""
        assert self._ask is not None
        usages = [*self._usages.values()]
        usage = usages[0] if len(usages) == 1 else usage_sum(usages)
        head = Head(self._dialect.prefix + self.id, self._created_s, self._ask.model)
        body = self._body or self._dialect.whole(head, self._ask, self._answers, usage)
        try:
            return LineReply(200, one_line(body), usage)
        except ValueError as error:
            raise BackendFailed(f"the answer is no JSON: {error}") from error

    def failure(self, error: ExpectedError) -> LineReply:
        """`error` as an answer."""
        failure = self._dialect.failure(error)
        return LineReply(status_of(error).http, one_line(failure.body), Usage())
