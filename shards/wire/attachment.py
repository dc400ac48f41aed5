"""One router's stream as the shard sees it: its requests, and the messages queued for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import grpc

from shards.nouns import AdapterUse, CacheEvent, Finished, FinishReason, Load, Submission
from shards.wire import limits, translate
from shards.wire.facts import Fault, ShardFacts
from shards.wire.outbox import Outbox
from shards.wire.v1 import shard_pb2 as wire

FRESH_S = 1.0
"""An unchanged load is sent again this often, so that a router can tell idle from gone."""


@dataclass(slots=True)
class OpenRequest:
    """A request between its Submit and the end of its last choice. `fault` is the reason if the server cancelled it."""

    choices_left: int
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why the shard ends a stream."""

    code: grpc.StatusCode
    message: str


class Attachment:
    """One attached router: its requests, and its unsent messages. Lives on one event loop.

    `verdict` is done once the shard has decided to end this stream; then nothing is queued any more. The router sends
    something every `heartbeat_s`, 0 if it does not promise that. `heard_at`: when its newest command was carried out;
    while it `is_busy` with one, later ones are not read, however early the router sent them.
    """

    def __init__(self, stream: int, epoch: int, *, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.stream, self.epoch = stream, epoch
        self.router, self.heartbeat_s, self.heard_at = "", 0.0, clock()
        self.requests: dict[int, OpenRequest] = {}
        self.outbox: Outbox[wire.StepReport] = Outbox(limit_bytes)
        self.is_listening = self.is_writing = self.is_busy = self.has_named_heirs = False
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._load_sent: tuple[float, Load] | None = None
        self._adapters_sent: AdapterUse | None = None
        self._pushed_at = clock()

    def __repr__(self) -> str:
        return f"<Attachment {self.stream} of {self.router!r}: {len(self.requests)} requests, {self.outbox!r}>"

    @property
    def is_quiet(self) -> bool:
        """Have all requests ended, and has everything been sent? A message that is being written is not sent yet."""
        return not (self.requests or self.outbox.queued_bytes or self.is_writing)

    def welcome(self, facts: ShardFacts, snapshot: tuple[CacheEvent, ...], adapters: AdapterUse | None) -> None:
        """Queue the first report, the adapters and the cache's contents; every later step is reported."""
        self._push(wire.StepReport(epoch=self.epoch, welcome=facts.welcome(snapshot)))
        self._show_adapters(adapters)
        for piece in translate.cache_pieces(snapshot):
            self._push(wire.StepReport(epoch=self.epoch, cache=[translate.cache_event(piece)]))
        self.is_listening = True

    def hear(
        self, items: Iterable[translate.Item], *, step: int, load: Load, adapters: AdapterUse | None = None
    ) -> None:
        """Queue the effects of one step on this router, and `adapters` that changed; nothing if there are none."""
        if self.is_listening:
            self._show_adapters(adapters)
        settled = [self._settle(item) if isinstance(item, Finished) else item for item in items]
        if not settled or not self.is_listening:
            return
        reports = translate.step_reports(settled, epoch=self.epoch, step=step)
        reports[-1].load.CopyFrom(translate.load(load))
        self._load_sent = (self._clock(), load)
        for report in reports:
            self._push(report)

    def refresh(self, *, step: int, load: Load, interval_s: float) -> None:
        """Queue the newest `load` by itself if this router's is older than `interval_s` and may be out of date."""
        now = self._clock()
        if not self.is_listening:
            return
        if self._load_sent is not None:
            sent_at, sent = self._load_sent
            if now - sent_at < (FRESH_S if sent == load else interval_s):
                return
        self._load_sent = (now, load)
        self._push(wire.StepReport(epoch=self.epoch, step=step, load=translate.load(load)))

    def beat(self, *, step: int, interval_s: float) -> None:
        """Queue a report of nothing if none was queued for `interval_s`, and none waits."""
        is_due = self._clock() - self._pushed_at >= interval_s and not (self.outbox.queued_bytes or self.is_writing)
        if self.is_listening and is_due:
            self._push(wire.StepReport(epoch=self.epoch, step=step))

    def is_silent(self, now: float) -> bool:
        """Has the router sent nothing for too long, although it promised heartbeats?"""
        missed_s = limits.MISSED_BEATS * self.heartbeat_s
        return self.heartbeat_s > 0 and not self.is_busy and now - self.heard_at > missed_s

    def refuse(self, submission: Submission, fault: Fault, *, step: int) -> None:
        """Queue the rejection of a request that was not passed to the engine."""
        rejected = Finished(submission.key, 0, FinishReason.REJECTED, 0, 0, 0, message=fault.message, cause=fault.cause)
        ends = [translate.finished(replace(rejected, choice=choice)) for choice in range(submission.ends)]
        self._push(wire.StepReport(epoch=self.epoch, step=step, finished=ends))

    def answer(self, call: int, blocks: int, *, held: int = 0) -> None:
        """Queue the answer to a command on the cache."""
        if self.is_listening:
            answer = wire.CacheAnswer(call=call, blocks=blocks, held_blocks=held)
            self._push(wire.StepReport(epoch=self.epoch, answers=[answer]))

    def end(self, code: grpc.StatusCode, message: str) -> None:
        """End the stream. The first verdict stands."""
        if not self.verdict.done():
            self.outbox.clear()
            self.verdict.set_result(Verdict(code, message))

    def check(self) -> None:
        """Raise AssertionError if an ended request is still listed."""
        self.outbox.check()
        assert all(request.choices_left > 0 for request in self.requests.values()), "an ended request is left"

    def _show_adapters(self, adapters: AdapterUse | None) -> None:
        sent = self._adapters_sent
        if adapters is not None and adapters != sent:
            self._adapters_sent = adapters
            told = translate.adapters(adapters, known_before=None if sent is None else sent.known)
            self._push(wire.StepReport(epoch=self.epoch, adapters=told))

    def _settle(self, end: Finished) -> Finished:
        assert isinstance(end.key, translate.RequestKey), "only the server submits"
        request = self.requests[end.key.request]
        request.choices_left -= 1
        if request.choices_left == 0:
            del self.requests[end.key.request]
        if request.fault is None:
            return end
        return replace(end, reason=FinishReason.REJECTED, message=request.fault.message, cause=request.fault.cause)

    def _push(self, report: wire.StepReport) -> None:
        self._pushed_at = self._clock()
        if not self.verdict.done() and not self.outbox.push(report):
            message = f"{self.outbox.limit_bytes} bytes are queued for this router and it reads too slowly"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
