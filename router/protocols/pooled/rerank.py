"""Dialects that score documents and texts against a query: Jina's and Cohere's rerank, vLLM's score.

Source: vLLM documentation, "Pooling Models" (Re-rank API, Score API); Cohere API reference, "Rerank".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from backends.openai.pooled import RERANK_PATH, SCORE_PATH
from policies.errors import InvalidRequest
from policies.nouns import Capability
from router.ask import Ask
from router.protocols.dialect import converted
from router.protocols.pooled.dialect import MOST_TEXTS, PooledDialect, pooled_ask

_HINTS = {
    "model": "GET /v1/models lists the models",
    "query": "`query` is a text",
    "documents": f"`documents` is a list of at most {MOST_TEXTS} texts",
}
_ELSEWHERE = "see the server's API reference for this field"
_TEXTS = ("text_1", "text_2", "queries", "documents", "data_1", "data_2", "query", "items")
"""Fields of a body of /v1/score with texts, by the names of all versions."""

_NEEDS = frozenset({Capability.RERANK})


class RerankBody(msgspec.Struct, kw_only=True):
    """`POST /v1/rerank`. Documents may be objects with a `text`, or anything else that the server accepts."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    query: Annotated[str, Meta(min_length=1)] | dict[str, Any]
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=MOST_TEXTS)] | dict[str, Any]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    """`POST /v1/score`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]


def rerank_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a body of /v1/rerank. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, RerankBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    measured = _texts_in([fields.query, fields.documents])
    return pooled_ask(body, headers, path=RERANK_PATH, model=fields.model, measured=measured, needs=_NEEDS)


def score_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a body of /v1/score. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, ScoreBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    measured = _texts_in([body.get(name) for name in _TEXTS])
    if not measured:
        hint = "send `text_1` and `text_2`, or `queries` and `documents`"
        raise InvalidRequest("there is nothing to score", hint=hint, param="text_1")
    return pooled_ask(body, headers, path=SCORE_PATH, model=fields.model, measured=measured, needs=_NEEDS)


def _texts_in(value: Any) -> str:
    """All texts in `value`, however deep, a line each."""
    texts, rest = [], [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str) and item:
            texts.append(item)
        elif isinstance(item, list | dict):
            # popped from the end, so the first item comes next
            rest.extend(reversed(list(item.values()) if isinstance(item, dict) else item))
    return "\n".join(texts)


RERANK = PooledDialect("rerank-", rerank_ask)
"""`/v1/rerank`."""

SCORE = PooledDialect("score-", score_ask)
"""`/v1/score`."""
