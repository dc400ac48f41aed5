"""LMDeploy's api_server. Written for 0.16.

A client's OpenAI body goes unchanged, except for a prompt of token ids: LMDeploy's completions take text only, so ids
go to its `/generate`, which has fewer parameters; others are refused by name. Clients may not set `session_id`, the
server's own handle of a generation, nor the fields of disaggregated serving. There is no salt: tenants share the
server's cache. A closed connection aborts.

The PyTorch engine always has metrics. They report usage of the KV cache but not its size: set `kv_tokens` so that the
router knows the free room.

Source: LMDeploy 0.16 documentation, "OpenAI Compatible Server", "Metrics"; its `/generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from backends.base import Load
from backends.http.exchange import Exchange, Post, encoded
from backends.http.generate_answer import GenerateAnswer, flat_error
from backends.http.prometheus_text import Metrics, whole
from backends.http.unsupported import refuse_unsupported
from backends.openai.compatible import RARE, OpenAICompatible, OpenAIOptions
from policies.nouns import Capability, Prompt, Request, Sampling
from shards.wire.translate import unpack_ids

_RUNNING = "lmdeploy:num_requests_running"
_WAITING = ("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting")
_USAGE = "lmdeploy:gpu_cache_usage_perc"

_TEXT_PATH = "/v1/completions"
_NOT_OF_COMPLETIONS = ("top_logprobs", "logit_bias", "grammar")
_OF_COMPLETIONS = tuple(name for name in Sampling.__struct_fields__ if name not in _NOT_OF_COMPLETIONS)
_OF_GENERATE = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LMDeployOptions(OpenAIOptions):
    """Options for LMDeploy. `kv_tokens` is the capacity of its KV cache in tokens, from its log at the start."""

    kv_tokens: int | None = None


class LMDeploy(OpenAICompatible):
    """An api_server at `url`."""

    kind = "lmdeploy"
    capabilities = OpenAICompatible.capabilities - {Capability.EMBEDDINGS, Capability.RERANK} - RARE
    options_type = LMDeployOptions
    own_paths = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
    _options: LMDeployOptions

    async def probe(self) -> None:
        """Learn models and load; raises BackendFailed if it is ill."""
        await self._check_health()
        await self._learn_models()
        await self._take_report("/metrics", partial(load_of, kv_tokens=self._options.kv_tokens))

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body, or token ids for the native API. Raises InvalidRequest for unknown fields."""
        ids = _token_ids(prompt)
        if ids is None:
            if prompt.path == _TEXT_PATH:
                refuse_unsupported(request.sampling, _OF_COMPLETIONS, "LMDeploy's completions")
            return super().exchange(request, prompt)
        body = generate_body(request, ids)
        answer = GenerateAnswer(self.name, is_cumulative=False, error_of=flat_error)
        return Exchange(Post("/generate", encoded(body)), answer, self._error_of)

    def _own_fields(self, request: Request) -> Mapping[str, Any]:  # noqa: ARG002
        return {"session_id": None, "migration_request": None, "with_cache": None, "preserve_cache": None}


def generate_body(request: Request, token_ids: list[int]) -> dict[str, Any]:
    """The body of `/generate`. Raises InvalidRequest for fields that it does not know."""
    sampling = request.sampling
    logprobs = {} if sampling.top_logprobs is None else {"return_logprob": True}
    # it reports only the drawn token's log-probability
    knows = (*_OF_GENERATE, "top_logprobs") if not sampling.top_logprobs else _OF_GENERATE
    refuse_unsupported(sampling, knows, "LMDeploy's /generate, where prompts of token ids go,")
    parameters = {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
    }
    return {
        "input_ids": token_ids,
        "max_tokens": request.max_new_tokens,
        "stream": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        **{name: value for name, value in parameters.items() if value},
        **logprobs,
    }


def load_of(page: bytes, asked_at: float, *, kv_tokens: int | None = None) -> Load:
    """The load in LMDeploy's metrics, over all data-parallel ranks."""
    metrics = Metrics(page, (_RUNNING, *_WAITING, _USAGE))
    queues = [waiting for name in _WAITING if (waiting := metrics.total(name)) is not None]
    usage = metrics.mean(_USAGE)
    return Load(
        running=whole(metrics.total(_RUNNING)),
        # for a handle of the engine, and then in it
        waiting=whole(sum(queues)) if queues else None,
        free_tokens=None if usage is None or kv_tokens is None else round(kv_tokens * (1 - min(1.0, usage))),
        reported_at=asked_at,
    )


def _token_ids(prompt: Prompt) -> list[int] | None:
    """The prompt's ids; None if it has text."""
    if prompt.body is None:
        return list(unpack_ids(prompt.token_ids)) if prompt.token_ids else None
    ids = prompt.body.get("prompt")
    return ids if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids) else None
