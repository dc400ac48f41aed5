"""TensorRT-LLM's `trtllm-serve`. Written for 1.1 and 1.2.

It speaks OpenAI's dialect, prompts of token ids included, and refuses unknown fields; its error goes to the client
unchanged. `cache_salt` (since 1.1) keeps cache domains apart; clients may not set `priority` and
`disaggregated_params`. A closed connection aborts.

With these the router has a prompt computed by a context server and the answer by a generation server, which fetches
the KV: "context_only", and what that answers with "generation_only", as `trtllm-serve disaggregated` sends them.

GET /metrics is JSON and returns each record once, to the first client that asks. With several routers, or a
collector of one's own, set `drain_metrics` to false; the router's own counts then stand in.

Source: TensorRT-LLM documentation, "trtllm-serve", "Metrics Endpoint", "Disaggregated Serving"; its executor's
iteration statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace as with_fields

from backends.base import Load, Prefilled
from backends.http.exchange import Exchange
from backends.nesting import decode_page
from backends.openai.compatible import RARE, OpenAICompatible, OpenAIOptions
from backends.openai.prefill import PrefillAnswer
from policies.errors import BackendFailed
from policies.nouns import Capability, Prompt, Request


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
        return self._options.cache_salt

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """As for other servers. What it fetches counts there as computed, so such an answer is written anew."""
        if not prompt.transfer:
            return super().exchange(request, prompt)
        sent = {**self._own_fields(request), **prompt.transfer}
        if prompt.body is None or "messages" not in prompt.body:
            # completions have them where their text is
            ids = sent.pop(_IDS, None)
            sent |= {} if ids is None else {"prompt": ids}
        return self._openai_exchange(request, with_fields(prompt, native=None), sent)

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """See Prefiller. An answer that ends with its first token leaves nothing to fetch: it is computed again."""
        answer = PrefillAnswer(self.name, transfer_of, hint="run it with cache_transceiver_config")
        return await self._prefilled(request, prompt, {"disaggregated_params": _CONTEXT_ONLY}, answer)

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        salt = request.domain if self._options.cache_salt else None
        return {"cache_salt": salt, "priority": None, "disaggregated_params": None}


_CONTEXT_ONLY = {"request_type": "context_only"}
_IDS = "prompt_token_ids"


def transfer_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields with which another server continues what a context server `answer`ed; None if it keeps no KV.

    Empty if there is nothing to continue. Raises KeyError, TypeError, IndexError or AttributeError at nonsense.
    """
    choice = answer["choices"][0]
    if choice.get("finish_reason") not in ("length", "not_finished"):
        return {}
    params = choice.get("disaggregated_params")
    if params is None:
        return None
    given = {name: value for name, value in params.items() if value is not None}
    continued = {"disaggregated_params": {**given, "request_type": "generation_only"}}
    ids = answer.get(_IDS)
    return continued if ids is None else {**continued, _IDS: ids}


def load_of(page: bytes, asked_at: float) -> Load:
    """The load in the newest record of the statistics; None for all values if no iteration ran since the last look.

    Nothing, not zero: an iteration may last longer than the time between two looks. Raises BackendFailed at nonsense.
    """
    try:
        records = decode_page(page)
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
