"""Calls without decoding, over OpenAI's dialect and its extensions: embeddings, reranking, scores.

The request, and the one reply that is read whole. Pure but for its own memory.

Source: OpenAI API reference, "Embeddings"; vLLM documentation, "Pooling Models" (Re-rank API, Score API).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from backends.http.errors import error_in_stream
from backends.http.exchange import Post, WholeBody, encoded
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, reported_usage
from policies.errors import BackendErred
from policies.nouns import Delta, Usage

EMBEDDINGS_PATH = "/v1/embeddings"
RERANK_PATH = "/v1/rerank"
SCORE_PATH = "/v1/score"

POOLED: Mapping[str, str] = {EMBEDDINGS_PATH: "data", RERANK_PATH: "results", SCORE_PATH: "data"}
"""Path -> the list in a reply to it."""

WHOLE_BYTES = 16 << 20
"""Of a larger reply only what stands around its list is read: the rest takes 3 ms for each MB in one turn."""

_EDGE_BYTES = 64 << 10


def pooled_post(path: str, body: Mapping[str, Any], model: str, *, without: Collection[str] = ()) -> Post:
    """The client's own `body` to `model`, but for fields that are not the client's to say."""
    sent = {name: value for name, value in body.items() if name not in without}
    return Post(path, encoded({**sent, "model": model}), is_streamed=False)


class PooledAnswer(WholeBody):
    """Reads the body of a 200 of `path`: one JSON object, passed on as it is, with its usage.

    Where the server tells no usage, the prompt's tokens are `prompt_tokens`.
    """

    limit_bytes = 256 << 20
    backend: str
    path: str
    prompt_tokens: int

    def read(self, whole: bytes) -> list[Delta]:
        """The reply and its usage. Raises BackendErred at nonsense, and the error in the body."""
        try:
            # numbers stay text: a reply may have millions, and only their reader needs them
            read = whole if len(whole) <= WHOLE_BYTES else _around_list(whole, POOLED[self.path])
            reply = read_json(read, dict[str, msgspec.Raw])
            told = {name: read_json(reply[name]) for name in ("error", "object", "usage") if name in reply}
            if told.get("error") or told.get("object") == "error":
                raise error_in_stream(self.backend, told.get("error") or read_json(read))
            usage = _usage(told.get("usage"))
            if bytes(reply[POOLED[self.path]])[:1] != b"[":
                raise TypeError("it has no list")
        except MISSHAPEN as error:
            raise BackendErred(f"{self.backend} answered nonsense instead of `{POOLED[self.path]}`") from error
        return [Delta(body=whole, usage=usage or Usage(self.prompt_tokens, is_guess=True))]


def _around_list(whole: bytes, name: str) -> bytes:
    """The reply `whole` with the list `name` empty. Raises ValueError if no such list begins near its beginning, or the
    last one does not end near its end."""
    begins = re.search(rb'"%b"\s*:\s*\[' % name.encode(), whole[:_EDGE_BYTES])
    ends = whole.rfind(b"]", -_EDGE_BYTES)
    if begins is None or ends < 0:
        raise ValueError("it has no list")
    return whole[: begins.end()] + whole[ends:]


def _usage(usage: Any) -> Usage | None:
    """None where that cannot be read. Servers may report only the total for such calls."""
    try:
        found = reported_usage(usage.get("prompt_tokens", usage.get("total_tokens")), 0)
    except MISSHAPEN:
        return None
    return None if found.is_guess else found
