"""A trtllm-serve, built from TensorRT-LLM's documentation (trtllm-serve, its iteration statistics) as of 1.2.

Separate prefill is built from its "Disaggregated Serving" and the fields of `disaggregated_params` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve

KNOWN = frozenset(
    {
        "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
        "top_p", "top_k", "min_p", "n", "stop", "seed", "logit_bias", "presence_penalty", "frequency_penalty", "user",
        "repetition_penalty", "ignore_eos", "stop_token_ids", "min_tokens", "cache_salt", "response_format", "tools",
        "tool_choice", "logprobs", "top_logprobs", "disaggregated_params", "prompt_token_ids",
    }
)  # fmt: skip


@dataclass(eq=False)
class TensorRTLLMServer(OpenAIServer):
    """trtllm-serve: OpenAI's API without unknown fields, and statistics that are handed out once."""

    queued: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    iterations: int = 0
    keeps_kv: bool = True
    """Runs with `cache_transceiver_config`, so that other servers can fetch the KV of prompts."""
    kept: set[int] = field(default_factory=set)
    """The requests, of which others may have the KV once; a generation server shares them with its context server."""

    def routes(self) -> Iterable[web.RouteDef]:
        return (*super().routes(), web.get("/health", self.health), web.get("/metrics", self.metrics))

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_ill else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        drained, self.records = self.records, []
        return web.json_response(drained)

    def iterate(self) -> None:
        """Run one iteration, which leaves one record."""
        self.iterations += 1
        self.records.append(
            {
                "gpuMemUsage": 76665782272,
                "iter": self.iterations,
                "iterLatencyMS": 7.0,
                "kvCacheStats": {
                    "cacheHitRate": 0.5,
                    "freeNumBlocks": 400,
                    "maxNumBlocks": 1000,
                    "tokensPerBlock": 32,
                    "usedNumBlocks": 600,
                },
                "maxNumActiveRequests": 64,
                "numActiveRequests": self.open_requests,
                "numQueuedRequests": self.queued,
            }
        )

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        kind = {404: "NotFoundError", 503: "ServiceUnavailableError"}.get(status, "BadRequestError")
        error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return web.json_response(error, status=status, headers=headers)

    def too_long(self, tokens: int) -> web.Response:
        return self.error(400, f"The prompt length ({tokens}) should not exceed max_seq_len ({self.context_tokens})")

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        unknown = sorted(body.keys() - KNOWN)
        if unknown:
            return self.error(400, f"[{{'type': 'extra_forbidden', 'loc': ('body', '{unknown[0]}')}}]")
        self.iterate()
        params = body.get("disaggregated_params") or {}
        if params.get("request_type") == "generation_only":
            if params.get("ctx_request_id") not in self.kept:
                return self.error(500, "Internal server error")
            self.kept.discard(params["ctx_request_id"])
        return super().refusal(body, prompt_tokens)

    def choice(self, body: Mapping[str, Any], text: str, finish: str | None, is_whole: bool = False) -> dict[str, Any]:
        choice = super().choice(body, text, finish, is_whole)
        params = body.get("disaggregated_params") or {}
        if params.get("request_type") != "context_only" or not self.keeps_kv:
            return choice
        self.kept.add(self.iterations)
        answered = {"request_type": "context_only", "ctx_request_id": self.iterations, "first_gen_tokens": [71]}
        return {**choice, "disaggregated_params": answered | {"encoded_opaque_state": "c3RhdGU=", "draft_tokens": None}}

    def chunk(self, body: Mapping[str, Any], choices: Any, usage: Any = None) -> dict[str, Any]:
        chunk = super().chunk(body, choices, usage)
        is_kept = any("disaggregated_params" in choice for choice in choices)
        return {**chunk, "prompt_token_ids": [1, 2, 3]} if is_kept else chunk


if __name__ == "__main__":
    serve(TensorRTLLMServer, 8000)
