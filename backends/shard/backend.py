"""Our own engine as a backend: all requests of a router share one stream to it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from backends.base import CacheListener, Description, Load, Pinned, Prefilled
from backends.shard.answer import ShardAnswer
from backends.shard.defaults import with_defaults
from backends.shard.link import LinkOptions, ShardLink
from backends.shard.messages import submit_of
from backends.shard.turns import Turns
from policies.errors import BackendFailed, Unreached
from policies.nouns import Capability, Delta, Prompt, Request, Sampling
from shards.kv.keys import TOKEN_BYTES
from shards.nouns import AdapterUse
from shards.wire.limits import PIN_PIECE_KEYS
from shards.wire.translate import pack_keys, unpack_ids
from shards.wire.v1 import shard_pb2 as wire

_ALWAYS = frozenset({Capability.TOKEN_IDS, Capability.LOGPROBS, Capability.CHOICES})
_MOST_MS = 2**32 - 1

_BEFORE_BYTES = 8 * TOKEN_BYTES
"""The end of a prompt that the text of its answer may depend on."""


class ShardBackend:
    """One shard at `address` (host:port).

    `models` maps clients' names of the model to the shard's. `listener` gets its cache events, large
    snapshots in pieces that each take one of the `turns`; `on_load` is called after each report of load, `on_leaving`
    when the shard is about to stop.
    """

    kind = "shard"

    def __init__(
        self,
        name: str,
        address: str,
        *,
        pool: str,
        models: Mapping[str, str] = MappingProxyType({}),
        listener: CacheListener | None = None,
        on_load: Callable[[str], None] = lambda _: None,
        on_leaving: Callable[[str], None] = lambda _: None,
        turns: Turns | None = None,
        options: LinkOptions = LinkOptions(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name, self.pool = name, pool
        self._models = models
        self._described: tuple[object, tuple[str, ...], Description] | None = None
        self._loaded: tuple[Load, AdapterUse, Load] | None = None
        self._adapters_before: frozenset[str] = frozenset()
        self._link = ShardLink(
            *(name, address),
            listener=listener,
            on_load=on_load,
            on_leaving=on_leaving,
            turns=turns,
            options=options,
            clock=clock,
            rng=rng,
            sleep=sleep,
        )

    def __repr__(self) -> str:
        return f"<ShardBackend {self.name} of {self.pool}: {self._link!r}>"

    @property
    def address(self) -> str:
        """host:port."""
        return self._link.address

    @property
    def open_requests(self) -> int:
        """Requests that the shard has not ended and no caller cancelled."""
        return self._link.open_requests

    def describe(self) -> Description | None:
        """The shard's abilities from its Welcome; None before that."""
        shard = self._link.shard
        if shard is None:
            return None
        adapters = self._link.adapters
        known = () if adapters is None else adapters.known
        # asked for each decision, and the same until the shard is another one or has other adapters
        if self._described is None or self._described[0] is not shard or self._described[1] != known:
            self._described = (shard, known, self._description(shard.welcome, known))
        return self._described[2]

    def load(self) -> Load:
        """The shard's newest report, at most a second old while it is attached."""
        load, adapters = self._link.load, self._link.adapters
        if adapters is None:
            return load
        if self._loaded is None or self._loaded[0] is not load or self._loaded[1] is not adapters:
            self._loaded = (load, adapters, self._with_adapters(load, adapters))
        return self._loaded[2]

    @property
    def kv_group(self) -> str | None:
        """The fingerprint of the shard's KV; None if it exchanges none, or is not attached."""
        shard = self._link.shard
        return None if shard is None else shard.welcome.kv_group.hex() or None

    def lend(self, tokens: int) -> Mapping[str, Any] | None:
        """Where other shards fetch the first `tokens` of a prompt; None while it is not attached."""
        shard = self._link.shard
        if shard is None or not shard.welcome.kv_group:
            return None
        host, _, port = shard.welcome.kv_address.rpartition(":")
        return {"address": f"{host or self.address.rpartition(':')[0]}:{port}", "tokens": tokens}

    def hand_over(self, heirs: Sequence[Mapping[str, Any]]) -> None:
        self._link.tell(wire.Command(hand_over=wire.HandOver(address=[heir["address"] for heir in heirs])))

    def assets(self) -> Mapping[str, bytes]:
        """The model's own files."""
        return self._link.shard.assets if self._link.shard else {}

    async def start(self) -> None:
        """Begin to attach in the background."""
        self._link.start()

    async def probe(self) -> None:
        """Return if the shard is attached and serves; wait for the outcome of the first attempt."""
        await self._link.probe()

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the answer; the prompt is prefilled while it is still being sent.

        Raises BackendFailed, InvalidRequest, ContextExceeded, Overloaded, DeadlineExceeded.
        """
        if request.sampling.grammar is not None and not self._can(Capability.STRUCTURED_OUTPUT):
            raise Unreached(f"{self.name} is another shard than before, and cannot shape its answers")
        if self._link.shard is not None and self._link.shard.defaults:
            sampling = with_defaults(request.sampling, prompt.body, self._link.shard.defaults)
            request = replace(request, sampling=sampling)
        beginning = prompt.beginning
        if beginning is not None and not self._can(Capability.CONTINUES_TOKENS):
            raise Unreached(f"{self.name} is another shard than before, and cannot continue an answer")
        answered = b"" if beginning is None else beginning.token_ids
        submit = submit_of(request, prompt, adapter=self._adapter(request.model))
        number, inbox = self._link.submit(submit, prompt.token_ids + answered)
        tokenizer = self._link.shard.tokenizer if self._link.shard else None
        prompt_tokens = len(prompt.token_ids) // TOKEN_BYTES
        answer = ShardAnswer(
            request.sampling,
            tokenizer,
            backend=self.name,
            prompt_tokens=prompt_tokens,
            is_chat=bool(prompt.body and "messages" in prompt.body),
            has_tools=bool(prompt.body and prompt.body.get("tools")),
            before=unpack_ids(prompt.token_ids[-_BEFORE_BYTES:]),
        )
        try:
            if beginning is not None:
                yield answer.resume(beginning)
            while not answer.is_done:
                for delta in answer.deltas(await inbox.take()):
                    yield delta
        finally:
            self._link.forget(number)

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """See Prefiller: the prompt's blocks stay in the shard's cache, where any shard of its group can fetch them."""
        transfer = self.lend(len(prompt.token_ids) // TOKEN_BYTES)
        if transfer is None:
            raise BackendFailed(f"{self.name} keeps no KV for others", hint="start it with --kv-listen")
        # one token ends the prompt; a grammar or penalties would only cost time
        alone = replace(request, max_new_tokens=1, sampling=Sampling())
        async with aclosing(self.generate(alone, prompt)) as deltas:
            usages = [delta.usage async for delta in deltas if delta.usage is not None]
        return Prefilled(transfer, usages[-1])

    async def pin(self, name: str, keys: Sequence[int], *, domain: str, for_s: float) -> Pinned:
        held = pinned = 0
        for start in range(0, len(keys), PIN_PIECE_KEYS):
            piece = keys[start : start + PIN_PIECE_KEYS]
            pin = wire.Pin(
                name=name, domain=domain, keys=pack_keys(piece), for_ms=min(math.ceil(for_s * 1000), _MOST_MS)
            )
            answer = await self._link.ask(wire.Command(pin=pin))
            held, pinned = held + answer.held_blocks, pinned + answer.blocks
            if answer.blocks < len(piece):
                break
        return Pinned(held, pinned)

    async def unpin(self, name: str) -> int:
        return (await self._link.ask(wire.Command(unpin=wire.Unpin(name=name)))).blocks

    async def clear_domain(self, domain: str) -> int:
        return (await self._link.ask(wire.Command(clear=wire.Clear(domain=domain)))).blocks

    async def close(self) -> None:
        """Detach, which cancels all its requests that still run on the shard."""
        await self._link.close()

    def check(self) -> None:
        """Raise AssertionError if the books of the link are wrong."""
        self._link.check()

    def _can(self, capability: Capability) -> bool:
        # a shard without the field would ignore it
        described = self.describe()
        return described is None or capability in described.capabilities

    def _adapter(self, model: str) -> str:
        """The adapter that clients call `model`; empty: the shard's own model. Raises Unreached if it has none."""
        shard, adapters = self._link.shard, self._link.adapters
        theirs = self._models.get(model, model)
        if shard is None or theirs == shard.welcome.model:
            return ""
        if adapters is not None and theirs in adapters.known:
            return theirs
        if adapters is not None or theirs in self._adapters_before:
            # the model itself would answer in its place
            raise Unreached(f"{self.name} has no adapter '{theirs}' any more")
        return ""

    def _with_adapters(self, load: Load, use: AdapterUse) -> Load:
        return dataclasses.replace(
            load,
            active_adapters=self._clients_names(use.active),
            ready_adapters=self._clients_names(use.loaded),
            adapter_slots=use.slots,
        )

    def _clients_names(self, theirs: Iterable[str]) -> frozenset[str]:
        if not self._models:
            return frozenset(theirs)
        names = frozenset(theirs)
        return frozenset(ours for ours, name in self._models.items() if name in names)

    def _description(self, welcome: wire.Welcome, adapters: tuple[str, ...]) -> Description:
        self._adapters_before = frozenset(adapters) or self._adapters_before
        tuned = self._clients_names(name for name in adapters if name != welcome.model)
        return Description(
            models=self._clients_names([welcome.model]) | tuned,
            adapters=frozenset(adapters),
            tuned=tuned,
            context_tokens=welcome.context_tokens,
            vocabulary=welcome.vocabulary,
            speaks_tokens=True,
            reports_cache=True,
            preempts=True,
            capabilities=_capabilities(welcome),
        )


def _capabilities(welcome: wire.Welcome) -> frozenset[Capability]:
    reported = {
        Capability.PINS: welcome.keeps_cache,
        Capability.STRUCTURED_OUTPUT: welcome.shapes_answers,
        Capability.CONTINUES_TOKENS: welcome.continues_answers,
    }
    return _ALWAYS | {capability for capability, is_there in reported.items() if is_there}
