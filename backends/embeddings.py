"""Embeddings over OpenAI's dialect: what is sent, and the one reply that is read whole. Pure but for its own memory.

Source: OpenAI API reference, "Embeddings".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from backends.http import Post, encoded
from backends.nonsense import MISSHAPEN
from backends.openai_chunks import usage_of
from backends.whole_body import WholeBody
from policies.errors import BackendFailed
from policies.nouns import Delta, Usage

EMBEDDINGS_PATH = "/v1/embeddings"


def embeddings_post(body: Mapping[str, Any], model: str, *, without: Collection[str] = ()) -> Post:
    """The client's own `body` to `model`, but for fields that are not the client's to say."""
    sent = {name: value for name, value in body.items() if name not in without}
    return Post(EMBEDDINGS_PATH, encoded({**sent, "model": model}), is_streamed=False)


class EmbeddingsAnswer(WholeBody):
    """Fed with the body of a 200: one JSON object, passed on as it is, then its usage.

    Where the server tells no usage, the prompt's tokens are `prompt_tokens`.
    """

    def __init__(self, backend: str, *, prompt_tokens: int, limit_bytes: int = 256 << 20) -> None:
        super().__init__(backend, limit_bytes=limit_bytes)
        self._prompt_tokens = prompt_tokens

    def _read(self, whole: bytes) -> list[Delta]:
        """The reply and its usage."""
        try:
            # numbers stay text: a reply may have millions, and only their reader needs them
            reply = msgspec.json.decode(whole, type=dict[str, msgspec.Raw])
            usage = usage_of(msgspec.json.decode(reply["usage"])) if "usage" in reply else None
            msgspec.json.decode(reply["data"], type=list[msgspec.Raw])
        except MISSHAPEN as error:
            raise BackendFailed(f"{self._backend} answered nonsense instead of embeddings") from error
        return [Delta(body=whole, usage=usage or Usage(self._prompt_tokens))]
