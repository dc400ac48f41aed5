"""MLC LLM's server (`mlc_llm serve`).

It uses `user` as the id of the request, so two requests of one user would collide in the engine; `user` is not
sent. Its errors are JSON text inside of JSON. Its metrics are not read. A closed connection stops generation.

Source: MLC LLM's main branch, python/mlc_llm/serve/entrypoints/openai_entrypoints.py and
python/mlc_llm/protocol/openai_api_protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.http.errors import error_of
from backends.http.exchange import Exchange
from backends.http.lenient_json import read_json
from backends.http.unsupported import refuse_unsupported
from backends.openai.answer_schema import schema_in
from backends.openai.compatible import RARE, OpenAICompatible
from policies.errors import ContextExceeded, ExpectedError, InvalidRequest
from policies.nouns import DIALECTS, Capability, Prompt, Request

_KNOWS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_logprobs", "logit_bias"),
    *("choices", "grammar"),
)
_TOO_LONG = "larger than the model input length limit"


class MLC(OpenAICompatible):
    """A server at `url`."""

    kind = "mlc"
    # what goes there depends on the client's body
    own_paths = frozenset()
    capabilities = OpenAICompatible.capabilities - {Capability.EMBEDDINGS, Capability.RERANK} - RARE - DIALECTS

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body in MLC's spelling. Raises InvalidRequest for what MLC would skip or cannot read."""
        return self._openai_exchange(request, prompt, own_fields(request, prompt.body or {}))

    @staticmethod
    def _error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
        """As OpenAI's, unwrapped."""
        try:
            inner = read_json(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            inner = None
        error = error_of(backend, status, inner.encode() if isinstance(inner, str) else body, headers)
        return ContextExceeded(error.message) if _TOO_LONG in error.message else error


def own_fields(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """The replacements of the client's fields; None: the field is left out. Raises InvalidRequest."""
    refuse_unsupported(request.sampling, _KNOWS, "MLC LLM")
    if any(message.get("tool_calls") for message in body.get("messages") or ()):
        hint = "ask a backend of another kind"
        raise InvalidRequest("MLC LLM reads no tool calls of earlier turns", hint=hint, param="messages")
    own: dict[str, Any] = {"user": None, "debug_config": None, "max_completion_tokens": None}
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None:
        own["max_tokens"] = most
    shape = body.get("response_format")
    if isinstance(shape, Mapping) and shape.get("type") in ("json_object", "json_schema"):
        schema = schema_in(shape)
        if schema is not None or shape["type"] == "json_schema":
            own["response_format"] = {"type": "json_object", "schema": json.dumps(schema or {})}
    return own
