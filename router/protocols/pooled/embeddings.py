"""OpenAI's embeddings API as a dialect.

Source: OpenAI API reference, "Embeddings".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from backends.openai.pooled import EMBEDDINGS_PATH
from policies.errors import InvalidRequest
from policies.nouns import Capability
from router.ask import Ask, Input
from router.protocols.dialect import converted
from router.protocols.pooled.dialect import MOST_TEXTS, PooledDialect, pooled_ask
from router.text.token_ids import pack

_INPUT = "a text, a list of texts, a list of token ids, or a list of such lists"
_HINTS = {"model": "GET /v1/models lists the models", "input": _INPUT, "encoding_format": "'float' or 'base64'"}
_ELSEWHERE = "see OpenAI's API reference for this field"


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


def embeddings_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a body of /v1/embeddings. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, EmbeddingsBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    measured = _measured(fields.input)
    needs = {Capability.EMBEDDINGS} | ({Capability.TOKEN_IDS} if isinstance(measured, bytes) else set())
    return pooled_ask(
        body, headers, path=EMBEDDINGS_PATH, model=fields.model, measured=measured, needs=frozenset(needs)
    )


def _measured(given: str | Sequence[Any]) -> Input:
    """All of `given` as one input, to measure the call; the backend gets the original body."""
    if isinstance(given, str):
        return _checked(given)
    kinds = set(map(type, given))
    if len(given) > MOST_TEXTS and kinds != {int}:
        hint = f"send at most {MOST_TEXTS} in one request"
        raise InvalidRequest(f"input: {len(given)} texts are too many", hint=hint, param="input")
    if kinds == {str}:
        return _checked("\n".join(given))
    ids: list[Any] = list(given) if kinds == {int} else [id_ for ids in given if isinstance(ids, list) for id_ in ids]
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


EMBEDDINGS = PooledDialect("embd-", embeddings_ask)
"""`/v1/embeddings`."""
