"""A vLLM server, built from its documentation (OpenAI-Compatible Server, Production Metrics, Sleep Mode) as of 0.24."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve

BLOCK_SIZE, BLOCKS = 16, 1000


@dataclass(eq=False)
class VLLMServer(OpenAIServer):
    """vLLM: OpenAI's API, LoRA adapters, salts of its prefix cache, priorities, sleep mode, metrics."""

    adapters: tuple[str, ...] = ()
    has_priorities: bool = False
    has_sleep_mode: bool = True
    is_sleeping: bool = False
    waiting: int = 0
    usage_share: float = 0.25
    cached: set[str] = field(default_factory=set)
    event_sources: dict[str, dict[str, Any]] | None = None
    """By rank, as `--kv-events-config` has them; None: a version that does not tell."""

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.get("/health", self.health),
            web.get("/is_sleeping", self.tell_sleep),
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.tell_event_sources),
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_ill else 200)

    async def tell_sleep(self, request: web.Request) -> web.Response:
        if not self.has_sleep_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"is_sleeping": self.is_sleeping})

    async def tell_event_sources(self, request: web.Request) -> web.Response:
        if self.event_sources is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        usual = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10000, "hwm": 100000}
        return web.json_response({rank: usual | source for rank, source in self.event_sources.items()})

    async def metrics(self, request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        return web.Response(
            text=f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {float(self.open_requests)}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {float(self.waiting)}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} {self.usage_share}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{BLOCK_SIZE}",cache_dtype="auto",engine="0",num_gpu_blocks="{BLOCKS}"}} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001",model_name="{self.model}"}} 0.0
"""
        )

    async def list_models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "object": "model", "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": [self.model_card(), *adapters]})

    def names(self) -> tuple[str, ...]:
        return (self.model, *self.adapters)

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        kind = {404: "NotFoundError", 503: "ServiceUnavailableError"}.get(status, "BadRequestError")
        error = {"message": message, "type": kind, "param": None, "code": status}
        return web.json_response({"error": error}, status=status, headers=headers)

    def busy(self) -> web.Response:
        return self.error(503, "The server is overloaded, please try again later.", **{"Retry-After": "3"})

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        if body.get("priority") and not self.has_priorities:
            return self.error(400, "Got priority, but Priority scheduling is not enabled.")
        return super().refusal(body, prompt_tokens)

    def usage(self, body: Mapping[str, Any], prompt_tokens: int, drawn: int) -> dict[str, Any]:
        """As OpenAI's; a prompt is found in the cache by those who share its salt."""
        key = repr((body.get("cache_salt"), body.get("messages") or body.get("prompt")))
        cached = prompt_tokens if key in self.cached else self.cached_tokens
        self.cached.add(key)
        return super().usage(body, prompt_tokens, drawn) | {"prompt_tokens_details": {"cached_tokens": cached}}


if __name__ == "__main__":
    serve(VLLMServer, 8000)
