"""Dialects of calls without generated tokens: one call is one Request, however many texts it has, answered whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from backends.http.lenient_json import read_json
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Capability, Usage
from router.ask import Ask, Input
from router.protocols.dialect import Answer, Failure, Head
from router.protocols.openai.dialect import openai_failure

MOST_TEXTS = 2048


class PooledDialect:
    """One endpoint: `read` makes an Ask of a body; the answer is the backend's, by the client's name of the model."""

    passes_on = False

    def __init__(self, prefix: str, read: Callable[[Mapping[str, Any], Mapping[str, str]], Ask]) -> None:
        self.prefix, self._read = prefix, read

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. Raises InvalidRequest."""
        return self._read(body, headers)

    def stream(self, head: Head, ask: Ask) -> NoReturn:
        """Never called: such an Ask is not streamed."""
        raise NotImplementedError

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:  # noqa: ARG002 - it is in the body
        """The backend's own reply, with the model's name for the client."""
        (answer,) = answers
        if not answer.body:
            raise BackendFailed("the backend generated tokens for a call without any")
        reply = read_json(answer.body, dict[str, msgspec.Raw])
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
    """An Ask of `path` for the original `body`, measured by `measured`."""
    return Ask(
        model=model,
        inputs=(measured,),
        bodies=(body,),
        path=path,
        # no token is generated; 1 is the least that a plan allows
        max_new_tokens=1,
        needs=needs,
        priority=headers.get("x-pointsman-priority") or None,
        session=headers.get("x-pointsman-session") or None,
        explain=headers.get("x-pointsman-explain") == "1",
        headers=headers,
    )
