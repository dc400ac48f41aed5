"""vLLM's OpenAI server. Written for 0.11 to 0.24; older ones back to 0.9 differ in metric names only.

The client's body goes through whole, prompts of token ids included: vLLM's completions take them, so that nothing is
rendered or tokenized twice. Its `/inference/v1/generate` answers with ids alone, and a server's tokenizer is nothing
that an adapter has, so completions it is. Four fields are the router's to say, whatever a client put there:
`cache_salt` (the tenant's cache domain), `priority`, `request_id`, and `kv_transfer_params`, which would let a client
have KV fetched from anywhere. A closed connection aborts.

Source: vLLM documentation, "OpenAI-Compatible Server", "Production Metrics", "Sleep Mode", "Automatic Prefix Caching".
`/kv_event_sources` is a vLLM 0.32 that was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.base import EventAddress, Load
from backends.http.client import decoded
from backends.http.prometheus_text import Metrics, whole
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from policies.errors import BackendFailed
from policies.nouns import Request

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class VLLMOptions(OpenAIOptions):
    """How to talk to vLLM.

    `cache_salt` keeps the KV of cache domains apart. `priority` sends the rank as priority (lower goes first), which
    vLLM refuses unless it runs with `--scheduling-policy priority`.
    """

    cache_salt: bool = True
    priority: bool = False


class VLLM(OpenAICompatible):
    """A vLLM server at `url`."""

    kind = "vllm"
    options_type = VLLMOptions
    # its /v1/messages knows no salt
    own_paths = OpenAICompatible.own_paths | {"/v1/responses"}
    _options: VLLMOptions
    _may_sleep = True

    async def probe(self) -> None:
        """Learn models (adapters of LoRA among them) and load; raises BackendFailed if it is ill or sleeps."""
        await self._check_health()
        await self._check_awake()
        await self._learn_models()
        await self._take_report("/metrics", load_of)

    async def event_addresses(self) -> tuple[EventAddress, ...]:
        """What GET /kv_event_sources says, which vLLM 0.32 has; older servers answer 404."""
        page = await self.client.get("/kv_event_sources")
        if page.status == 404:
            return ()
        try:
            sources = _SOURCES.decode(page.body) if page.status == 200 else {}
        except msgspec.DecodeError as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its cache events") from error
        return tuple(
            EventAddress(rank, source.endpoint, source.replay_endpoint)
            for rank, source in sorted(sources.items())
            if source.enable_kv_cache_events and source.publisher == "zmq" and source.endpoint
        )

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        return {
            "cache_salt": request.domain if self._options.cache_salt else None,
            "priority": request.rank if self._options.priority else None,
            "kv_transfer_params": None,
            "request_id": None,
        }

    async def _check_awake(self) -> None:
        """Raise BackendFailed if it sleeps. Only a server with sleep mode can be asked; any other is asked once."""
        if not self._may_sleep:
            return
        page = await self.client.get("/is_sleeping")
        if page.status == 404:
            self._may_sleep = False
        elif decoded(page, self.name, "whether it sleeps") == {"is_sleeping": True}:
            raise BackendFailed(f"{self.name} sleeps", hint="POST /wake_up wakes it")


class _EventSource(msgspec.Struct):
    """vLLM's KVEventsConfig of one rank, as it answers."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


_SOURCES = msgspec.json.Decoder(dict[int, _EventSource])


def load_of(page: bytes, asked_at: float) -> Load:
    """What vLLM's metrics say, over all data-parallel engines of the server. Waiting tokens are not among them."""
    metrics = Metrics(page, (_RUNNING, _WAITING, *_USAGE, _CACHE))
    usage, capacity = metrics.mean(*_USAGE), _capacity_tokens(metrics)
    return Load(
        running=whole(metrics.total(_RUNNING)),
        waiting=whole(metrics.total(_WAITING)),
        free_tokens=None if usage is None or capacity is None else round(capacity * (1 - min(1.0, usage))),
        reported_at=asked_at,
    )


def _capacity_tokens(metrics: Metrics) -> int | None:
    """Tokens of KV that all engines have room for; None if one does not tell."""
    try:
        sizes = [int(labels["block_size"]) * int(labels["num_gpu_blocks"]) for labels in metrics.labels(_CACHE)]
    except (KeyError, ValueError):
        return None
    return sum(sizes) or None
