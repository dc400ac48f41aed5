"""vLLM's OpenAI server. Written for 0.11 to 0.24; older ones back to 0.9 differ in metric names only.

The client's body goes unchanged, prompts of token ids included: vLLM's completions take them, so nothing is
rendered or tokenized twice. Its `/inference/v1/generate` answers with ids alone, and an adapter has no
tokenizer to decode them. The router alone sets four fields of a request:
`cache_salt` (the tenant's cache domain), `priority`, `request_id`, and `kv_transfer_params`, with which a client could
have KV fetched from any host: the router sends those that another vLLM answered, if that computed the prompt
(NixlConnector; seen with 0.32). A closed connection aborts.

A header names the engine of a server with several data-parallel engines (since 0.11; older ones choose
themselves). They are counted by the label `engine` of its metrics, and numbered in the order of these: a server that
runs engines 4 to 7 of 8 calls them 0 to 3 in that header.

Source: vLLM documentation, "OpenAI-Compatible Server", "Production Metrics", "Sleep Mode", "Automatic Prefix Caching",
"Data Parallel Deployment". `/kv_event_sources` and the metrics of several engines are those of a vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace as with_fields

from backends.base import MOST_RANKS, EventAddress, Load, Prefilled, Tokenized
from backends.http.backend import ids_in
from backends.http.exchange import Exchange, decoded
from backends.http.nonsense import MISSHAPEN
from backends.http.prometheus_text import Metrics, whole
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.openai.prefill import PrefillAnswer
from policies.errors import BackendFailed
from policies.nouns import Capability, Prompt, Request

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"

_FIRST_WITH_RANKS = (0, 11)
"""The version that began to read which rank is to serve a request."""

_LORA = "vllm:lora_requests_info"
_METRICS = (_RUNNING, _WAITING, *_USAGE, _CACHE, _LORA)

_VERSION = re.compile(rb'"version"\s*:\s*"v?(\d+)\.(\d+)')


_READ = (
    *("messages", "prompt", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "return_token_strs"),
)
"""Fields of a body that change how its prompt is read, and that /tokenize takes too."""


@dataclass(frozen=True, slots=True)
class VLLMOptions(OpenAIOptions):
    """How to talk to vLLM.

    `cache_salt` keeps the KV of cache domains apart. `priority` sends the rank as priority (lower goes first), which
    vLLM refuses unless it runs with `--scheduling-policy priority`. `ranks`: number of data-parallel engines, if its
    metrics do not report them; with 1 it chooses the engine itself, however many it has. `adapters` are LoRA
    adapters that it does not list and loads on request, by a resolver.
    """

    cache_salt: bool = True
    priority: bool = False
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None = None
    adapters: frozenset[str] = frozenset()


class VLLM(OpenAICompatible):
    """A vLLM server at `url`."""

    kind = "vllm"
    capabilities = OpenAICompatible.capabilities | {Capability.CONTINUES_TEXT}
    options_type = VLLMOptions
    # whether an older version's /v1/messages uses a salt is unknown before the server was asked
    own_paths = OpenAICompatible.own_paths | {"/v1/responses"}
    _echoes = True
    _options: VLLMOptions
    _may_sleep = True
    _reads_ranks: bool | None = None

    async def probe(self) -> None:
        """Learn models (adapters of LoRA among them), ranks and load; raises BackendFailed if it is ill or sleeps."""
        await self._check_health()
        await self._check_awake()
        await self._learn_models()
        self._loadable = self._options.adapters - self._served
        self._served |= self._loadable
        if self._reads_ranks is None:
            self._reads_ranks = self._options.ranks != 1 and await self._is_new_enough()
        if self._reads_ranks:
            await self._take_reports("/metrics", loads_of, ranks=self._options.ranks or 1)
        else:
            await self._take_report("/metrics", load_of)
        self._loads = tuple(self._with_clients_names(load) for load in self._loads)

    def _with_clients_names(self, load: Load) -> Load:
        active = load.active_adapters
        return replace(load, active_adapters=self._clients_names(active)) if active else load

    async def event_addresses(self) -> tuple[EventAddress, ...]:
        """The answer of GET /kv_event_sources, which vLLM 0.32 has; older servers answer 404."""
        page = await self.client.get("/kv_event_sources")
        if page.status == 404:
            return ()
        try:
            sources = _SOURCES.decode(page.body) if page.status == 200 else {}
        except MISSHAPEN as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its cache events") from error
        return tuple(
            # numbered like the ranks in requests, which may differ from the engine's own numbers
            EventAddress(rank, source.endpoint, source.replay_endpoint)
            for rank, (_, source) in enumerate(sorted(sources.items()))
            if source.enable_kv_cache_events and source.publisher == "zmq" and source.endpoint
        )

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        sent = {name: body[name] for name in _READ if body.get(name) is not None}
        if "messages" in body:
            # it accepts these for answers only; templates see them all the same
            variables = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
            if "reasoning_effort" in variables:
                variables["enable_thinking"] = variables["reasoning_effort"] != "none"
            sent["chat_template_kwargs"] = variables | (body.get("chat_template_kwargs") or {})
            sent["messages"] = [_with_reasoning(message) for message in body["messages"]]
        answer = await self._asked("/tokenize", {**sent, "model": self._options.models.get(model, model)})
        texts = answer.get("token_strs")
        return Tokenized(ids_in(answer.get("tokens"), self.name), texts if isinstance(texts, list) else None)

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        named = self._options.models.get(model, model)
        return str((await self._asked("/detokenize", {"model": named, "tokens": list(token_ids)})).get("prompt"))

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """As for other servers. What it fetches counts there as cached, so such an answer is not passed on as bytes."""
        if prompt.transfer is None:
            return super().exchange(request, prompt)
        own = {**self._own_fields(request), "kv_transfer_params": prompt.transfer}
        return self._openai_exchange(request, with_fields(prompt, native=None), own)

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """See Prefiller: the first of NIXL's two calls."""
        answer = PrefillAnswer(self.name, transfer_of, hint="run it with --kv-transfer-config")
        return await self._prefilled(request, prompt, {"kv_transfer_params": _REMOTE}, answer)

    @property
    def sends_salts(self) -> bool:
        return self._options.cache_salt

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        return {
            "cache_salt": request.domain if self._options.cache_salt else None,
            "priority": request.rank if self._options.priority else None,
            "kv_transfer_params": None,
            "request_id": None,
        }

    async def _is_new_enough(self) -> bool:
        """Whether it reads the rank in requests. Assumed also of a server without a version in vLLM's format."""
        page = await self.client.get("/version")
        version = _VERSION.search(page.body) if page.status == 200 else None
        return version is None or (int(version[1]), int(version[2])) >= _FIRST_WITH_RANKS

    async def _check_awake(self) -> None:
        """Raise BackendFailed if it sleeps. Only a server with sleep mode can be asked; any other is asked once."""
        if not self._may_sleep:
            return
        page = await self.client.get("/is_sleeping")
        if page.status == 404:
            self._may_sleep = False
        elif decoded(page, self.name, "whether it sleeps") == {"is_sleeping": True}:
            raise BackendFailed(f"{self.name} sleeps", hint="POST /wake_up wakes it")


_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""`kv_transfer_params` of the first call: keep the KV for another engine, which is not known yet."""


def transfer_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the engine that answers is sent, in the `answer` of the one that computed the prompt; None: it keeps no KV.

    Raises AttributeError at nonsense.
    """
    return answer.get("kv_transfer_params")


class _EventSource(msgspec.Struct):
    """vLLM's KVEventsConfig of one rank, as it answers."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


_SOURCES = msgspec.json.Decoder(dict[int, _EventSource])


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with its reasoning under the one name of two that /tokenize reads."""
    if message.get("reasoning") is not None or message.get("reasoning_content") is None:
        return message
    return {**message, "reasoning": message["reasoning_content"]}


def load_of(page: bytes, asked_at: float) -> Load:
    """The load in vLLM's metrics, over all data-parallel engines of the server. They have no waiting tokens."""
    metrics = Metrics(page, _METRICS)
    return replace(_load(metrics, _capacity_tokens(metrics), asked_at), active_adapters=_active_adapters(metrics))


def loads_of(page: bytes, asked_at: float) -> tuple[Load, ...]:
    """The load of each data-parallel engine in vLLM's metrics, in order; empty if they have none.

    Metrics without the label are those of one engine: older versions, and servers in its manner, have no such label.
    """
    metrics = Metrics(page, _METRICS)
    labels = (*metrics.labels(_RUNNING), *metrics.labels(_WAITING), *metrics.labels(_CACHE))
    engines = sorted({int(label_set["engine"]) for label_set in labels if _is_number(label_set.get("engine", ""))})
    if labels and not engines:
        return (load_of(page, asked_at),)
    capacity = _capacity_tokens(metrics)
    each = None if capacity is None else capacity // max(1, len(engines))
    loads = tuple(_load(metrics, each, asked_at, engine=str(engine)) for engine in engines[:MOST_RANKS])
    # with several engines each overwrites the adapters that the others reported
    return loads if len(loads) != 1 else (replace(loads[0], active_adapters=_active_adapters(metrics)),)


def _load(metrics: Metrics, capacity: int | None, asked_at: float, **labels: str) -> Load:
    usage = metrics.mean(*_USAGE, **labels)
    return Load(
        running=whole(metrics.total(_RUNNING, **labels)),
        waiting=whole(metrics.total(_WAITING, **labels)),
        free_tokens=None if usage is None or capacity is None else round(capacity * (1 - min(1.0, usage))),
        reported_at=asked_at,
        adapter_slots=_adapter_slots(metrics),
    )


def _active_adapters(metrics: Metrics) -> frozenset[str] | None:
    """Adapters with running or waiting requests; None if the server does not report them."""
    newest = metrics.newest_labels(_LORA)
    if newest is None:
        return None
    names = f"{newest.get('running_lora_adapters', '')},{newest.get('waiting_lora_adapters', '')}".split(",")
    return frozenset(name for name in names if name)


def _adapter_slots(metrics: Metrics) -> int | None:
    newest = metrics.newest_labels(_LORA)
    most = newest.get("max_lora", "") if newest else ""
    return int(most) if _is_number(most) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _capacity_tokens(metrics: Metrics) -> int | None:
    """Capacity of all engines in tokens of KV; None if they do not report it.

    Each engine reports its block size and the number of blocks of all engines together.
    """
    try:
        sizes = [int(labels["block_size"]) * int(labels["num_gpu_blocks"]) for labels in metrics.labels(_CACHE)]
    except (KeyError, ValueError):
        return None
    return max(sizes, default=0) or None
