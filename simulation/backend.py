"""A simulated engine behind the Protocol of backends, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from msgspec.structs import replace

from backends.base import CacheListener, Description, Fetched, Load, Prefilled
from policies.errors import ContextExceeded, InvalidRequest, Overloaded
from policies.nouns import Capability, Delta, Prompt, Request, Usage
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.nouns import CacheChange, Cause, Submission
from shards.sched.limits import Refusal
from simulation.driver import Driver, Unread
from simulation.engine import SimulatedEngine
from simulation.links import USUAL_BYTES_S, NetworkLink
from simulation.speed import Machine

TOKEN_IDS, NEW_TOKENS = "token_ids", "new_tokens"
"""Keys in a simulated request's body: its prompt (little-endian uint32), and the length of its answer."""

_WAY_S = 1e-9
"""Age in s of a report when it is read, so that it does not include requests sent at the same moment."""

_REFUSALS = {Cause.CONTEXT: ContextExceeded, Cause.OVERLOADED: Overloaded}


class SimulatedBackend:
    """One backend of `pool` that simulates `machine`, called `kind` in views; clients know its models as `models`.

    `model` is its own name for them, which is part of block keys. `listener` gets its cache events and `on_load` its
    reports, if the machine sends them. `clock` is the event loop's.
    """

    def __init__(
        self,
        name: str,
        *,
        pool: str,
        kind: str,
        machine: Machine,
        models: frozenset[str],
        model: str,
        listener: CacheListener,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.pool, self.kind, self.machine = name, pool, kind, machine
        self.address = ""
        self.on_load: Callable[[str], None] = lambda _: None
        self.engine = SimulatedEngine(machine, model=model)
        self._listener, self._clock = listener, clock
        self._driver = Driver(self.engine, clock=clock, on_step=self._tell)
        self.link = NetworkLink(machine.link_bytes_s or USUAL_BYTES_S, machine.link_s)
        self.kv_group = model if machine.link_bytes_s else None
        self._fetched = Fetched()
        self._numbers = 0
        self._coming = 0
        self._fetching, self._fetching_tokens = 0, 0
        self._load = Load(max_requests=machine.running) if machine.tells_load else Load()
        self._description = Description(
            models,
            context_tokens=machine.context_tokens,
            reports_cache=machine.tells_cache,
            preempts=machine.ranks,
            capabilities=frozenset(Capability),
        )
        self._report()

    def __repr__(self) -> str:
        return f"<SimulatedBackend {self.name} of {self.pool}: {self.engine!r}>"

    def describe(self) -> Description:
        """Its models; it always counts as reached."""
        return self._description

    def load(self) -> Load:
        """Its newest report. An idle backend reports all the time."""
        if self.machine.tells_load and not self._coming and not self.engine.has_requests:
            self._report()
        return self._load

    def assets(self) -> Mapping[str, bytes]:
        """Empty: prompts arrive as token ids."""
        return {}

    async def start(self) -> None:
        """It is there."""

    async def probe(self) -> None:
        """Return at once: it is always healthy."""

    async def close(self) -> None:
        """Forget its timer."""
        self._driver.close()

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream an answer of the length in the body, after a fetch of the prompt's KV if the prompt names a backend.

        Raises ContextExceeded, Overloaded, InvalidRequest.
        """
        assert prompt.body is not None, "a simulated request has the length of its answer in its body"
        token_ids, new_tokens = prompt.body[TOKEN_IDS], prompt.body[NEW_TOKENS]
        await self._come()
        if prompt.transfer is not None:
            await self._fetch(request, token_ids, **prompt.transfer)
        number, inbox = self._submit(request, token_ids, new_tokens)
        left, drawn_tokens = request.sampling.choices, 0
        try:
            while left:
                drew = await inbox.take()
                drawn_tokens += drew.tokens
                left -= drew.is_last
                end = "stop" if drew.is_last else None
                usage = None if left else Usage(request.prompt_tokens, drawn_tokens, drew.cached)
                yield Delta(choice=drew.choice, token_ids=(0,) * drew.tokens, finish_reason=end, usage=usage)
        finally:
            self._driver.leave(number)

    def lend(self, tokens: int) -> Mapping[str, Any]:
        """See Lender: this backend itself."""
        return {"source": self, "tokens": tokens}

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        """See Prefiller: compute the prompt, which stays in the cache. Raises as `generate` does."""
        usage = Usage()
        async for delta in self.generate(request, replace(prompt, body={**(prompt.body or {}), NEW_TOKENS: 1})):
            usage = delta.usage or usage
        return Prefilled(self.lend(request.prompt_tokens), usage)

    def check(self) -> None:
        """Assert the engine's invariants, and that it has no requests without a reader."""
        self._driver.check()

    async def _come(self) -> None:
        """Wait while a request is on its way."""
        if self.machine.speed.way_s:
            self._coming += 1
            try:
                await asyncio.sleep(self.machine.speed.way_s)
            finally:
                self._coming -= 1

    async def _fetch(self, request: Request, token_ids: bytes, source: SimulatedBackend, tokens: int) -> None:
        """Transfer what `source` holds of the first `tokens` and this backend does not, into the cache."""
        own_tokens, now_s = self.engine.held_tokens(token_ids, request.domain), self._clock()
        there = min(tokens, source.engine.held_tokens(token_ids, request.domain))
        if there <= own_tokens:
            return
        size = (there - own_tokens) * self.machine.token_bytes
        began_s, ends_s = self.link.receive(source.link, size, now_s)
        rest_tokens = request.prompt_tokens - there
        self._fetching, self._fetching_tokens = self._fetching + 1, self._fetching_tokens + rest_tokens
        try:
            await asyncio.sleep(ends_s - now_s)
        finally:
            self._fetching, self._fetching_tokens = self._fetching - 1, self._fetching_tokens - rest_tokens
        fetched = self._fetched
        self._fetched = Fetched(
            fetched.fetches + 1,
            fetched.tokens + there - own_tokens,
            fetched.bytes + size,
            fetched.seconds + ends_s - began_s,
        )
        self.engine.adopt(token_ids, there, request.domain, rank=request.rank if self.machine.ranks else 0)

    def _submit(self, request: Request, token_ids: bytes, new_tokens: int) -> tuple[int, Unread]:
        self._numbers += 1
        submission = Submission(
            self._numbers,
            len(token_ids) // TOKEN_BYTES,
            request.max_new_tokens,
            domain=request.domain,
            rank=request.rank if self.machine.ranks else 0,
            prefill_slice=request.prefill_slice_tokens if self.machine.ranks else None,
            choices=request.sampling.choices,
            preemptible=request.preemptible and self.machine.ranks,
        )
        inbox = self._driver.submit(submission, token_ids, new_tokens=new_tokens)
        if isinstance(inbox, Refusal):
            raise _error_of(inbox)
        return self._numbers, inbox

    def _tell(self) -> None:
        """Publish what a shard's report has: load and cache events."""
        self._report()
        for event in self.engine.drain_events():
            if not self.machine.tells_cache:
                continue
            tell = self._listener.store if event.change is CacheChange.STORED else self._listener.evict
            tell(self.name, event.keys, event.tier)
        if self.machine.tells_load:
            self.on_load(self.name)

    def _report(self) -> None:
        if not self.machine.tells_load:
            return
        load = self.engine.load()
        self._load = Load(
            running=load.running,
            waiting=load.waiting + self._fetching,
            waiting_tokens=load.waiting_tokens + self._fetching_tokens,
            free_tokens=load.blocks_free * BLOCK_TOKENS,
            total_tokens=load.blocks_total * BLOCK_TOKENS,
            max_requests=self.machine.running,
            prefill_s_per_token=load.prefill_s_per_token or None,
            reported_at=self._clock() - _WAY_S,
            fetched=self._fetched if self._fetched.fetches else None,
        )


def _error_of(refusal: Refusal) -> Exception:
    return _REFUSALS.get(refusal.cause, InvalidRequest)(refusal.message)
