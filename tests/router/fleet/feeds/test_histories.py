"""vLLM's and SGLang's encoders drive our decoders and the tracker through random histories over a bad channel.

The engine is a stand-in that publishes what its prefix cache does in the engines' own wire formats; see
tests/golden/event_encoders.py for which version each one stands for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from backends.events import sglang, vllm
from backends.events.nouns import Batch, CacheEvent, MalformedEvents
from router.fleet.feeds.health import FeedState
from router.fleet.feeds.sink import RankCache
from router.fleet.feeds.tracker import Message, Replay, Tracker
from tests.golden.event_encoders import SGLANG, TELLS_SALT, VLLM
from tests.router.fleet.feeds.engine import Engine, Published
from tests.router.fleet.feeds.fold import Fold

SOURCE = RankCache("vllm-0")
STEPS = 24
HISTORIES = 1000
SHARDS = 4

VERSIONS = [*VLLM, *SGLANG]


@dataclass
class World:
    """One engine, one bad channel, one tracker, and an index that believes it."""

    engine: Engine
    tracker: Tracker
    decode: Callable[[bytes], Batch]
    rng: random.Random
    fold: Fold = field(default_factory=Fold)
    under_way: list[tuple[int, Published]] = field(default_factory=list)
    answers: list[tuple[int, Replay, list[Published]]] = field(default_factory=list)
    served: set[int] = field(default_factory=set)
    sent: dict[float, Published] = field(default_factory=dict)
    heard_life: int = 0
    now: float = 0.0
    spoilt: int = 0

    def send(self, message: Published, *, faults: bool) -> None:
        """Give a message to the channel, which may lose it, repeat it, or hold it back for a while."""
        self.sent[message.sent_at] = message
        chance = self.rng.random() if faults else 1.0
        if chance < 0.08:
            return
        copies = 2 if chance < 0.18 else 1
        for _ in range(copies):
            late = self.rng.randint(1, 6) if faults and self.rng.random() < 0.15 else 0
            self.under_way.append((late, message))

    def deliver(self, *, faults: bool) -> None:
        """One tick of the channel: what is due arrives, and replays are answered."""
        self.now += 0.1
        due = [message for late, message in self.under_way if late <= 0]
        self.under_way = [(late - 1, message) for late, message in self.under_way if late > 0]
        for message in due:
            spoilt = faults and self.rng.random() < 0.02
            self.spoilt += spoilt
            if not spoilt:
                self.heard_life = max(self.heard_life, message.life)
            self.apply(self.tracker.hear(self.message(message, spoilt=spoilt), self.now))
            self.verify()
        self.answer(faults=faults)

    def answer(self, *, faults: bool) -> None:
        """The replay socket: what was asked for is answered soon, cut off, or not at all."""
        wish = self.tracker.wanted
        if wish is not None and wish.number not in self.served:
            self.served.add(wish.number)
            late = self.rng.randint(0, 3) if faults else 0
            found = [message for message in self.engine.sent if message.seq >= wish.start]
            self.answers.append((late, wish, found))
        ready = [answer for answer in self.answers if answer[0] <= 0]
        self.answers = [(late - 1, wish, found) for late, wish, found in self.answers if late > 0]
        for _, wish, found in ready:
            breaks = faults and self.rng.random() < 0.15
            if faults and len(found) > 2 and self.rng.random() < 0.1:
                del found[self.rng.randrange(1, len(found))]
            for message in found[: len(found) // 2] if breaks else found:
                self.heard_life = max(self.heard_life, message.life)
                self.apply(self.tracker.replayed(wish.number, self.message(message), self.now))
                self.verify()
            end = self.tracker.replay_failed if breaks else self.tracker.replay_ended
            self.apply(end(wish.number, self.now))
            self.verify()

    def break_off_answers(self) -> None:
        """The replay socket's other end is gone."""
        for _, wish, _ in self.answers:
            self.apply(self.tracker.replay_failed(wish.number, self.now))
        self.answers.clear()
        self.verify()

    def disconnect(self) -> None:
        """Messages under way are lost, and all others until the next connect."""
        self.under_way.clear()
        self.answers.clear()
        self.apply(self.tracker.lost(self.now))
        self.verify()

    def connect(self) -> None:
        self.apply(self.tracker.connected())

    def message(self, published: Published, *, spoilt: bool = False) -> Message:
        payload = published.payload[:-1] + b"\xc1" if spoilt else published.payload
        try:
            return Message(published.seq, self.decode(payload))
        except MalformedEvents:
            return Message(published.seq, None)

    def apply(self, events: list[CacheEvent]) -> None:
        for event in events:
            self.fold.hear(SOURCE, event)

    def verify(self) -> None:
        """Whenever nothing is missing, the index claims nothing that the engine did not hold after that message."""
        self.tracker.check()
        if self.tracker.state is FeedState.LIVE:
            at = self.tracker.applied_at
            assert at is not None
            if at in self.sent:
                assert self.fold.claims() <= self.sent[at].held, self.tracker
                assert self.sent[at].life == self.heard_life, f"{self.tracker} believes a dead engine"
                assert not self.tracker.is_whole or self.fold.claims() == self.sent[at].held, self.tracker
            else:
                assert not self.fold.claims(), "an unreadable message leaves nothing"
        elif self.tracker.applied is None:
            assert not self.fold.claims()


def a_world(seed: int) -> World:
    rng = random.Random(seed)
    name = VERSIONS[seed % len(VERSIONS)]
    encode = (VLLM | SGLANG)[name]
    engine = Engine(
        encode=encode,
        rng=rng,
        salts=(None, "acme", "labs") if name in TELLS_SALT else (None,),
        int_hashes=name in SGLANG or rng.random() < 0.5,
        buffer_steps=rng.choice([3, 10, 10_000]),
    )
    tracker = Tracker(replays=rng.random() < 0.7, most_held=rng.choice([4, 4096]))
    return World(engine, tracker, (vllm if name in VLLM else sglang).decode, rng)


def live_through(world: World, steps: int) -> None:
    rng = world.rng
    for _ in range(rng.randint(0, 8)):
        world.send(world.engine.step(), faults=True)
    world.under_way.clear()
    world.connect()
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.04:
            world.disconnect()
            for _ in range(rng.randint(0, 4)):
                world.send(world.engine.step(), faults=True)
            if rng.random() < 0.5:
                world.engine.restart()
                for _ in range(rng.randint(0, 20)):
                    world.send(world.engine.step(), faults=True)
            world.under_way.clear()
            world.connect()
        elif chance < 0.08:
            # a restart that no socket tells of, behind a proxy: the first message arrives, and first
            world.engine.restart()
            first = world.engine.publish([])
            world.sent[first.sent_at] = first
            stragglers = [(max(1, late), message) for late, message in world.under_way]
            world.under_way = [(0, first), *stragglers]
            world.break_off_answers()
        world.send(world.engine.step(), faults=True)
        world.deliver(faults=True)


def heal(world: World) -> None:
    """The channel is good again, and the engine says a little more."""
    world.under_way.clear()
    for _ in range(8):
        world.send(world.engine.step(), faults=False)
        world.deliver(faults=False)
    for _ in range(8):
        world.deliver(faults=False)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_index_never_claims_what_the_engine_does_not_hold_for_longer_than_one_resync(shard: int) -> None:
    claimed = gaps = restarts = whole = 0
    for seed in range(shard, HISTORIES, SHARDS):
        world = a_world(seed)
        live_through(world, STEPS)
        heal(world)
        assert world.tracker.state is FeedState.LIVE, f"seed {seed}: {world.tracker}"
        assert world.fold.claims() <= frozenset(world.engine.held), f"seed {seed}: {world.tracker}"
        claimed += len(world.fold.claims())
        gaps += world.tracker.counts.gaps
        restarts += world.tracker.counts.restarts
        whole += world.tracker.is_whole
    assert claimed > 3 * HISTORIES / SHARDS
    assert gaps > HISTORIES / SHARDS
    assert restarts > HISTORIES / SHARDS / 4
    assert HISTORIES / SHARDS / 4 < whole < HISTORIES / SHARDS


@pytest.mark.parametrize("version", VERSIONS)
def test_with_a_replay_of_the_whole_life_nothing_is_missed_either(version: str) -> None:
    for seed in range(20):
        world = a_world(VERSIONS.index(version) + seed * len(VERSIONS))
        world.engine.buffer_steps = 10_000
        world.tracker = Tracker(replays=True)
        live_through(world, STEPS)
        # a router that was away reads everything again
        world.disconnect()
        world.served.clear()
        world.tracker, world.fold = Tracker(replays=True), Fold()
        world.connect()
        heal(world)
        assert world.fold.claims() == frozenset(world.engine.held), f"seed {seed}: {world.tracker}"
