"""Detects missing messages of one source, and decides what to do about them. Pure: no socket, no clock.

Messages are numbered from 0 in each life of an engine. The known blocks are a subset of the engine's blocks as long as
an unbroken run of messages is applied to an empty start, wherever in the engine's life it begins: a block counts as
present only if its storing was received and its eviction could not be missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from backends.events.nouns import Batch, CacheEvent, Cleared
from router.fleet.feeds.health import FeedCounts, FeedState

_MOST_TRIES = 4
"""Most replays of one gap. Messages missing from four of them were never sent."""

_OLD_IN_A_ROW = 16
"""This many old messages in a row are no repeats: the engine has restarted, and its clock has gone back."""


@dataclass(frozen=True, slots=True)
class Message:
    """One numbered message. `epoch` names the life of the engine, if it reports that. `batch` None: unreadable."""

    seq: int
    batch: Batch | None
    epoch: str | None = None

    @property
    def sent_at(self) -> float | None:
        """When it was sent; an unreadable message counts as old."""
        return self.batch.sent_at if self.batch else -math.inf

    @property
    def events(self) -> tuple[CacheEvent, ...]:
        """Its events; an unreadable message counts as having cleared the cache."""
        return self.batch.events if self.batch else (Cleared(),)


@dataclass(frozen=True, slots=True)
class Replay:
    """A request to replay all messages from `start` on. `number` tells its answer from those to earlier requests."""

    number: int
    start: int


@dataclass(slots=True)
class Tracker:
    """Takes messages as they arrive and returns the events to apply.

    `replays`: whether lost messages can be requested; `wanted` is the request to make now. Without replays, a gap
    clears the known blocks. At most `most_held` messages wait for a replay. Times are seconds of the caller's clock.
    """

    replays: bool
    most_held: int = 4096
    check_every_s: float = 30.0
    state: FeedState = FeedState.EMPTY
    wanted: Replay | None = None
    counts: FeedCounts = field(default_factory=FeedCounts)
    heard_at: float | None = None
    is_whole: bool = False
    """Every message since the engine was empty was applied, so the known blocks are all that it holds."""
    _sure_at: float | None = None
    _applied: tuple[int, float | None] | None = None
    _newest: tuple[int, float | None] | None = None
    _anchor: tuple[int, float | None] | None = None
    _epoch: str | None = None
    _held: dict[int, Message] = field(default_factory=dict)
    _must_verify: bool = False
    _wishes: int = 0
    _tries: int = 0
    _old_run: tuple[int, int] = (-1, 0)

    def __repr__(self) -> str:
        at = self._applied[0] if self._applied else None
        return f"<Tracker {self.state.value} at {at}, {len(self._held)} held, wants {self.wanted}>"

    @property
    def applied(self) -> int | None:
        """The number of the newest message that was applied; None while nothing is known."""
        return self._applied[0] if self._applied else None

    @property
    def applied_at(self) -> float | None:
        """When the engine sent that message, in seconds of its clock."""
        return self._applied[1] if self._applied else None

    def age_s(self, now: float) -> float | None:
        """For how long the known blocks may have been out of date at `now`; None while nothing is known."""
        if self._applied is None:
            return None
        if self.state is FeedState.LIVE or self._sure_at is None:
            return 0.0
        return max(0.0, now - self._sure_at)

    def connected(self) -> list[CacheEvent]:
        """The source was reached, and messages may have been missed before."""
        if self.replays:
            # the next message may be of another life of the engine, even if its number fits
            self._must_verify, self._tries = True, 0
            self._ask()
        return []

    def lost(self, now: float) -> list[CacheEvent]:
        """The source cannot be reached; messages are missed from now on."""
        self.wanted = None
        self._held.clear()
        if not self.replays:
            return self._forget()
        self._doubt(now)
        return []

    def doubt(self, now: float) -> None:
        """Messages are late for now; a lost one will show by its number."""
        if self.state is FeedState.LIVE and self.wanted is None:
            self._doubt(now)

    def trust(self, now: float) -> None:
        """Messages arrive in time again."""
        if self.state is FeedState.GAP and self.wanted is None and not self.replays:
            self.state, self._sure_at = FeedState.LIVE, now

    def hear(self, message: Message, now: float) -> list[CacheEvent]:
        """A message arrived as it was sent."""
        self.heard_at = now
        if self._is_of_another_life(message):
            self.counts.restarts += 1
            return self._start_over(message, now)
        self._epoch = message.epoch or self._epoch
        if self._is_old(message):
            self.counts.repeats += 1
            if not self._is_one_too_many(message):
                self._wonder(message, now)
                return []
            self.counts.restarts += 1
            return self._start_over(message, now)
        self._old_run = (-1, 0)
        self._see(message)
        if self.wanted is not None and self.state is not FeedState.LIVE:
            return self._hold(message, now)
        if self._applied is None or message.seq == self._applied[0] + 1:
            return self._apply(message, now)
        self.counts.gaps += 1
        self._doubt(now)
        if self.replays:
            self._tries = 0
            self._ask()
            return self._hold(message, now)
        self.counts.resyncs += 1
        return self._forget() + self._apply(message, now)

    def replayed(self, number: int, message: Message, now: float) -> list[CacheEvent]:
        """A message arrived in answer to the request with this `number`."""
        if self.wanted is None or self.wanted.number != number:
            return []
        self.heard_at = now
        anchor, cleared = self._anchor, list[CacheEvent]()
        if anchor is not None and message.seq < anchor[0]:
            return []
        self._anchor = None
        if anchor is not None and message.seq == anchor[0]:
            if message.sent_at == anchor[1]:
                return []
            self.counts.restarts += 1
            return self._start_over(None, now)
        if anchor is not None:
            # the known messages end before the oldest that can be replayed, or belong to another life
            cleared = self._forget()
        if self._applied is not None and message.seq <= self._applied[0]:
            return cleared
        if self._applied is not None and message.seq > self._applied[0] + 1:
            cleared += self._forget()
        self.counts.gaps += self.state is FeedState.LIVE
        self._doubt(now)
        self.state = FeedState.RESYNC
        self._see(message)
        return cleared + self._apply(message, now)

    def replay_ended(self, number: int, now: float) -> list[CacheEvent]:
        """The answer to the request with this `number` is complete."""
        if self.wanted is None or self.wanted.number != number:
            return []
        self.heard_at = now
        if self._anchor is not None:
            # it does not even have the last applied message: that was another life
            self._anchor = None
            self.counts.restarts += 1
            return self._start_over(None, now)
        self._must_verify = False
        out = self._apply_held(now)
        if self._held and self._tries < _MOST_TRIES:
            self._ask()
            return out
        # no engine has sent a message that is missing in so many replays
        self.counts.dropped += len(self._held)
        self._held.clear()
        self._newest = self._applied
        self._settle(now)
        return out

    def replay_failed(self, number: int, now: float) -> list[CacheEvent]:
        """The request with this `number` gets no answer: start over with the next messages."""
        if self.wanted is None or self.wanted.number != number:
            return []
        if self.state is FeedState.LIVE:
            # it was only a check, and no message is known to be missing
            self.wanted = self._anchor = None
            self._sure_at = now
            return []
        self._must_verify, self._anchor = False, None
        out = self._forget()
        while self._held:
            message = self._held.pop(min(self._held))
            if self._applied is not None and message.seq != self._applied[0] + 1:
                out += self._forget()
            out += self._apply(message, now)
        self._settle(now)
        return out

    def tick(self, now: float) -> None:
        """Time has passed. If a source was silent for `check_every_s`, request a replay to check for losses."""
        if not self.replays or self.wanted is not None or self.state not in (FeedState.LIVE, FeedState.EMPTY):
            return
        if self._sure_at is None:
            self._sure_at = now
        elif now - self._sure_at >= self.check_every_s:
            self._sure_at, self._tries = now, 0
            self._ask()

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._held) <= self.most_held, "too many messages wait"
        assert self.replays or self.wanted is None, "a replay is wanted from a source without replays"
        assert self._applied is None or self._newest is None or self._newest[0] >= self._applied[0], "newest is not"
        if self.state is FeedState.LIVE:
            assert not self._held, "messages wait although none is missing"
            assert self._applied is not None, "live without any message"
            assert self._newest is None or self._newest[0] == self._applied[0], "live although a message is missing"

    def _is_of_another_life(self, message: Message) -> bool:
        if message.epoch is not None and self._epoch is not None:
            return message.epoch != self._epoch
        if self._newest is None or message.seq > self._newest[0]:
            return False
        newest_sent_at = self._newest[1]
        if message.sent_at is None or newest_sent_at is None:
            # an engine that numbers messages without a time repeats none
            return True
        return -math.inf < newest_sent_at < message.sent_at

    def _is_old(self, message: Message) -> bool:
        """Whether it was received before, or is useless because of later messages."""
        if message.seq in self._held or (self._applied is not None and message.seq <= self._applied[0]):
            return True
        if self._newest is None or self._newest[1] is None or message.sent_at is None:
            return False
        if message.seq > self._newest[0]:
            # a higher number with an earlier time: a late message of the engine's previous life
            return message.batch is not None and message.sent_at < self._newest[1]
        return self.wanted is None

    def _is_one_too_many(self, old: Message) -> bool:
        """Whether so many old messages came in a row that the engine must have restarted."""
        before, length = self._old_run
        self._old_run = (old.seq, length + 1 if old.seq == before + 1 else 1)
        return self._old_run[1] >= _OLD_IN_A_ROW

    def _wonder(self, old: Message, now: float) -> None:
        """A higher number with an earlier time is a late message of the previous life, or the engine's clock was set
        back: request a replay to find out, if there are replays."""
        if self._newest is not None and old.seq > self._newest[0]:
            self._doubt(now)
            if self.replays and self.wanted is None:
                self._tries = 0
                self._ask()

    def _see(self, message: Message) -> None:
        if self._newest is None or message.seq > self._newest[0]:
            sent_at = self._newest[1] if self._newest and message.batch is None else message.sent_at
            self._newest = (message.seq, sent_at)

    def _start_over(self, message: Message | None, now: float) -> list[CacheEvent]:
        """The engine was restarted: clear the blocks of its previous life."""
        out: list[CacheEvent] = [Cleared(is_empty=True) for _ in self._forget()]
        self._held.clear()
        self._newest, self._epoch, self._must_verify, self._tries = None, None, False, 0
        self._old_run = (-1, 0)
        self.state = FeedState.EMPTY
        if self.replays:
            self._ask()
        if message is None:
            return out
        self._newest, self._epoch = (message.seq, message.sent_at), message.epoch
        return out + (self._hold(message, now) if self.replays else self._apply(message, now))

    def _ask(self) -> None:
        self._wishes += 1
        self._tries += 1
        self._anchor = self._applied
        self.wanted = Replay(self._wishes, self._applied[0] if self._applied else 0)

    def _hold(self, message: Message, now: float) -> list[CacheEvent]:
        if len(self._held) >= self.most_held:
            # the gap that this leaves is noticed after the replay
            self.counts.dropped += len(self._held)
            self._held.clear()
        self._held[message.seq] = message
        if self.state is not FeedState.GAP or self._must_verify:
            return []
        out = self._apply_held(now)
        if not self._held:
            # the missing messages had only been overtaken
            self._settle(now)
        return out

    def _apply_held(self, now: float) -> list[CacheEvent]:
        """Apply held messages up to the next gap; drop those that were applied meanwhile."""
        out: list[CacheEvent] = []
        for seq in sorted(self._held):
            if self._applied is not None and seq > self._applied[0] + 1:
                break
            message = self._held.pop(seq)
            if self._applied is None or seq > self._applied[0]:
                out += self._apply(message, now)
        return out

    def _apply(self, message: Message, now: float) -> list[CacheEvent]:
        self._applied = (message.seq, message.sent_at)
        if self.wanted is None or self.state is FeedState.LIVE:
            self.state, self._sure_at = FeedState.LIVE, now
        self.counts.batches += 1
        # message 0 is the first in each life of the engine
        self.is_whole = _is_whole(message, self.is_whole or message.seq == 0)
        return list(message.events)

    def _forget(self) -> list[CacheEvent]:
        """Clear the known blocks, if there are any."""
        if self._applied is None:
            return []
        self._applied, self._sure_at, self.is_whole = None, None, False
        if self.wanted is None:
            self.state = FeedState.EMPTY
        self.counts.cleared += 1
        return [Cleared()]

    def _doubt(self, now: float) -> None:
        """The known blocks, if there are any, may be out of date from now on."""
        if self.state is FeedState.LIVE:
            self._sure_at = now
        self.state = FeedState.EMPTY if self._applied is None else FeedState.GAP

    def _settle(self, now: float) -> None:
        """No message is missing any more."""
        self.counts.resyncs += self.state in (FeedState.GAP, FeedState.RESYNC)
        self.wanted, self._tries, self._sure_at = None, 0, now
        self.state = FeedState.LIVE if self._applied is not None else FeedState.EMPTY


def _is_whole(message: Message, was_whole: bool) -> bool:
    """Whether the known blocks are all that the engine holds after `message`; `was_whole`: before it."""
    if message.batch is None or message.batch.malformed:
        return False
    return next((event.is_empty for event in reversed(message.events) if isinstance(event, Cleared)), was_whole)
