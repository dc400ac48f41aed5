"""An engine's prefix cache as far as its events go: chained blocks, least recently used first, and a publisher."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.golden.event_encoders import Change, Clear, Drop, Encoder, Hash, Put

Content = tuple[str | None, tuple[int, ...]]
"""Identity of a block: the salt, and all tokens up to its end."""


@dataclass(frozen=True)
class Published:
    """One message: its number, its bytes, and what the engine held when it was sent."""

    seq: int
    payload: bytes
    sent_at: float
    held: frozenset[Content]
    life: int = 0


@dataclass
class Engine:
    """Runs random prompts over `size` blocks. `life` changes with each restart, and with it every hash."""

    encode: Encoder
    rng: random.Random
    size: int = 12
    block_size: int = 2
    salts: Sequence[str | None] = (None,)
    int_hashes: bool = False
    buffer_steps: int = 10_000
    clock: Callable[[], float] = lambda: 0.0
    life: int = 0
    sent: deque[Published] = field(default_factory=deque)
    held: OrderedDict[Content, Hash] = field(default_factory=OrderedDict)
    _now: float = 1_700_000_000.0
    _seq: int = 0

    def step(self) -> Published:
        """Run one step and publish what it did to the cache."""
        chance = self.rng.random()
        events: list[Change]
        if chance < 0.03:
            self.held.clear()
            events = [Clear()]
        elif chance < 0.08:
            events = []
        else:
            events = [event for _ in range(self.rng.randint(1, 2)) for event in self.run(self._a_prompt())]
        return self.publish(events)

    def publish(self, events: Sequence[Change]) -> Published:
        """Send `events` as one message."""
        self._now += self.rng.uniform(0.001, 0.1)
        payload = self.encode(self._now, events, 0)
        message = Published(self._seq, payload, self._now, frozenset(self.held), self.life)
        self._seq += 1
        self.sent.append(message)
        while len(self.sent) > self.buffer_steps:
            self.sent.popleft()
        return message

    def run(self, prompt: tuple[str | None, tuple[int, ...]]) -> Iterator[Change]:
        """Hold the blocks of `prompt`, and tell what that took."""
        salt, tokens = prompt
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        contents: list[Content] = [(salt, tokens[:end]) for end in ends]
        missing = [content for content in contents if content not in self.held]
        for content in contents:
            if content in self.held:
                self.held.move_to_end(content)
        gone = []
        while self.held and len(self.held) + len(missing) > self.size:
            gone.append(self.held.popitem(last=False))
        if gone:
            yield Drop(tuple(name for _, name in gone))
        run: list[Content] = []
        for content in contents:
            if content in missing:
                run.append(content)
            elif run:
                yield self._stored(run)
                run = []
        if run:
            yield self._stored(run)

    def restart(self) -> None:
        """Another process: nothing is held, numbers begin at 0, hashes have another seed."""
        self.life += 1
        self._seq = 0
        self._now += 5.0
        self.held.clear()
        self.sent.clear()

    def hash_of(self, content: Content) -> Hash:
        text = f"{self.life} {content}".encode()
        digest = hashlib.sha256(text).digest()
        return int.from_bytes(digest[:8], "big") if self.int_hashes else digest

    def _stored(self, contents: list[Content]) -> Put:
        for content in contents:
            self.held[content] = self.hash_of(content)
        salt, first = contents[0]
        before = len(first) - self.block_size
        tokens = contents[-1][1][before:]
        parent = self.hash_of((salt, first[:before])) if before else None
        return Put(tuple(self.held[content] for content in contents), parent, tokens, self.block_size, salt=salt)

    def _a_prompt(self) -> tuple[str | None, tuple[int, ...]]:
        """One of a few documents, cut somewhere, and a question."""
        document, length = self.rng.randrange(3), self.rng.randint(0, 5)
        question = self.rng.randrange(4)
        blocks = [document * 100 + place for place in range(length)] + [1000 + question] * self.rng.randint(0, 2)
        tokens = tuple(block * 10 + place for block in blocks for place in range(self.block_size))
        return self.rng.choice(self.salts), tokens
