"""One source of a feed, over any transport: tracks messages, keeps the group that counts, passes events to the sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backends.events.nouns import Batch, CacheEvent, Cleared, MalformedEvents
from router.fleet.feeds.groups import DecidingGroup
from router.fleet.feeds.health import FeedHealth
from router.fleet.feeds.sink import EventSink, RankCache
from router.fleet.feeds.tracker import Message, Replay, Tracker


class HeardSource:
    """Takes a source's messages and passes events to the sink. The transport sets `trouble` and `is_connected`."""

    def __init__(self, source: RankCache, sink: EventSink, tracker: Tracker, *, clock: Callable[[], float]) -> None:
        self.source, self.tracker = source, tracker
        self.is_connected = False
        self.trouble = "not connected yet"
        self._sink, self._clock = sink, clock
        self._group = DecidingGroup()

    def __repr__(self) -> str:
        return f"<HeardSource {self.source}: {self.tracker!r}>"

    @property
    def wanted(self) -> Replay | None:
        """The replay that should be requested now."""
        return self.tracker.wanted

    def connected(self) -> None:
        """It was reached."""
        self.is_connected, self.trouble = True, ""
        self._tell(self.tracker.connected())

    def lost(self, trouble: str) -> None:
        """The source cannot be reached, because of `trouble`."""
        self.is_connected, self.trouble = False, trouble
        self._tell(self.tracker.lost(self._clock()))

    def doubt(self, trouble: str) -> None:
        """Messages are late, because of `trouble`."""
        self.is_connected, self.trouble = False, trouble
        self.tracker.doubt(self._clock())

    def trust(self) -> None:
        """Messages arrive in time again."""
        self.is_connected = True
        self.tracker.trust(self._clock())

    def hear(self, message: Message) -> None:
        """A message arrived as it was sent."""
        self._tell(self.tracker.hear(message, self._clock()))

    def replayed(self, number: int, message: Message) -> None:
        """A message arrived in answer to replay request `number`."""
        self._tell(self.tracker.replayed(number, message, self._clock()))

    def replay_ended(self, number: int) -> None:
        """The replay is complete."""
        self._tell(self.tracker.replay_ended(number, self._clock()))

    def replay_failed(self, number: int, trouble: str) -> None:
        """The replay failed, because of `trouble`."""
        self.trouble = trouble
        self._tell(self.tracker.replay_failed(number, self._clock()))

    def tick(self) -> None:
        """Time has passed."""
        self.tracker.tick(self._clock())

    def decoded(self, decode: Callable[[bytes], Batch], seq: int, payload: bytes, epoch: str | None = None) -> Message:
        """The message in `payload`; an unreadable one is counted, and clears the known blocks when its turn comes."""
        counts = self.tracker.counts
        try:
            batch = decode(payload)
        except MalformedEvents as error:
            counts.undecodable += 1
            self.trouble = f"message {seq}: {error}"
            return Message(seq, None, epoch)
        counts.unknown += batch.unknown
        counts.undecodable += batch.malformed
        return Message(seq, batch, epoch)

    def health(self) -> FeedHealth:
        """Its present state."""
        now, tracker = self._clock(), self.tracker
        return FeedHealth(
            source=self.source,
            state=tracker.state,
            connected=self.is_connected,
            age_s=tracker.age_s(now),
            quiet_s=None if tracker.heard_at is None else max(0.0, now - tracker.heard_at),
            counts=tracker.counts,
            trouble=self.trouble,
            is_whole=tracker.is_whole,
        )

    def _tell(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            admitted = list(self._group.admit(event))
            self.tracker.counts.ignored += not admitted
            for each in admitted:
                self._sink.hear(self.source, each)
            if len(admitted) > 1 and isinstance(admitted[0], Cleared):
                self.tracker.counts.cleared += 1
