"""Embeddings over OpenAI's dialect: what is sent, and the one reply that is read whole. Pure but for its own memory.

Source: OpenAI API reference, "Embeddings".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from backends.http import Post, encoded
from backends.openai_chunks import usage_of
from policies.errors import BackendFailed
from policies.nouns import Delta, Usage

EMBEDDINGS_PATH = "/v1/embeddings"


def embeddings_post(body: Mapping[str, Any], model: str, *, without: Collection[str] = ()) -> Post:
    """The client's own `body` to `model`, but for fields that are not the client's to say."""
    sent = {name: value for name, value in body.items() if name not in without}
    return Post(EMBEDDINGS_PATH, encoded({**sent, "model": model}), is_streamed=False)


class EmbeddingsAnswer:
    """Fed with the body of a 200: one JSON object of at most `limit_bytes`, passed on as it is, then its usage.

    Where the server tells no usage, the prompt's tokens are `prompt_tokens`.
    """

    def __init__(self, backend: str, *, prompt_tokens: int, limit_bytes: int = 256 << 20) -> None:
        self.is_over = False
        self._backend, self._prompt_tokens, self._limit_bytes = backend, prompt_tokens, limit_bytes
        self._whole = bytearray()

    def __repr__(self) -> str:
        return f"<EmbeddingsAnswer of {self._backend}: {len(self._whole)} bytes>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Nothing yet. Raises BackendFailed if the reply is too long."""
        self._whole += data
        if len(self._whole) > self._limit_bytes:
            raise BackendFailed(f"{self._backend} answered more than {self._limit_bytes} bytes")
        return iter(())

    def end(self) -> Iterator[Delta]:
        """The reply and its usage. Raises BackendFailed at nonsense."""
        try:
            # numbers stay text: a reply may have millions, and only their reader needs them
            reply = msgspec.json.decode(self._whole, type=dict[str, msgspec.Raw])
            usage = usage_of(msgspec.json.decode(reply["usage"])) if "usage" in reply else None
            msgspec.json.decode(reply["data"], type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self._backend} answered nonsense instead of embeddings") from error
        self.is_over = True
        yield Delta(body=bytes(self._whole), usage=usage or Usage(self._prompt_tokens))
