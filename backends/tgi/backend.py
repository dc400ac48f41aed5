"""Hugging Face's Text Generation Inference. Written for 3.3; archived upstream in 2026, and still served widely.

A chat goes to `/v1/chat/completions`, its body unchanged except for three fields with other names in TGI. A text
completion goes to `/generate_stream`, which supports more fields than TGI's own `/v1/completions`: top_k,
log-probabilities, the seed, a `stop` that is one text. TGI silently ignores unknown fields; here they are refused by
name. It takes no token ids and has no salt: tenants share its cache. A closed connection stops generation.

Source: TGI 3.3, docs/openapi.json, docs/source/reference/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import Load, Tokenized
from backends.http.backend import HttpBackend, ids_in
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.http.prometheus_text import Metrics, whole
from backends.http.unsupported import refuse_unsupported
from backends.openai.answer import OpenAIAnswer
from backends.openai.calls import call_ids_in
from backends.tgi.answer import TGIAnswer, error_in_chat, error_of_tgi
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Capability, Prompt, Request

_CHAT_PATH = "/v1/chat/completions"
_RUNNING, _WAITING = "tgi_batch_current_size", "tgi_queue_size"
_KV, _KV_USED = "tgi_batch_max_total_tokens", "tgi_batch_current_max_tokens"

_OF_GENERATE = (
    *("temperature", "top_p", "top_k", "seed", "stop", "frequency_penalty", "repetition_penalty", "top_logprobs"),
)
_OF_CHAT = ("temperature", "top_p", "seed", "stop", "frequency_penalty", "top_logprobs", "grammar")
_OF_TGI = ("typical_p", "truncate", "watermark", "grammar")
"""Parameters of its own that a client may put beside OpenAI's."""


@dataclass(frozen=True, slots=True)
class TGIOptions(HttpOptions):
    """How to talk to TGI. `adapters` are the LoRA adapters that it was started with, which it lists nowhere."""

    adapters: frozenset[str] = frozenset()


class TGI(HttpBackend):
    """A TGI router at `url`. It has one model, under any name in requests, and adapters of it."""

    kind = "tgi"
    options_type = TGIOptions
    _options: TGIOptions
    capabilities = frozenset({Capability.STRUCTURED_OUTPUT, Capability.LOGPROBS, Capability.MEDIA})

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
        self._model: str | None = None
        self._max_requests: int | None = None

    async def probe(self) -> None:
        """Learn model, limits and load; raises BackendFailed if it is ill."""
        await self._check_health()
        if self._model is None:
            await self._learn_info()
        await self._take_report("/metrics", self._load_of)

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """A chat to the chat API, a text to the native one. Raises InvalidRequest for unsupported fields."""
        body = prompt.body
        if body is None:
            raise InvalidRequest("TGI takes text, and the request has token ids only", param="prompt")
        adapter = self._adapter(request)
        if prompt.path == _CHAT_PATH:
            answer = OpenAIAnswer(
                self.name, request, is_streamed=True, error_of=error_in_chat, taken_ids=call_ids_in(body)
            )
            content = encoded(chat_body(request, body, adapter))
            return Exchange(Post(_CHAT_PATH, content), answer, error_of_tgi)
        sampling = request.sampling
        wants_logprobs = sampling.top_logprobs is not None
        native = TGIAnswer(self.name, stops=sampling.stop, wants_logprobs=wants_logprobs)
        return Exchange(Post("/generate_stream", encoded(generate_body(request, body, adapter))), native, error_of_tgi)

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:  # noqa: ARG002 - it has one
        if "messages" in body:
            read = {name: body[name] for name in ("messages", "tools", "tool_choice") if body.get(name) is not None}
            token_list = (await self._asked("/chat_tokenize", {"model": "tgi", **read})).get("tokenize_response")
        else:
            page = await self.client.ask(Post("/tokenize", encoded({"inputs": body["prompt"]}), is_streamed=False))
            token_list = decoded(page, self.name, "the tokens of a prompt")
        if not isinstance(token_list, list) or not all(isinstance(token, Mapping) for token in token_list):
            raise BackendFailed(f"{self.name} answered nonsense when asked for the tokens of a prompt")
        texts = [str(token.get("text")) for token in token_list]
        return Tokenized(ids_in([token.get("id") for token in token_list], self.name), texts)

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:  # noqa: ARG002
        """See TextReader: TGI never does it."""
        return None

    def _adapter(self, request: Request) -> str | None:
        """The adapter that the request means; None: the model itself."""
        name = self._backends_name(request)
        return name if name in self._options.adapters else None

    async def _learn_info(self) -> None:
        info = decoded(await self.client.get("/info"), self.name, "its settings")
        try:
            self._model = str(info["model_id"])
            named = self._options.served or frozenset({self._model})
            self._served = named | self._options.adapters | frozenset(self._options.models.values())
            self._context_tokens = self._options.context_tokens or int(info["max_total_tokens"])
            self._max_requests = int(info["max_concurrent_requests"])
        except (KeyError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its settings") from error

    def _load_of(self, page: bytes, asked_at: float) -> Load:
        return load_of(page, asked_at, max_requests=self._max_requests)


def chat_body(request: Request, body: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """The client's chat in TGI's spelling, streamed. Raises InvalidRequest for fields that TGI would ignore."""
    refuse_unsupported(request.sampling, _OF_CHAT, "TGI's chat")
    # TGI makes a repetition penalty of 2 out of `presence_penalty` 0
    respelt = ("model", "max_completion_tokens", "stop", "response_format", "presence_penalty")
    sent = {name: value for name, value in body.items() if name not in respelt}
    sent |= {"model": adapter or "tgi", "stream": True}
    sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None:
        sent["max_tokens"] = most
    if request.sampling.stop:
        sent["stop"] = list(request.sampling.stop)
    shape = _shape(body.get("response_format"))
    if shape is not None:
        sent["response_format"] = shape
    return sent


def generate_body(request: Request, body: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """The client's text completion for TGI's native API. Raises InvalidRequest for unsupported fields."""
    text = body.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest("TGI takes text, and the prompt is token ids", hint="send text", param="prompt")
    sampling = request.sampling
    refuse_unsupported(sampling, _OF_GENERATE, "TGI")
    parameters: dict[str, Any] = {name: body[name] for name in _OF_TGI if body.get(name) is not None}
    parameters |= {"max_new_tokens": request.max_new_tokens, "details": True, "do_sample": sampling.temperature > 0}
    given = {
        # each of them must lie inside its range, not on the edge that means "off"
        "temperature": sampling.temperature if sampling.temperature > 0 else None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "top_n_tokens": sampling.top_logprobs or None,
        "adapter_id": adapter,
    }
    parameters |= {name: value for name, value in given.items() if value is not None}
    return {"inputs": text, "parameters": parameters}


def load_of(page: bytes, asked_at: float, *, max_requests: int | None = None) -> Load:
    """The load in TGI's metrics; room is its batch's limit less the most that its requests may come to hold."""
    metrics = Metrics(page, (_RUNNING, _WAITING, _KV, _KV_USED))
    most, used = metrics.total(_KV), metrics.total(_KV_USED)
    return Load(
        # a gauge is not there before it is first set
        running=whole(metrics.total(_RUNNING) or 0),
        waiting=whole(metrics.total(_WAITING) or 0),
        free_tokens=None if most is None else max(0, round(most - (used or 0))),
        max_requests=max_requests,
        reported_at=asked_at,
    )


def _shape(response_format: Any) -> dict[str, Any] | None:
    """OpenAI's `response_format` as TGI spells it, which keeps the schema under `value`. Raises InvalidRequest."""
    if not isinstance(response_format, Mapping) or response_format.get("type") == "text":
        return None
    if "value" in response_format:
        return dict(response_format)
    kind = response_format.get("type")
    if isinstance(response_format.get("schema"), Mapping) and kind in ("json_object", "json_schema"):
        return {"type": "json_object", "value": response_format["schema"]}
    if kind == "json_schema":
        return {"type": "json_schema", "value": response_format.get("json_schema")}
    raise InvalidRequest(
        f"TGI cannot shape an answer as '{kind}'", hint="give it a json_schema", param="response_format"
    )
