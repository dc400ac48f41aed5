"""The router's end of the link to one shard: attached, lost, attached again, for as long as it runs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from backends.base import CacheListener, DraftedTokens, Fetched, Load
from backends.reconnect import Backoff
from backends.shard.defaults import defaults_in
from backends.shard.inbox import Inbox
from backends.shard.outgoing import Outgoing
from backends.shard.turns import Turns
from policies.errors import BackendFailed, BackendLost, Unreached
from shards.nouns import AdapterUse
from shards.wire import limits
from shards.wire.translate import adapters_of, drawn_of, unpack_keys
from shards.wire.v1 import shard_pb2 as wire
from shards.wire.v1 import shard_pb2_grpc
from tls.certificates import Certificates
from tls.errors import TlsError
from tls.grpc_client import open_channel

_log = logging.getLogger(__name__)

_REQUEST_IDS = 2**32

_ON_DISK = tuple(wire.DiskUse.DESCRIPTOR.fields_by_name)

_KEYS_AT_ONCE = 1000
"""Keys of cache events that go to the listener in one go: 1 to 3 ms if all are new to the index (busy, 2026-11)."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a router attaches: its name, TLS if any, and its timeouts.

    `connect_s` bounds connecting, `attach_s` greeting and fetching the model's files; `probe_s` one health check,
    `answer_s` the answer to one command on the cache. `heartbeat_s` is the longest time without any command.
    `generation_config`: auto samples by the file of that name where clients name nothing else, off does not.
    """

    router: str = "router"
    tls: Certificates | None = None
    connect_s: float = 5.0
    attach_s: float = 30.0
    probe_s: float = 2.0
    answer_s: float = 10.0
    heartbeat_s: float = limits.HEARTBEAT_S
    first_backoff_s: float = 0.1
    longest_backoff_s: float = 2.0
    generation_config: Literal["auto", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard's properties since its Welcome."""

    epoch: int
    welcome: wire.Welcome
    assets: dict[str, bytes]
    tokenizer: Tokenizer | None
    defaults: Mapping[str, float]


@dataclass(slots=True)
class _Session:
    """One attachment, from Welcome to the end of its stream: the newest reported `step`, and when it came first.

    The shard promised a report every `heartbeat_s`, 0 if it did not; the newest came at `heard_at`. `is_hearing`: it is
    processed now.
    """

    channel: grpc.aio.Channel
    outgoing: Outgoing
    heartbeat_s: float
    heard_at: float
    is_hearing: bool = False
    is_leaving: bool = False
    step: int = 0
    worked_at: float | None = None
    spoken: asyncio.Event = field(default_factory=asyncio.Event)


class ShardLink:
    """Keeps one Attach stream to `address` and distributes its reports.

    `shard` is the last Welcome, `load` and `adapters` (None: it serves none) are the newest reports; all outlive the
    stream. Whenever a stream is lost, the inboxes of all its requests fail at once; when a new one is there, `listener`
    gets `clear`, then the snapshot.
    An idle stream is also lost if the shard promised heartbeats and sent none for a while (limits.SILENT_BEATS).
    `on_load` gets the name after each report of load, when the rest of the report was processed too; `on_leaving` gets
    it when a shard that exchanges KV is about to stop, so that `tell` can name the shards that get its KV.

    A large snapshot is processed in pieces that each take one of the `turns`, which many links may share. The
    next report is read when all of this one was processed: events stay in order, and the rest waits in the stream.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        listener: CacheListener | None = None,
        on_load: Callable[[str], None] = lambda _: None,
        on_leaving: Callable[[str], None] = lambda _: None,
        turns: Turns | None = None,
        options: LinkOptions = LinkOptions(),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name, self.address = name, address
        self.shard: Shard | None = None
        self.load = Load()
        self.adapters: AdapterUse | None = None
        self._listener, self._options, self._clock, self._sleep = listener, options, clock, sleep
        self._on_load, self._on_leaving, self._turns = on_load, on_leaving, turns or Turns()
        self._backoff = Backoff(
            rng or random.Random(), first_s=options.first_backoff_s, longest_s=options.longest_backoff_s
        )
        self._numbers = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._answers: dict[int, asyncio.Future[wire.CacheAnswer]] = {}
        self._session: _Session | None = None
        self._trouble = "no attempt to reach it has ended yet"
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "attached" if self._session else self._trouble
        return f"<ShardLink {self.name} at {self.address}: {len(self._inboxes)} requests, {state}>"

    def start(self) -> None:
        """Begin to attach in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_attached(), name=f"link to {self.name}")

    async def close(self) -> None:
        """Detach; open requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._lose("it was closed")

    async def probe(self) -> None:
        """Return if the shard is attached and reports that it serves. Raises BackendFailed."""
        if self._task is not None:
            await self._settled.wait()
        session = self._attached()
        stub = health_pb2_grpc.HealthStub(session.channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._options.probe_s)
        except grpc.aio.AioRpcError as error:
            raise BackendFailed(f"{self.name} does not answer: {_reason_of(error)}") from error
        except asyncio.CancelledError as error:
            # grpc cancels the calls of a channel that is closed under them; a cancellation of ours goes on
            if _is_being_cancelled():
                raise
            raise self._unreachable() from error
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise BackendFailed(f"{self.name} is about to stop")

    def submit(self, submit: wire.Submit, token_ids: bytes) -> tuple[int, Inbox]:
        """Open a request; returns its number and the inbox of its answer. Raises BackendFailed if not attached."""
        session = self._attached()
        if not session.outgoing.has_room:
            raise Unreached(f"{self.name} takes no commands: its stream is stuck")
        number = next(free for free in self._candidates() if free not in self._inboxes)
        submit.request = number
        inbox = self._inboxes[number] = Inbox(max(1, submit.choices))
        session.outgoing.submit(submit, token_ids)
        session.spoken.set()
        return number, inbox

    def forget(self, number: int) -> None:
        """Let go of a request, and cancel it if it has not ended."""
        if self._inboxes.pop(number, None) is not None and self._session is not None:
            self._session.outgoing.cancel(number)
            self._session.spoken.set()

    async def ask(self, command: wire.Command) -> wire.CacheAnswer:
        """The answer to `command`, a Pin, Unpin or Clear without a call number. Raises BackendFailed."""
        session = self._attached()
        if not session.outgoing.has_room:
            raise Unreached(f"{self.name} takes no commands: its stream is stuck")
        call = next(free for free in self._candidates() if free not in self._answers)
        answer: asyncio.Future[wire.CacheAnswer] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        getattr(command, command.WhichOneof("command") or "").call = call
        session.outgoing.say(command)
        session.spoken.set()
        try:
            async with asyncio.timeout(self._options.answer_s):
                return await answer
        except TimeoutError as error:
            raise BackendFailed(f"{self.name} did not answer within {self._options.answer_s:g} s") from error
        finally:
            del self._answers[call]

    def tell(self, command: wire.Command) -> None:
        """Send `command`, which is not answered, if the shard is attached and takes commands."""
        if self._session is not None and self._session.outgoing.has_room:
            self._session.outgoing.say(command)
            self._session.spoken.set()

    def check(self) -> None:
        """Raise AssertionError if a request is left that has ended, or that no stream carries."""
        assert self._session or not (self._inboxes or self._answers), "requests without a stream"
        assert not any(inbox.is_over for inbox in self._inboxes.values()), "a request that has ended is left"
        if self._session:
            self._session.outgoing.check()

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._inboxes)

    def _candidates(self) -> Iterator[int]:
        return (number % _REQUEST_IDS for number in self._numbers)

    def _attached(self) -> _Session:
        if self._session is None:
            raise self._unreachable()
        return self._session

    def _unreachable(self) -> BackendFailed:
        return Unreached(f"{self.name} cannot be reached: {self._trouble}", hint=f"is {self.address} up?")

    async def _keep_attached(self) -> None:
        while True:
            began_at = self._clock()
            try:
                await self._attach()
            except grpc.aio.AioRpcError as error:
                self._lose(_reason_of(error))
            except TimeoutError:
                self._lose(f"it did not welcome us within {self._options.attach_s:g} s")
            except (BackendFailed, TlsError) as error:
                self._lose(error.message)
            except Exception as error:  # noqa: BLE001 - the supervisor: a link that ends for good would be silent
                _log.exception("the link to %s failed and is made anew", self.name)
                self._lose(f"{type(error).__name__}: {error}")
            await self._sleep(self._backoff.next_s(self._clock() - began_at))

    async def _attach(self) -> None:
        """Attach and listen until the stream ends, which raises."""
        async with await open_channel(self.address, self._options.tls, limits.CLIENT_OPTIONS) as channel:
            await self._connect(channel)
            stub: Any = shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attach()
            async with asyncio.timeout(self._options.attach_s) as attaching:
                welcomed = await self._greet(call)
                welcome = welcomed.welcome
                session = _Session(channel, Outgoing(welcome.window_tokens), welcome.heartbeat_ms / 1000, self._clock())
                # a shard that promises no heartbeats does not know the router's either
                heartbeat_s = (self._options.heartbeat_s or None) if session.heartbeat_s else None
                # heartbeats begin with the welcome: fetching the model's files takes longer than one
                speaking = asyncio.create_task(_speak(call, session, heartbeat_s))
                try:
                    self._begin(session, await self._meet(stub, welcomed))
                    attaching.reschedule(None)
                    await self._listen(call, session)
                finally:
                    speaking.cancel()
                    await asyncio.gather(speaking, return_exceptions=True)

    async def _greet(self, call: Any) -> wire.StepReport:
        """The first report, which has the shard's Welcome. Raises BackendFailed."""
        heartbeat_ms = round(self._options.heartbeat_s * 1000)
        await call.write(wire.Command(hello=wire.Hello(router=self._options.router, heartbeat_ms=heartbeat_ms)))
        first = await call.read()
        if not isinstance(first, wire.StepReport) or not first.HasField("welcome"):
            raise BackendFailed("it did not welcome us")
        return first

    def _begin(self, session: _Session, shard: Shard) -> None:
        """Use `session` for what follows: the listener forgets what it knew of this shard's cache."""
        if shard is not self.shard:
            self.shard, self.adapters = shard, None
        if self._listener is not None:
            self._listener.clear(self.name)
        # a shard that drained and is back drains no longer
        self.load = replace(self.load, draining=False)
        session.heard_at = self._clock()
        self._session = session
        self._backoff.reset()
        self._settled.set()

    async def _listen(self, call: Any, session: _Session) -> None:
        """Distribute the reports until the stream ends, which raises."""
        watching: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as silence:
                if session.heartbeat_s:
                    watching = asyncio.create_task(self._watch(session, silence))
                while (report := await call.read()) is not grpc.aio.EOF:
                    session.is_hearing = True
                    await self._hear(report, session)
                    session.heard_at, session.is_hearing = self._clock(), False
        except TimeoutError as error:
            raise BackendFailed(f"it sent nothing for {limits.SILENT_BEATS * session.heartbeat_s:g} s") from error
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        raise BackendFailed("it ended the stream")

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        """Return once the channel is connected or has failed, which its first call then tells. Raises BackendFailed."""
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(self._options.connect_s):
                while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state()
        except TimeoutError as error:
            # a host that is back is reached by a new connection at once, and by an old one when that tries again
            raise BackendFailed(f"no connection in {self._options.connect_s:g} s") from error

    async def _watch(self, session: _Session, silence: asyncio.Timeout) -> None:
        """End the stream once nothing came for too long while the link is idle.

        Requests keep it: their shard may be paused for a moment, and the router gives up each one in its own time.
        """
        limit_s = limits.SILENT_BEATS * session.heartbeat_s
        while True:
            before = self._clock()
            left_s = session.heard_at + limit_s - before
            if left_s <= 0 and not (session.is_hearing or self._inboxes or self._answers):
                silence.reschedule(asyncio.get_running_loop().time())
                return
            pause_s = left_s if left_s > 0 else limit_s / 10
            await asyncio.sleep(pause_s)
            if self._clock() - before > 1.5 * pause_s + 0.1:
                # a router that had no CPU itself has not read yet what came
                session.heard_at = self._clock()

    async def _meet(self, stub: Any, first: wire.StepReport) -> Shard:
        """The shard that welcomed us, with its files; they are fetched once per epoch."""
        if self.shard is not None and self.shard.epoch == first.epoch:
            return self.shard
        assets: dict[str, bytearray] = {}
        async for piece in stub.Assets(wire.AssetsRequest()):
            assets.setdefault(piece.file, bytearray()).extend(piece.content)
        files = {name: bytes(content) for name, content in assets.items()}
        tokenizer = None
        if "tokenizer.json" in files:
            # Parsing takes a second for vocabularies of 200k tokens.
            tokenizer = await asyncio.to_thread(Tokenizer.from_buffer, files["tokenizer.json"])
        recommended = files.get("generation_config.json") if self._options.generation_config == "auto" else None
        defaults = {} if recommended is None else defaults_in(recommended, self.name)
        return Shard(first.epoch, first.welcome, files, tokenizer, defaults)

    async def _hear(self, report: wire.StepReport, session: _Session) -> None:
        if report.step > session.step:
            session.step, session.worked_at = report.step, self._clock()
        self._hear_state(report, session)
        if self._listener is not None:
            await self._hear_cache(report.cache, self._listener)
        for progress in report.progress:
            session.outgoing.grant(progress.request, progress.computed_tokens)
            session.spoken.set()
            if inbox := self._inboxes.get(progress.request):
                inbox.hear_progress(progress)
        for prediction in report.predictions:
            if inbox := self._inboxes.get(prediction.request):
                inbox.hear_prediction(prediction.ttft_s)
        if report.HasField("tokens"):
            for number, drawn in drawn_of(report.tokens):
                if inbox := self._inboxes.get(number):
                    inbox.hear_tokens(drawn)
        for end in report.finished:
            self._hear_end(end, session.outgoing)
        for answer in report.answers:
            waiting = self._answers.get(answer.call)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        if report.HasField("load") or report.HasField("adapters"):
            self._on_load(self.name)
            self._note_leaving(report.load, session)

    def _hear_state(self, report: wire.StepReport, session: _Session) -> None:
        if report.HasField("load"):
            self.load = self._load_of(report.load, session)
        if report.HasField("adapters"):
            self.adapters = adapters_of(report.adapters, before=self.adapters)

    def _note_leaving(self, load: wire.Load, session: _Session) -> None:
        if load.draining and not session.is_leaving and self.shard and self.shard.welcome.kv_group:
            session.is_leaving = True
            self._on_leaving(self.name)

    def _hear_end(self, end: wire.Finished, outgoing: Outgoing) -> None:
        outgoing.drop(end.request)
        if inbox := self._inboxes.get(end.request):
            inbox.hear_end(end)
            if inbox.is_over:
                del self._inboxes[end.request]

    async def _hear_cache(self, events: Iterable[wire.CacheEvent], listener: CacheListener) -> None:
        room = _KEYS_AT_ONCE
        for event in events:
            if event.kind == wire.CacheEvent.CLEARED:
                listener.clear(self.name)
            elif event.kind in (wire.CacheEvent.STORED, wire.CacheEvent.EVICTED):
                tell = listener.store if event.kind == wire.CacheEvent.STORED else listener.evict
                keys = unpack_keys(event.keys)
                for start in range(0, len(keys), _KEYS_AT_ONCE):
                    piece = keys[start : start + _KEYS_AT_ONCE]
                    if len(piece) > room:
                        await self._turns.take()
                        room = _KEYS_AT_ONCE
                    room -= len(piece)
                    tell(self.name, piece, event.tier)

    def _load_of(self, load: wire.Load, session: _Session) -> Load:
        welcome = self.shard.welcome if self.shard else wire.Welcome()
        return Load(
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            free_tokens=load.blocks_free * welcome.block_tokens,
            total_tokens=load.blocks_total * welcome.block_tokens or None,
            max_requests=welcome.max_requests or None,
            prefill_s_per_token=load.prefill_s_per_token or None,
            reported_at=self._clock(),
            draining=load.draining,
            pinnable_tokens=load.blocks_pinnable * welcome.block_tokens if welcome.keeps_cache else None,
            drafts=_drafts(load),
            worked_at=session.worked_at,
            uncaptured_steps=load.uncaptured_steps,
            fetched=_fetched(load.peers, welcome.block_tokens) if load.HasField("peers") else None,
            disk_blocks={kind: getattr(load.disk, kind) for kind in _ON_DISK} if load.HasField("disk") else {},
        )

    def _lose(self, trouble: str) -> None:
        """Fail all requests and calls that wait on the lost stream."""
        self._session, self._trouble = None, trouble
        self._settled.set()
        # a shard that drains ends by itself, and no request is the cause of that
        kind = BackendFailed if self.load.draining else BackendLost
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.fail(kind(f"{self.name} was lost: {trouble}"))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(kind(f"{self.name} was lost: {trouble}"))


async def _speak(call: Any, session: _Session, heartbeat_s: float | None) -> None:
    """Send outgoing messages whenever there are any, and a heartbeat once nothing was sent for `heartbeat_s`, whatever
    is heard meanwhile; a stream that takes no more is ended.
    """
    now = asyncio.get_running_loop().time
    beat_at = None if heartbeat_s is None else now() + heartbeat_s
    try:
        while True:
            session.spoken.clear()
            command = session.outgoing.next()
            if command is None and beat_at is not None and now() >= beat_at:
                command = wire.Command(heartbeat=wire.Heartbeat())
            if command is not None:
                await call.write(command)
                beat_at = None if heartbeat_s is None else now() + heartbeat_s
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    await session.spoken.wait()
    finally:
        call.cancel()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _reason_of(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def _drafts(load: wire.Load) -> dict[str, DraftedTokens]:
    by_model = DraftedTokens(load.model_drafted_tokens, load.model_accepted_tokens)
    by_prompt = DraftedTokens(load.drafted_tokens - by_model.verified, load.accepted_tokens - by_model.accepted)
    return {source: drafts for source, drafts in (("prompt", by_prompt), ("model", by_model)) if drafts.verified}


def _fetched(use: wire.PeerUse, block_tokens: int) -> Fetched:
    tokens, taken_over = use.blocks * block_tokens, use.taken_over * block_tokens
    return Fetched(use.fetches, tokens, use.received_bytes, use.seconds, taken_over)
