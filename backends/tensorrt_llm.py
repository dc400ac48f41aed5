"""TensorRT-LLM's `trtllm-serve`. Written for 1.1 and 1.2.

It speaks OpenAI's dialect, prompts of token ids included, and refuses unknown fields; its error goes to the client
unchanged. `cache_salt` (since 1.1) keeps cache domains apart; clients may not set `priority` and
`disaggregated_params`. A closed connection aborts.

GET /metrics is JSON and returns each record once, to the first client that asks. With several routers, or a
collector of one's own, set `drain_metrics` to false; the router's own counts then stand in.

Source: TensorRT-LLM documentation, "trtllm-serve", "Metrics Endpoint"; its executor's iteration statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.base import Load
from backends.openai.compatible import RARE, OpenAICompatible, OpenAIOptions
from policies.errors import BackendFailed
from policies.nouns import Capability, Request


@dataclass(frozen=True, slots=True)
class TensorRTLLMOptions(OpenAIOptions):
    """How to talk to trtllm-serve. `drain_metrics`: this router alone reads its statistics."""

    cache_salt: bool = True
    drain_metrics: bool = True


class TensorRTLLM(OpenAICompatible):
    """A trtllm-serve at `url`."""

    kind = "tensorrt_llm"
    capabilities = OpenAICompatible.capabilities - {Capability.EMBEDDINGS, Capability.RERANK} - RARE
    options_type = TensorRTLLMOptions
    _options: TensorRTLLMOptions

    async def probe(self) -> None:
        """Learn models and load; raises BackendFailed if it is ill."""
        await self._check_health()
        await self._learn_models()
        if self._options.drain_metrics:
            await self._take_report("/metrics", load_of)

    @property
    def sends_salts(self) -> bool:
        """See CacheSalter."""
        return self._options.cache_salt

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        salt = request.domain if self._options.cache_salt else None
        return {"cache_salt": salt, "priority": None, "disaggregated_params": None}


def load_of(page: bytes, asked_at: float) -> Load:
    """The load in the newest record of the statistics; None for all values if no iteration ran since the last look.

    Nothing, not zero: an iteration may last longer than the time between two looks. Raises BackendFailed at nonsense.
    """
    try:
        records = msgspec.json.decode(page)
        if not records:
            return Load()
        newest = max(records, key=lambda record: record.get("iter", 0))
        cache = newest.get("kvCacheStats") or {}
        free, size = cache.get("freeNumBlocks"), cache.get("tokensPerBlock")
        return Load(
            running=newest.get("numActiveRequests"),
            waiting=newest.get("numQueuedRequests"),
            free_tokens=None if free is None or size is None else free * size,
            max_requests=newest.get("maxNumActiveRequests") or None,
            reported_at=asked_at,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise BackendFailed("the statistics are nonsense") from error
