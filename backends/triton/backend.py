"""NVIDIA's Triton Inference Server with a text model of TensorRT-LLM's: ensemble, BLS or llmapi. For 24.10 to 26.07.

A text completion becomes the inputs that the model declares; fields without an input are refused by name. It goes to
`generate_stream`, or, with `grpc_port`, to `ModelStreamInfer`, one call per generation. Closing either ends the
generation; a model with an input `stop` gets that as well. Triton has no chat here: its OpenAI frontend is of the kind
`openai_compatible`. Tenants share the engine's cache.

Source: Triton's docs/protocol (generate, model repository, KServe v2), docs/user_guide/decoupled_models.md, metrics.md;
TensorRT-LLM backend, "Cancel an in-flight request", metrics.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from backends.base import Load
from backends.http.backend import HttpBackend
from backends.http.client import HttpClient
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.http.prometheus_text import Metrics, whole
from backends.triton.answer import TritonAnswer, error_of_triton
from backends.triton.grpc import TritonStreams
from backends.triton.inputs import Signature, inputs_of, signature_of
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Delta, Prompt, Request

_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_PENDING = "nv_inference_pending_request_count"


@dataclass(frozen=True, slots=True)
class TritonOptions(HttpOptions):
    """How to talk to Triton.

    `grpc_port`: generations go there, not over HTTP. `metrics_port` is where its metrics are. `cumulative`: each
    response repeats the whole text, as the BLS model does with `accumulate_tokens`.
    """

    grpc_port: int | None = None
    metrics_port: int = 8002
    cumulative: bool = False


class TritonServer(HttpBackend):
    """A Triton server at `url`, with all its models that take and give text."""

    kind = "triton_server"
    options_type = TritonOptions
    _options: TritonOptions

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
        host, scheme = urlsplit(self.url).hostname or "", urlsplit(self.url).scheme
        host = f"[{host}]" if ":" in host else host
        # no key: metrics are plain HTTP on a port of their own
        self._metrics = HttpClient(name, f"http://{host}:{self._options.metrics_port}", HttpOptions())
        port = self._options.grpc_port
        is_secure = scheme == "https"
        self._streams = TritonStreams(name, f"{host}:{port}", self._options, is_secure=is_secure) if port else None
        self._signatures: dict[str, Signature] = {}
        self._numbers = itertools.count()

    @property
    def open_requests(self) -> int:
        """Generations that are under way."""
        return self.client.open_requests + (self._streams.open_requests if self._streams else 0)

    async def probe(self) -> None:
        """Learn text models and load; raises BackendFailed if it is ill."""
        await self._check_health("/v2/health/ready")
        index = decoded(await self.client.ask(Post("/v2/repository/index", b"{}")), self.name, "its models")
        try:
            ready = {str(model["name"]) for model in index if model.get("state") == "READY"}
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        # a model that is being reloaded is not ready for a moment
        self._signatures = {name: declared for name, declared in self._signatures.items() if name in ready}
        for name in sorted(ready - self._signatures.keys()):
            page = await self.client.get(f"/v2/models/{name}")
            self._signatures[name] = signature_of(decoded(page, self.name, f"the inputs of '{name}'"))
        served = frozenset(name for name, declared in self._signatures.items() if declared.is_text_model)
        self._served = self._options.served or served
        await self._take_metrics()

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """A text for generate_stream. Raises InvalidRequest for fields without an input of the model."""
        model, inputs, signature = self._inputs(request, prompt)
        number = self._id(request)
        path = f"/v2/models/{model}/generate"
        stop = Post(path, encoded({"id": number, "text_input": "", "stop": True}))
        return Exchange(
            Post(f"{path}_stream", encoded({"id": number, **inputs})),
            TritonAnswer(self.name, request, is_cumulative=self._options.cumulative),
            error_of_triton,
            stop if signature.can_be_stopped else None,
        )

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the answer; closing the iterator cancels it. Raises as those of other kinds do."""
        async with aclosing(self._deltas(request, prompt)) as deltas:
            async for delta in deltas:
                yield delta

    async def close(self) -> None:
        """Close every connection, which cancels what runs."""
        if self._streams is not None:
            await self._streams.close()
        await self._metrics.close()
        await super().close()

    def _deltas(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        if self._streams is None:
            return self.client.stream(self._made(request, prompt), prompt.headers, request.deadline_s)
        model, inputs, signature = self._inputs(request, prompt)
        return self._streams.stream(request, model, inputs, signature, number=self._id(request))

    def _inputs(self, request: Request, prompt: Prompt) -> tuple[str, dict[str, Any], Signature]:
        if prompt.body is None:
            raise InvalidRequest("Triton takes text here, and the request has token ids only", param="prompt")
        model = self._backends_name(request)
        signature = self._signatures.get(model) or _USUAL
        return model, inputs_of(request, prompt.body, signature), signature

    def _id(self, request: Request) -> str:
        """An id for one generation."""
        return hashlib.blake2b(f"{request.id} {next(self._numbers)}".encode(), digest_size=16).hexdigest()

    async def _take_metrics(self) -> None:
        """Metrics are optional: a server that has them elsewhere, or not at all, makes no reports."""
        asked_at = self._clock()
        try:
            page = await self._metrics.get("/metrics")
        except BackendFailed:
            return
        if page.status == 200:
            self._loads = (load_of(page.body, asked_at),)


_USUAL = Signature({"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}, frozenset({"text_output"}))
"""Inputs that all of TensorRT-LLM's text models have, used until the model's own were read."""


def load_of(page: bytes, asked_at: float) -> Load:
    """The load by its metrics: TensorRT-LLM's own, or else the number of requests in Triton's queue."""
    metrics = Metrics(page, (_REQUESTS, _BLOCKS, _PENDING))
    running, waiting = (metrics.total(_REQUESTS, request_type=kind) for kind in ("scheduled", "waiting"))
    if running is None and waiting is None:
        return Load(waiting=whole(metrics.total(_PENDING)), reported_at=asked_at)
    free, size = (metrics.total(_BLOCKS, kv_cache_block_type=kind) for kind in ("free", "tokens_per"))
    most = metrics.total(_REQUESTS, request_type="max")
    load = Load(running=whole(running), waiting=whole(waiting), max_requests=whole(most), reported_at=asked_at)
    return load if free is None or size is None else replace(load, free_tokens=round(free * size))
