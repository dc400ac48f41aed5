"""TabbyAPI, the server of ExLlamaV2 and V3. Written for its main branch of 2025 and 2026.

A client's OpenAI body goes unchanged, TabbyAPI's own samplers included; fields that it would ignore are refused by
name. It has one model at a time, and with an admin key loads any model that a request names: requests from here always
name the loaded model, so that no client can swap it. It takes text only; a prompt of token ids is turned into text by
its own tokenizer, and sent only if that text has exactly these ids. A closed connection stops generation. Its only
load report is the number of running requests. Tenants share its cache.

Source: TabbyAPI's OpenAPI documentation and wiki ("Usage", "Server options"); its `/v1/model`, `/v1/token/*`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from backends.base import Load
from backends.http.errors import error_of
from backends.http.exchange import Exchange, Post, decoded, encoded
from backends.http.unsupported import refuse_unsupported
from backends.openai.compatible import RARE, OpenAICompatible
from backends.openai.prompt import completion_of
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from policies.nouns import DIALECTS, Delta, Prompt, Request, Sampling
from shards.wire.translate import unpack_ids

_TEXT_PATH = "/v1/completions"
_KNOWN = tuple(name for name in Sampling.__struct_fields__ if name != "seed")
_PASSED_OVER = ("suffix", "best_of")


class Tabby(OpenAICompatible):
    """A TabbyAPI server at `url`."""

    kind = "tabby"
    capabilities = OpenAICompatible.capabilities - RARE - DIALECTS
    # the posted path depends on the client's body
    own_paths = frozenset()
    _loaded: str | None = None

    async def probe(self) -> None:
        """Learn the loaded model and its context; raises BackendFailed if none is loaded, or if it is ill."""
        await self._check_health()
        card = decoded(await self.client.get("/v1/model"), self.name, "which model is loaded")
        try:
            self._loaded = str(card["id"])
            parameters = card.get("parameters") or {}
            self._context_tokens = self._options.context_tokens or parameters.get("max_seq_len")
            self._loads = (Load(max_requests=parameters.get("max_batch_size")),)
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked which model is loaded") from error
        self._served = self._options.served or frozenset({self._loaded})

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body with the loaded model's name. Raises InvalidRequest for fields that it would ignore."""
        refuse_unsupported(request.sampling, _KNOWN, "TabbyAPI")
        body = prompt.body or {}
        for name in _PASSED_OVER:
            if body.get(name):
                raise InvalidRequest(f"TabbyAPI does not know `{name}`", hint=f"leave `{name}` out", param=name)
        return self._openai_exchange(request, prompt, self._own_of(request, body))

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the answer; closing the iterator closes the connection. Raises as those of other kinds do."""
        ids = _token_ids(prompt)
        if ids is not None:
            prompt = await self._as_text(request, prompt, ids)
        stream = self.client.stream(self._made(request, prompt), prompt.headers, request.deadline_s)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    @staticmethod
    def _error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
        """As OpenAI's; a model that is not loaded is 400 here."""
        error = error_of(backend, status, body, headers)
        if isinstance(error, InvalidRequest) and "currently loaded" in error.message:
            return BackendFailed(f"{backend} has no model: {error.message}")
        return error

    def _own_of(self, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
        sampling = request.sampling
        own: dict[str, Any] = {"model": self._loaded or self._backends_name(request)}
        if sampling.stop_token_ids:
            # a stop that is a number is an id in TabbyAPI
            own |= {"stop_token_ids": None, "stop": [*sampling.stop, *sampling.stop_token_ids]}
        shape = body.get("response_format")
        if isinstance(shape, Mapping) and shape.get("type") == "json_object":
            own["response_format"] = {"type": "json"}
        return own

    async def _as_text(self, request: Request, prompt: Prompt, ids: list[int]) -> Prompt:
        """A prompt of text that the server tokenizes to `ids`. Raises InvalidRequest if there is none."""
        asked = Post("/v1/token/decode", encoded({"tokens": ids, "decode_special_tokens": True}))
        text = await self._field(asked, "text")
        asked = Post("/v1/token/encode", encoded({"text": text, "add_bos_token": False, "encode_special_tokens": True}))
        if await self._field(asked, "tokens") != ids:
            hint = "send text"
            raise InvalidRequest("TabbyAPI takes text, and no text is these token ids", hint=hint, param="prompt")
        body = prompt.body or completion_of(request, prompt.token_ids)
        return replace(prompt, body={**body, "prompt": text, "add_bos_token": False}, path=_TEXT_PATH, native=None)

    async def _field(self, post: Post, name: str) -> Any:
        page = await self.client.ask(post)
        if 400 <= page.status < 500:
            raise self._error_of(self.name, page.status, page.body, {})
        reply = decoded(page, self.name, f"the {name} of a prompt")
        if not isinstance(reply, dict) or name not in reply:
            raise BackendFailed(f"{self.name} answered nonsense when asked for the {name} of a prompt")
        return reply[name]


def _token_ids(prompt: Prompt) -> list[int] | None:
    """The prompt's ids; None if it has text."""
    if prompt.body is None:
        return list(unpack_ids(prompt.token_ids)) if prompt.token_ids else None
    ids = prompt.body.get("prompt")
    return ids if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids) else None
