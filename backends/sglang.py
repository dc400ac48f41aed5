"""SGLang's server. Written for 0.5; `/v1/loads` since 0.5.8, `/get_load` before it.

A client's OpenAI body goes unchanged to `/v1/...`, token ids in a prompt included. Without a body, token ids go to the
native `/generate`, which takes and returns ids and reports in each event how much of the prompt was cached. The router
alone sets `extra_key` and `cache_salt` (the tenant's cache domain), `rid`, `priority`, and the source of fetched KV
(`bootstrap_*`): a server in its mode "prefill" and one in its mode "decode" get the same request with the same room at
the same time, and the first hands its KV over. Neither answers requests without a room. A cancelled request is aborted
by closing the connection and by `POST /abort_request`, because a proxy in between may not pass the closing on.

A header or field names the rank of a server with several data-parallel ranks (`routed_dp_rank`, before 0.5.10
`data_parallel_rank`, and a header for endpoints that do not read these). `/v1/loads` lists the ranks.

Source: SGLang documentation, "SGLang Native APIs", "Server Arguments", "Production Metrics", "PD Disaggregation"; its
pull requests #19268, #19832 and #38729 for ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace as with_fields
from yarl import URL

from backends.base import MOST_RANKS, Load, Prefilled, Tokenized
from backends.http.backend import ids_in
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.http.generate_answer import GenerateAnswer, flat_error
from backends.nesting import decode_page
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from policies.errors import BackendFailed, ExpectedError, Overloaded
from policies.nouns import Capability, Prompt, Request, Usage
from shards.wire.translate import unpack_ids


@dataclass(frozen=True, slots=True)
class SGLangOptions(OpenAIOptions):
    """How to talk to SGLang.

    `cache_salt` keeps the KV of cache domains apart (since 0.5.3). `priority` sends the rank, for servers that run with
    `--enable-priority-scheduling`; there the higher value goes first unless `low_priority_first`, which is its
    `--schedule-low-priority-values-first`. `abort`: also send `/abort_request` for cancelled requests. `ranks`: number
    of data-parallel ranks, if it reports none; with 1 it chooses the rank itself, however many it has.
    """

    cache_salt: bool = True
    priority: bool = False
    low_priority_first: bool = False
    abort: bool = True
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None = None


_BOOTSTRAP_PORT = 8998
"""Its default for --disaggregation-bootstrap-port."""

_MOST_ROOMS = 2**63 - MOST_RANKS
"""Rooms are numbered in 63 bits."""


class SGLang(OpenAICompatible):
    """An SGLang server at `url`."""

    kind = "sglang"
    # without a template for completions, which it does not report, it ignores a suffix
    capabilities = OpenAICompatible.capabilities - {Capability.SUFFIX} | {Capability.CONTINUES_TEXT}
    options_type = SGLangOptions
    # without it a cancelled request is aborted by closing its connection alone
    _dispensable = frozenset({"rid"})
    _options: SGLangOptions

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
        self._numbers = itertools.count()
        self._is_cumulative: bool | None = None
        self._mode, self._bootstrap_port = "null", _BOOTSTRAP_PORT
        self._loads_path = "/v1/loads?include=core"

    async def probe(self) -> None:
        """Learn models and load; raises BackendFailed if it is ill."""
        await self._check_health()
        await self._learn_models()
        if self._is_cumulative is None:
            await self._learn_settings()
        await self._learn_loads()
        if self._loads[0].reported_at is None and self._loads_path != "/get_load":
            self._loads_path = "/get_load"
            await self._learn_loads()

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body, or else its token ids to the native API."""
        own = self._own_fields(request)
        if prompt.transfer is not None:
            # both legs read the prompt from the same body
            own, prompt = {**own, **prompt.transfer}, with_fields(prompt, native=None)
        can_abort = self._options.abort and own["rid"] is not None
        abort = Post("/abort_request", encoded({"rid": own["rid"]})) if can_abort else None
        if prompt.body is not None or not prompt.token_ids:
            return self._openai_exchange(request, prompt, own)._replace(abort=abort)
        body = {**generate_body(request, prompt.token_ids), **_given(own)}
        answer = GenerateAnswer(
            self.name,
            is_cumulative=self._server._is_cumulative is not False,
            choices=request.sampling.choices,
            error_of=_error_in_stream,
        )
        return Exchange(Post("/generate", encoded(body)), answer, self._error_of, abort)

    def pair(self) -> Mapping[str, Any]:
        """See PairedPrefiller. A server with several ranks gives a room to the rank that is its remainder."""
        server = self._server
        if server._mode != "prefill":
            hint = "run it with --disaggregation-mode prefill"
            raise BackendFailed(f"{self.name} hands no KV over", hint=hint)
        ranks, room = len(server._loads), secrets.randbelow(_MOST_ROOMS)
        room += (self.rank - room) % ranks
        host = URL(self.url).host_subcomponent
        return {"bootstrap_host": host, "bootstrap_port": server._bootstrap_port, "bootstrap_room": room}

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """See Prefiller: the same request as the answering server gets, which begins with the token drawn here."""
        usage = Usage()
        async with aclosing(self.generate(request, prompt)) as deltas:
            async for delta in deltas:
                usage = delta.usage or usage
        return Prefilled(prompt.transfer or {}, usage)

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        """See TextReader. Of chats its documentation says nothing."""
        if "messages" in body:
            return None
        adds = body.get("add_special_tokens")
        named = {"model": self._options.models.get(model, model), "prompt": body["prompt"]}
        answer = await self._asked("/tokenize", named | ({} if adds is None else {"add_special_tokens": adds}))
        return Tokenized(ids_in(answer.get("tokens"), self.name))

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        named = {"model": self._options.models.get(model, model), "tokens": list(token_ids)}
        return str((await self._asked("/detokenize", {**named, "skip_special_tokens": False})).get("text"))

    @staticmethod
    def _error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
        """As OpenAI's; a queue that is full is 503 without a time to come back."""
        error = OpenAICompatible._error_of(backend, status, body, headers)
        return _busy_if_full(backend, error)

    @property
    def sends_salts(self) -> bool:
        return self._options.cache_salt

    def _own_fields(self, request: Request) -> Mapping[str, Any]:
        priority = request.rank if self._options.low_priority_first else -request.rank
        rank = self.rank if self._rank_headers else None
        return {
            "extra_key": request.domain if self._options.cache_salt else None,
            "cache_salt": None,
            "priority": priority if self._options.priority else None,
            # several choices are a batch to SGLang, which some versions refuse under one id
            "rid": self._rid(request) if request.sampling.choices == 1 else None,
            "bootstrap_host": None,
            "bootstrap_port": None,
            "bootstrap_room": None,
            "routed_dp_rank": rank,
            "data_parallel_rank": rank,
        }

    def _rid(self, request: Request) -> str:
        """An id for one generation. All have one length, because /abort_request takes `rid` as a prefix."""
        return hashlib.blake2b(f"{request.id} {next(self._numbers)}".encode(), digest_size=16).hexdigest()

    async def _check_health(self, path: str = "/health") -> None:
        """As for other servers; after an outage its settings are asked again."""
        try:
            await super()._check_health(path)
        except BackendFailed:
            self._is_cumulative = None
            raise

    async def _learn_loads(self) -> None:
        """Take one report for each rank, or one for all if the server chooses or is too old to be given a rank."""
        if self._options.ranks == 1 or (self._options.ranks is None and self._loads_path == "/get_load"):
            await self._take_report(self._loads_path, load_of)
        else:
            await self._take_reports(self._loads_path, loads_of, ranks=self._options.ranks or 1)

    async def _learn_settings(self) -> None:
        """Whether each event repeats the whole text (a server that sends pieces reports that), and its part in
        separate prefill."""
        page = await self.client.get("/server_info")
        if page.status == 404:
            page = await self.client.get("/get_server_info")
        if page.status != 200:
            return
        info = decoded(page, self.name, "its settings")
        if isinstance(info, dict):
            self._is_cumulative = not (info.get("incremental_streaming_output") or info.get("stream_output"))
            self._mode = str(info.get("disaggregation_mode") or "null")
            self._needs_prefill = self._mode == "decode"
            port = info.get("disaggregation_bootstrap_port")
            self._bootstrap_port = port if isinstance(port, int) else _BOOTSTRAP_PORT


def generate_body(request: Request, token_ids: bytes) -> dict[str, Any]:
    """The body of `/generate`: the client's fields under SGLang's names."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_new_tokens": sampling.min_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "n": sampling.choices,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "sampling_seed": sampling.seed,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
    }
    logprobs = sampling.top_logprobs
    asked = {"return_logprob": True, "top_logprobs_num": logprobs, "return_text_in_logprobs": True}
    body = {"input_ids": list(unpack_ids(token_ids)), "sampling_params": _given(params), "stream": True}
    return body if logprobs is None else {**body, **asked}


def load_of(page: bytes, asked_at: float) -> Load:
    """The load in `/v1/loads` or `/get_load`, over all data-parallel ranks. Raises BackendFailed at nonsense."""
    return _load(_ranks(page), asked_at)


def loads_of(page: bytes, asked_at: float) -> tuple[Load, ...]:
    """The load of each data-parallel rank in `/v1/loads` or `/get_load`, in order. Raises BackendFailed at nonsense."""
    try:
        ranks = sorted(_ranks(page), key=lambda rank: int(rank.get("dp_rank", 0)))
    except (TypeError, ValueError, AttributeError) as error:
        raise BackendFailed("the loads are nonsense") from error
    return tuple(_load([rank], asked_at) for rank in ranks[:MOST_RANKS])


def _ranks(page: bytes) -> list[Any]:
    try:
        answer = decode_page(page)
        return list(answer["loads"] if isinstance(answer, dict) else answer)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BackendFailed("the loads are nonsense") from error


def _load(ranks: Sequence[Any], asked_at: float) -> Load:
    """The reports of `ranks`, summed. Raises BackendFailed at nonsense."""
    try:
        waiting = sum(rank["num_waiting_reqs"] for rank in ranks)
        capacities = [rank.get("max_total_num_tokens") for rank in ranks]
        frees = [most - rank["num_used_tokens"] for most, rank in zip(capacities, ranks, strict=True) if most]
        most = sum(rank.get("max_running_requests") or 0 for rank in ranks)
        return Load(
            running=sum(_running(rank) for rank in ranks),
            waiting=waiting,
            waiting_tokens=sum(map(_waiting_tokens, ranks)),
            free_tokens=max(0, sum(frees)) if frees else None,
            max_requests=most or None,
            reported_at=asked_at,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BackendFailed("the loads are nonsense") from error


def _running(rank: Mapping[str, Any]) -> int:
    """`/get_load` counts those that wait among its requests."""
    running = rank.get("num_running_reqs")
    return int(rank["num_reqs"] - rank["num_waiting_reqs"] if running is None else running)


def _waiting_tokens(rank: Mapping[str, Any]) -> int:
    """Prompt tokens not computed yet: newer servers say it, others count them into their total."""
    reported = rank.get("num_waiting_uncached_tokens")
    total, used = rank.get("num_total_tokens"), rank.get("num_used_tokens")
    if reported is not None or total is None or used is None:
        return int(reported or 0)
    return max(0, int(total) - int(used))


def _error_in_stream(backend: str, error: Any) -> ExpectedError:
    return _busy_if_full(backend, flat_error(backend, error))


def _busy_if_full(backend: str, error: ExpectedError) -> ExpectedError:
    if isinstance(error, BackendFailed) and "queue is full" in error.message:
        return Overloaded(f"{backend} is busy: its queue is full", retry_after_s=error.retry_after_s)
    return error


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}
