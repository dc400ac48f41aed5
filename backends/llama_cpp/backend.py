"""llama.cpp's `llama-server`, builds from b8000 on (2026), and llama-cpp-python's server with fewer features.

A client's OpenAI body goes unchanged to `/v1/...`. Without a body, token ids go to the native `/completion`, which
takes and returns ids and reports the progress of the prompt and the tokens that the slot had kept. Only the router may
set `id_slot`, because a client could take another's slot with it. There is no salt: tenants share what slots keep. A
closed connection frees the slot. A server with neither `/props` nor `/completion`, as llama-cpp-python's, gets OpenAI's
dialect only.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from backends.base import Load, Tokenized
from backends.http.backend import ids_in
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.http.prometheus_text import Metrics, whole
from backends.http.unsupported import refuse_unsupported
from backends.llama_cpp.answer import LlamaCppAnswer
from backends.messages.answer import MESSAGES_PATH
from backends.nesting import decode_page
from backends.openai.compatible import OpenAICompatible
from backends.openai.endpoints import Endpoints
from backends.openai.responses import RESPONSES_PATH
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Capability, Prompt, Request, Sampling
from shards.wire.translate import unpack_ids

_RUNNING, _WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
_UNKNOWN = ("min_new_tokens", "stop_token_ids", "choices")
_KNOWN = tuple(name for name in Sampling.__struct_fields__ if name not in _UNKNOWN)


class LlamaCpp(OpenAICompatible):
    """A llama-server at `url`, with one model; its slots answer in parallel."""

    kind = "llama_cpp"
    # with several choices it reports the tokens of one only
    capabilities = frozenset(
        {Capability.TOKEN_IDS, Capability.LOGPROBS, Capability.STRUCTURED_OUTPUT, Capability.MEDIA}
        | {Capability.CHATS, Capability.TEXTS}
    )

    def __init__(
        self,
        name: str,
        url: str,
        *,
        pool: str,
        options: HttpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, url, pool=pool, options=options, clock=clock)
        self._is_native = True

    async def probe(self) -> None:
        """Learn model, slots and load; raises BackendFailed if it is ill or still loads its model."""
        page = await self.client.get("/health")
        # llama-cpp-python has none
        if page.status not in (200, 404):
            raise BackendFailed(f"{self.name} is not well: /health answered {page.status}")
        await self._learn_models()
        await self._learn_settings()
        if not self._is_native:
            return
        await self._take_report("/metrics", self._metrics_load)
        if self._loads[0].reported_at is None:
            # it was started without --metrics
            await self._take_report("/slots", load_of_slots)

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body, or else its token ids for the native API. Raises InvalidRequest for unknown fields."""
        refuse_unsupported(request.sampling, _KNOWN, "llama.cpp")
        if prompt.body is not None or not prompt.token_ids:
            return super().exchange(request, prompt)
        if not self._is_native:
            raise InvalidRequest("this server takes text, and the request has token ids only", param="prompt")
        wants_tops = bool(request.sampling.top_logprobs)
        answer = LlamaCppAnswer(self.name, wants_tops=wants_tops)
        return Exchange(Post("/completion", encoded(completion_body(request, prompt.token_ids))), answer)

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:  # noqa: ARG002 - it has one
        """See TextReader. Special tokens are put around every prompt, also around one that a template made."""
        if not self._is_native:
            return None
        text = body.get("prompt")
        if "messages" in body:
            text = (await self._asked("/apply-template", body)).get("prompt")
        wants_texts = bool(body.get("return_token_strs"))
        asked = {"content": text, "add_special": True, "parse_special": True, "with_pieces": wants_texts}
        tokens = (await self._asked("/tokenize", asked)).get("tokens")
        if not wants_texts or not isinstance(tokens, list):
            return Tokenized(ids_in(tokens, self.name))
        pieces = [piece if isinstance(piece, dict) else {} for piece in tokens]
        # a piece that is not text comes as its bytes
        texts = [piece.get("piece") for piece in pieces]
        strings = [text if isinstance(text, str) else bytes(text or ()).decode(errors="replace") for text in texts]
        return Tokenized(ids_in([piece.get("id") for piece in pieces], self.name), strings)

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:  # noqa: ARG002
        if not self._is_native:
            return None
        return str((await self._asked("/detokenize", {"tokens": list(token_ids)})).get("content"))

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        penalty = request.sampling.repetition_penalty
        respelt = {} if penalty == 1 else {"repetition_penalty": None, "repeat_penalty": penalty}
        return {"id_slot": None, **respelt}

    async def _learn_endpoints(self) -> Endpoints:
        """It has no OpenAPI document: a missing endpoint answers 404."""
        found = []
        for path in (MESSAGES_PATH, RESPONSES_PATH):
            with suppress(BackendFailed):
                if (await self.client.ask(Post(path, b"{}"))).status in (400, 500):
                    found.append(path)
        return dict.fromkeys(found, frozenset[str]())

    async def _learn_settings(self) -> None:
        page = await self.client.get("/props")
        self._is_native = page.status != 404
        if not self._is_native:
            return
        props = decoded(page, self.name, "its settings")
        try:
            self._slots = int(props["total_slots"])
            self._context_tokens = self._options.context_tokens or int(props["default_generation_settings"]["n_ctx"])
        except (KeyError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its settings") from error

    @staticmethod
    def _metrics_load(page: bytes, asked_at: float) -> Load:
        metrics = Metrics(page, (_RUNNING, _WAITING))
        running, waiting = metrics.total(_RUNNING), metrics.total(_WAITING)
        return Load(running=whole(running), waiting=whole(waiting), reported_at=asked_at)


def completion_body(request: Request, token_ids: bytes) -> dict[str, Any]:
    """The body of `/completion`: llama.cpp's names for the client's fields, and its filters off unless requested."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(unpack_ids(token_ids)),
        "n_predict": request.max_new_tokens,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.top_logprobs is not None:
        # the drawn token's own probability comes with at least one alternative
        body["n_probs"] = max(1, sampling.top_logprobs)
    return body


def load_of_slots(page: bytes, asked_at: float) -> Load:
    """The number of busy slots in `/slots`. Raises BackendFailed for an invalid page."""
    try:
        slots = decode_page(page)
        return Load(
            running=sum(bool(slot["is_processing"]) for slot in slots), max_requests=len(slots), reported_at=asked_at
        )
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BackendFailed("the slots are nonsense") from error
