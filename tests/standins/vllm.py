"""A vLLM server, built from its documentation (OpenAI-Compatible Server, Production Metrics, Sleep Mode, Data Parallel
Deployment) as of 0.24, and from what a real one of 0.32 with two data-parallel engines answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.block_cache import BlockCache
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve

BLOCK_SIZE, BLOCKS = 16, 1000


@dataclass(eq=False)
class Rank:
    """One data-parallel engine: its cache, and what it has to do. It computes one prompt after the other."""

    cache: BlockCache
    running: int = 0
    served: int = 0
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class Place:
    """A request's rank, and its uncached and cached tokens there."""

    rank: Rank
    uncached: int = 0
    cached: int = 0


_PLACE: ContextVar[Place] = ContextVar("place")


@dataclass(eq=False)
class VLLMServer(OpenAIServer):
    """vLLM: OpenAI's API, LoRA adapters, salts of its prefix cache, priorities, sleep mode, metrics.

    It runs so many data-parallel `ranks` of `blocks` each. A request goes to the one that its header names, or to the
    next in turn; `reads_ranks` is what versions before 0.11 do not. `prefill_s_per_token` is the time of a prompt.
    """

    adapters: tuple[str, ...] = ()
    found_by_resolver: tuple[str, ...] = ()
    """Adapters that it loads when it is asked for them, and lists from then on."""
    adapter_slots: int = 1
    active_adapters: str = ""
    has_priorities: bool = False
    has_sleep_mode: bool = True
    is_sleeping: bool = False
    waiting: int = 0
    usage_share: float = 0.25
    event_sources: dict[str, dict[str, Any]] | None = None
    """By rank, as `--kv-events-config` has them; None: a version that does not tell."""
    ranks: int = 1
    first_engine: int = 0
    blocks: int = BLOCKS
    prefill_s_per_token: float = 0.0
    version: str = "0.32.0"
    has_metrics: bool = True
    has_nixl: bool = False
    """Keeps the KV of prompts for others, as `--kv-transfer-config` with NixlConnector has it."""
    loses_kv: bool = False

    def __post_init__(self) -> None:
        self.engines = [Rank(BlockCache(self.blocks, BLOCK_SIZE)) for _ in range(self.ranks)]
        self._turns = itertools.count()

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.get("/health", self.health),
            web.get("/is_sleeping", self.tell_sleep),
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.tell_event_sources),
            web.get("/version", self.tell_version),
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

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def metrics(self, request: web.Request) -> web.Response:
        """The work of each engine. The number of blocks is that of all engines together, as vLLM prints it."""
        if not self.has_metrics:
            return web.Response(status=404)
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
        ]
        for number, engine in enumerate(self.engines, self.first_engine):
            labels = f'{{engine="{number}",model_name="{self.model}"}}'
            cache = f'block_size="{BLOCK_SIZE}",cache_dtype="auto",engine="{number}"'
            lines += [
                f"vllm:num_requests_running{labels} {float(engine.running)}",
                f"vllm:num_requests_waiting{labels} {float(self.waiting)}",
                f"vllm:kv_cache_usage_perc{labels} {self.usage_share}",
                f"vllm:prefix_cache_queries_total{labels} {float(engine.cache.queries)}",
                f"vllm:prefix_cache_hits_total{labels} {float(engine.cache.hits)}",
                f'vllm:cache_config_info{{{cache},num_gpu_blocks="{self.blocks * self.ranks}"}} 1.0',
                f'vllm:time_to_first_token_seconds_bucket{{engine="{number}",le="0.001",model_name="m"}} 0.0',
            ]
        if self.adapters:
            # one sample for each set that there was; its value is when that was
            for at, running in enumerate(("one-of-before", self.active_adapters)):
                labels = f'max_lora="{self.adapter_slots}",running_lora_adapters="{running}",waiting_lora_adapters=""'
                lines.append(f"vllm:lora_requests_info{{{labels}}} {at}.0")
        return web.Response(text="\n".join(lines) + "\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json()).get("model")
        if name in self.found_by_resolver and name not in self.adapters:
            self.adapters += (name,)
        asked = request.headers.get("X-data-parallel-rank", "")
        reads_ranks = self.version not in ("0.9.2", "0.10.2")
        rank = int(asked) if asked.isdecimal() and reads_ranks else next(self._turns) % self.ranks
        if rank >= self.ranks:
            return self.error(400, f"data_parallel_rank {rank} is out of range [0, {self.ranks}).")
        _PLACE.set(Place(self.engines[rank]))
        return await super().complete(request)

    @contextmanager
    def generating(self) -> Iterator[None]:
        rank = _PLACE.get().rank
        rank.running += 1
        rank.served += 1
        try:
            with super().generating():
                yield
        finally:
            rank.running -= 1

    async def pieces(self, most: int | None) -> AsyncIterator[str]:
        place = _PLACE.get()
        async with place.rank.computing:
            await asyncio.sleep(place.uncached * self.prefill_s_per_token)
        async for piece in super().pieces(most):
            yield piece

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
        if (body.get("kv_transfer_params") or {}).get("do_remote_prefill") and self.loses_kv:
            return self.error(500, "Internal server error")
        refusal = super().refusal(body, prompt_tokens)
        if refusal is None and ("messages" in body or "prompt" in body):
            place, tokens = _PLACE.get(), _tokens(body)
            place.cached = place.rank.cache.query(tokens, body.get("cache_salt") or "", self._adapter(body))
            place.uncached = len(tokens) - place.cached
        return refusal

    def chunk(self, body: Mapping[str, Any], choices: Any, usage: Any = None) -> dict[str, Any]:
        chunk = super().chunk(body, choices, usage)
        if self.has_nixl and not body.get("stream"):
            asked = body.get("kv_transfer_params") or {}
            kept = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]]}
            kept |= {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 5600}
            chunk["kv_transfer_params"] = kept if asked.get("do_remote_decode") else None
        return chunk

    def _adapter(self, body: Mapping[str, Any]) -> str:
        return body["model"] if body["model"] in self.adapters else ""

    def usage(self, body: Mapping[str, Any], prompt_tokens: int, drawn: int) -> dict[str, Any]:
        """As OpenAI's; a prompt is found in the cache of its rank by requests with the same salt and adapter."""
        place, answer = _PLACE.get(), self.text[:drawn].encode()
        place.rank.cache.store((*_tokens(body), *answer), body.get("cache_salt") or "", self._adapter(body))
        return super().usage(body, prompt_tokens, drawn) | {"prompt_tokens_details": {"cached_tokens": place.cached}}


def _tokens(body: Mapping[str, Any]) -> list[int]:
    """A byte of a prompt is one of its tokens."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return list(prompt.encode())
    if prompt is not None:
        return list(prompt)
    contents = (message.get("content") or "" for message in body["messages"])
    parts = (content if isinstance(content, list) else [{"text": content}] for content in contents)
    return list("".join(part.get("text", "") for every in parts for part in every).encode())


if __name__ == "__main__":
    serve(VLLMServer, 8000)
