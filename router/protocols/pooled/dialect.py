"""Calls that draw nothing as dialects: one call is one Request, however many texts it holds, and is answered whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Capability, Usage
from router.ask import Ask, Input
from router.protocols.answer import Answer, Head
from router.protocols.dialect import Failure
from router.protocols.openai.dialect import openai_failure

MOST_TEXTS = 2048


class PooledDialect:
    """One endpoint: `read` makes an Ask of its bodies; its answers are the backend's own."""

    def __init__(self, prefix: str, read: Callable[[Mapping[str, Any], Mapping[str, str]], Ask]) -> None:
        self.prefix, self._read = prefix, read

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """What `body` asks for. Raises InvalidRequest."""
        return self._read(body, headers)

    def stream(self, head: Head, ask: Ask) -> NoReturn:
        """Never: such an Ask is not streamed."""
        raise NotImplementedError

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:  # noqa: ARG002 - it is in the body
        """The backend's own reply, under the name that the client knows the model by."""
        (answer,) = answers
        if not answer.body:
            raise BackendFailed("the backend drew tokens where none were asked for")
        reply = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**reply, "model": head.model})

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        return openai_failure(error)


def pooled_ask(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    path: str,
    model: str,
    measured: Input,
    needs: frozenset[Capability],
) -> Ask:
    """An Ask of `path` for `body` as it came, measured by `measured`."""
    return Ask(
        model=model,
        inputs=(measured,),
        bodies=(body,),
        path=path,
        # nothing is drawn; one is the least that a plan knows
        max_new_tokens=1,
        needs=needs,
        priority=headers.get("x-pointsman-priority") or None,
        session=headers.get("x-pointsman-session") or None,
        explain=headers.get("x-pointsman-explain") == "1",
        headers=headers,
    )
