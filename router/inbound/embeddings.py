"""OpenAI's embeddings API as a dialect: one call is one Request, however many texts it holds, and is answered whole.

Source: OpenAI API reference, "Embeddings".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from backends.embeddings import EMBEDDINGS_PATH
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from policies.nouns import Capability, Usage
from router.ask import Ask, Input
from router.inbound.answer import Answer, Head
from router.inbound.dialect import Failure
from router.inbound.openai_dialect import openai_failure
from router.inbound.reading import converted
from router.token_ids import pack

MOST_TEXTS = 2048

_INPUT = "a text, a list of texts, a list of token ids, or a list of such lists"
_HINTS = {"model": "GET /v1/models lists the models", "input": _INPUT, "encoding_format": "'float' or 'base64'"}
_ELSEWHERE = "see OpenAI's API reference for this field"


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class EmbeddingsDialect:
    """`/v1/embeddings`."""

    prefix = "embd-"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """What `body` asks for. Raises InvalidRequest."""
        return embeddings_ask(body, headers)

    def stream(self, head: Head, ask: Ask) -> NoReturn:
        """Never: an Ask for embeddings is not streamed."""
        raise NotImplementedError

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:  # noqa: ARG002 - it is in the body
        """The backend's own reply, under the name that the client knows the model by."""
        (answer,) = answers
        if not answer.body:
            raise BackendFailed("the backend answered without embeddings")
        reply = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**reply, "model": head.model})

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        return openai_failure(error)


def embeddings_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """What a body of /v1/embeddings asks for. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, EmbeddingsBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    measured = _measured(fields.input)
    needs = {Capability.EMBEDDINGS} | ({Capability.TOKEN_IDS} if isinstance(measured, bytes) else set())
    return Ask(
        model=fields.model,
        inputs=(measured,),
        bodies=(body,),
        path=EMBEDDINGS_PATH,
        # nothing is drawn; one is the least that a plan knows
        max_new_tokens=1,
        needs=frozenset(needs),
        priority=headers.get("x-pointsman-priority") or None,
        session=headers.get("x-pointsman-session") or None,
        explain=headers.get("x-pointsman-explain") == "1",
        headers=headers,
    )


def _measured(given: str | Sequence[Any]) -> Input:
    """All of `given` as one input, by which the call is measured; the body that is sent keeps what came."""
    if isinstance(given, str):
        return _checked(given)
    kinds = set(map(type, given))
    if len(given) > MOST_TEXTS and kinds != {int}:
        hint = f"send at most {MOST_TEXTS} in one request"
        raise InvalidRequest(f"input: {len(given)} texts are too many", hint=hint, param="input")
    if kinds == {str}:
        return _checked("\n".join(given))
    ids: list[Any] = list(given) if kinds == {int} else [one for ids in given if isinstance(ids, list) for one in ids]
    if kinds not in ({int}, {list}) or set(map(type, ids)) != {int}:
        raise InvalidRequest("input: neither texts nor token ids", hint=_INPUT, param="input")
    try:
        return pack(ids)
    except OverflowError:
        raise InvalidRequest("input: a token id is out of range", hint="ids start at 0", param="input") from None


def _checked(text: str) -> str:
    if not text:
        raise InvalidRequest("input: there is no text", hint=_INPUT, param="input")
    return text
