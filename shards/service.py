"""The gRPC service for routers: forwards their commands to the engine, and sends each step's report back."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from shards.loop import AnyEngine, EngineLoop
from shards.nouns import AdapterUse, CacheEvent, Cause, Load, Pinned, Report
from shards.wire import limits, translate
from shards.wire.assets import asset_pieces
from shards.wire.attachment import Attachment, OpenRequest
from shards.wire.facts import Fault, ShardFacts
from shards.wire.limits import KEY_BYTES
from shards.wire.v1 import shard_pb2 as wire
from shards.wire.v1 import shard_pb2_grpc

if TYPE_CHECKING:
    from shards.tracing import ShardTraces

Context = grpc.aio.ServicerContext[Any, Any]

_HEIRS_S = 1.0
"""A shard that is about to stop waits so long for its routers to name the shards that get its KV."""

_DRAINING = Fault(Cause.DRAINING, "this shard is about to stop and takes no new requests")


class ProtocolViolation(Exception):
    """A router sent a message that the protocol forbids; its stream ends."""


class ShardService(shard_pb2_grpc.ShardServicer):
    """Attaches routers to the engine behind `loop`.

    A stream that ends, for any reason, cancels its requests. A router that reads too slowly loses its stream: neither
    the engine nor another router ever waits for it. The engine validates requests. `traces` receive requests and steps,
    on the event loop. `adapters` are those of the engine before its first step.
    """

    def __init__(
        self,
        loop: EngineLoop,
        facts: ShardFacts,
        assets: Path | None,
        *,
        outbox_bytes: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        traces: ShardTraces | None = None,
        adapters: AdapterUse | None = None,
    ) -> None:
        self.facts, self.is_draining = facts, False
        self._drains_at = self._leaves_at = clock()
        self._named = 0
        self.epoch = (rng or random.SystemRandom()).getrandbits(64)
        self._loop, self._assets = loop, assets
        self._outbox_bytes, self._clock = outbox_bytes, clock
        self._attachments: dict[int, Attachment] = {}
        self._streams = itertools.count()
        self._newest: Report | None = None
        self._refreshed_at = clock()
        self._traces = traces
        self._adapters = adapters
        loop.subscribe(self.hear)

    def __repr__(self) -> str:
        return f"<ShardService {self.facts.shard}: {len(self._attachments)} routers, {self.open_requests} requests>"

    @property
    def open_requests(self) -> int:
        """Requests of all routers that have not ended."""
        return sum(len(attachment.requests) for attachment in self._attachments.values())

    @property
    def is_quiet(self) -> bool:
        """Whether every request has ended and its router has got the end."""
        return all(attachment.is_quiet for attachment in self._attachments.values())

    @property
    def is_handed_over(self) -> bool:
        """Whether nothing is offered to other shards any more, and no router is about to name such shards."""
        if self._named or self._loop.is_handing_over:
            return False
        is_late = self._clock() - self._drains_at >= _HEIRS_S
        attachments = self._attachments.values()
        return is_late or not self.facts.kv_group or all(each.has_named_heirs for each in attachments)

    def drain(self, within_s: float) -> None:
        """Refuse new requests, and tell routers at once; this shard stops after `within_s` at the latest."""
        self.is_draining, self._drains_at = True, self._clock()
        self._leaves_at = self._drains_at + within_s
        self.refresh(0.0)

    async def Attach(self, request_iterator: AsyncIterable[wire.Command], context: Context) -> None:  # noqa: N802
        """Serve one router until either side ends the stream."""
        attachment = Attachment(next(self._streams), self.epoch, limit_bytes=self._outbox_bytes, clock=self._clock)
        self._attachments[attachment.stream] = attachment
        # before any report: `abort` would send it a second time and fail if the first write is cancelled in its midst
        await context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(attachment, request_iterator))
        writer = asyncio.create_task(self._write(attachment, context))
        try:
            await asyncio.wait((reader, writer, attachment.verdict), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._detach(attachment)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if attachment.verdict.done():
            verdict = attachment.verdict.result()
            await context.abort(verdict.code, verdict.message)

    async def Assets(  # noqa: N802
        self,
        request: wire.AssetsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[wire.AssetPiece]:
        """Stream the model's files."""
        if self._assets is not None:
            async for piece in asset_pieces(self._assets):
                yield piece

    def hear(self, report: Report) -> None:
        """Send each router its part of a step's report, and every router the cache events."""
        self._newest = report
        self._adapters = report.adapters or self._adapters
        if self._traces is not None:
            self._traces.hear(report)
        shares = translate.shares(report)
        cache = list(translate.cache_pieces(report.cache))
        for attachment in tuple(self._attachments.values()):
            attachment.hear(
                [*shares.get(attachment.stream, ()), *cache],
                step=report.step,
                load=self._seen(report.load),
                adapters=report.adapters,
            )

    def refresh(self, interval_s: float) -> None:
        """Send the newest load to routers that have received none for `interval_s`, and heartbeats to those that have
        received nothing for that of the facts. End the streams of routers that sent nothing for too long.
        """
        now, newest = self._clock(), self._newest
        if now - self._refreshed_at > 2 * interval_s + self.facts.heartbeat_s:
            # this process had no CPU: what routers sent meanwhile was not read yet
            for attachment in self._attachments.values():
                attachment.heard_at = now
        self._refreshed_at = now
        for attachment in tuple(self._attachments.values()):
            if newest is not None:
                attachment.refresh(step=newest.step, load=self._seen(newest.load), interval_s=interval_s)
            if self.facts.heartbeat_s:
                attachment.beat(step=newest.step if newest else 0, interval_s=self.facts.heartbeat_s)
            if attachment.is_silent(now):
                attachment.end(grpc.StatusCode.UNAVAILABLE, "this router sent no heartbeat")

    def end_all(self, code: grpc.StatusCode, message: str) -> None:
        """End every stream."""
        for attachment in tuple(self._attachments.values()):
            attachment.end(code, message)

    def check(self) -> None:
        """Raise AssertionError if the state of a stream is inconsistent."""
        for stream, attachment in self._attachments.items():
            assert attachment.stream == stream, "a stream is stored under another stream's number"
            attachment.check()

    def _seen(self, load: Load) -> Load:
        """`load` as routers receive it."""
        return replace(load, draining=True) if self.is_draining else load

    async def _read(self, attachment: Attachment, commands: AsyncIterable[wire.Command]) -> None:
        try:
            async for command in commands:
                attachment.is_busy = True
                await self._obey(attachment, command)
                attachment.heard_at, attachment.is_busy = self._clock(), False
        except ProtocolViolation as violation:
            attachment.end(grpc.StatusCode.INVALID_ARGUMENT, str(violation))

    async def _write(self, attachment: Attachment, context: Context) -> None:
        while True:
            report = await attachment.outbox.take()
            attachment.is_writing = True
            await context.write(report)
            attachment.is_writing = False

    async def _obey(self, attachment: Attachment, command: wire.Command) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            await self._greet(attachment, command.hello)
        elif not attachment.router:
            raise ProtocolViolation("the first command must be a Hello")
        elif kind == "heartbeat":
            return
        elif kind == "submit":
            await self._submit(attachment, command.submit)
        elif kind == "prompt":
            await self._extend(attachment, command.prompt)
        elif kind == "pace":
            await self._pace(attachment, command.pace)
        elif kind == "cancel":
            await self._cancel(attachment, command.cancel.request)
        elif kind == "pin":
            await self._pin(attachment, command.pin)
        elif kind == "unpin":
            name, call = command.unpin.name, command.unpin.call
            await self._loop.ask_in_turn(lambda engine: engine.unpin(name), partial(attachment.answer, call))
        elif kind == "hand_over":
            self._hand_over(attachment, tuple(command.hand_over.address))
        elif kind == "clear":
            domain, call = command.clear.domain, command.clear.call
            await self._loop.ask_in_turn(lambda engine: engine.clear_cache(domain), partial(attachment.answer, call))
        else:
            raise ProtocolViolation("this shard does not know the command; is it older than the router?")

    async def _greet(self, attachment: Attachment, hello: wire.Hello) -> None:
        if attachment.router:
            raise ProtocolViolation("a second Hello")
        attachment.router = hello.router or "unnamed"
        attachment.heartbeat_s = hello.heartbeat_ms / 1000
        welcomed = asyncio.Event()

        # Runs between the reports of two steps, so that no cache event is lost between the snapshot and later events.
        def answer(snapshot: tuple[CacheEvent, ...]) -> None:
            attachment.welcome(self.facts, snapshot, self._adapters)
            welcomed.set()

        self._loop.ask(lambda engine: engine.snapshot(), answer)
        await welcomed.wait()

    async def _submit(self, attachment: Attachment, submit: wire.Submit) -> None:
        if submit.request in attachment.requests:
            # the engine ends the existing request; its end is sent as a rejection
            fault = Fault(Cause.INVALID, f"request {submit.request} was submitted twice")
            attachment.requests[submit.request].fault = fault
            await self._cancel(attachment, submit.request)
            return
        key = translate.RequestKey(attachment.stream, submit.request)
        submission = translate.submission(submit, key, now_s=self._clock())
        if self.is_draining:
            attachment.refuse(submission, _DRAINING, step=self._newest.step if self._newest else 0)
        else:
            attachment.requests[submit.request] = OpenRequest(submission.ends)
            if self._traces is not None:
                self._traces.begin(submission, submit.trace)
            await self._loop.put(lambda engine: engine.submit(submission))

    def _hand_over(self, attachment: Attachment, heirs: Sequence[str]) -> None:
        attachment.has_named_heirs = True
        left_s = self._leaves_at - self._clock()
        if not (heirs and self.is_draining and left_s > 0):
            return
        self._named += 1

        def begun(_: None) -> None:
            self._named -= 1

        self._loop.ask(lambda engine: engine.hand_over(heirs, within_s=left_s), begun)

    async def _extend(self, attachment: Attachment, prompt: wire.Prompt) -> None:
        if prompt.request in attachment.requests:
            key = translate.RequestKey(attachment.stream, prompt.request)
            await self._loop.put(lambda engine: engine.extend(key, prompt.token_ids))

    async def _pace(self, attachment: Attachment, pace: wire.Pace) -> None:
        if pace.request not in attachment.requests:
            return
        key = translate.RequestKey(attachment.stream, pace.request)
        rank = pace.rank if pace.HasField("rank") else None
        prefill_slice = pace.prefill_slice if pace.HasField("prefill_slice") else None
        paused = pace.paused if pace.HasField("paused") else None
        await self._loop.put(lambda engine: engine.pace(key, rank=rank, prefill_slice=prefill_slice, paused=paused))

    async def _cancel(self, attachment: Attachment, request: int) -> None:
        if request in attachment.requests:
            key = translate.RequestKey(attachment.stream, request)
            await self._loop.put(lambda engine: engine.cancel(key))

    async def _pin(self, attachment: Attachment, pin: wire.Pin) -> None:
        if len(pin.name) > limits.PIN_NAME_CHARACTERS or len(pin.keys) % KEY_BYTES:
            raise ProtocolViolation("a pin's name is too long, or its keys are not whole uint64s")
        name, domain, for_s = pin.name, pin.domain, pin.for_ms / 1000
        keys = translate.unpack_keys(pin.keys)

        def answer(found: Pinned) -> None:
            attachment.answer(pin.call, found.pinned, held=found.held)

        await self._loop.ask_in_turn(lambda engine: engine.pin(name, keys, domain=domain, for_s=for_s), answer)

    def _detach(self, attachment: Attachment) -> None:
        del self._attachments[attachment.stream]
        attachment.outbox.clear()
        keys = [translate.RequestKey(attachment.stream, request) for request in attachment.requests]

        def cancel(engine: AnyEngine) -> None:
            for key in keys:
                engine.cancel(key)

        if keys:
            self._loop.post(cancel)
