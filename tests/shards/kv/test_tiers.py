"""Ten thousand random operations on pool, host tier, tables and pins at once, with copies that land late."""

from __future__ import annotations

import random
import struct
from collections import Counter, deque

import pytest

from shards.kv.copier import BlockCopy
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.prefix import CachedBlock
from shards.kv.table import BlockTable
from shards.nouns import CacheChange

FLOORS = {"a": 5}
DOMAINS = ("a", "b", "c")
PINS = ("p", "q", "r")
STEPS = 10_000


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


class LateCopier:
    """Copies what blocks hold, in order, and no sooner than it must or chance wants."""

    def __init__(self, blocks: int, slots: int, rng: random.Random) -> None:
        self.device: list[object] = [None] * blocks
        self.host: list[object] = [None] * slots
        self.slots, self._rng = slots, rng
        self._queue: deque[BlockCopy] = deque()
        self._ends: deque[int] = deque()
        self._started = self._done = 0

    def start(self, copies):
        self._queue.extend(copies)
        self._started += len(copies)
        return self._started

    def done(self, ticket):
        if self._rng.random() < 0.1:
            self._copy(self._rng.randint(1, 4))
        return self._done >= ticket

    def wait(self, ticket):
        self._copy(ticket - self._done)

    def close(self):
        pass

    def _copy(self, count: int) -> None:
        for _ in range(min(count, len(self._queue))):
            block, slot, is_save = self._queue.popleft()
            if is_save:
                self.host[slot] = self.device[block]
            else:
                self.device[block] = self.host[slot]
            self._done += 1


class Machine:
    """The contract of a pool, seen from outside: contents stand for KV, and are compared whenever they may be read."""

    def __init__(self, seed: int, *, blocks: int = 24, slots: int = 16) -> None:
        self.rng = random.Random(seed)
        self.copier = LateCopier(blocks, slots, self.rng)
        options = PoolOptions(pin_share=0.25, floors=FLOORS)
        self.pool = BlockPool(blocks, model="m", options=options, copier=self.copier if slots else None)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.partial: dict[int, object] = {}
        self.pinned: dict[str, tuple[float, set[CachedBlock]]] = {}
        self.now_s = 0.0
        self.reported: dict[str, set[int]] = {"device": set(), "host": set()}
        self.seen: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def step(self) -> None:
        before = Counter(cached.domain for cached in self.pool.prefix if cached.block is not None)
        held = {cached for table, _ in self.tables for cached in table.path}
        kind, domain = self._act()
        self.seen[kind] += 1
        if kind == "clear":
            return
        assert kind == "distrust" or all(block in self.pool.prefix for block in held), "a held block was evicted"
        self.pinned = {name: pin for name, pin in self.pinned.items() if pin[0] > self.now_s}
        kept = (cached for _, blocks in self.pinned.values() for cached in blocks)
        assert all(cached in self.pool.prefix for cached in kept), "a pinned block was evicted"
        after = Counter(cached.domain for cached in self.pool.prefix if cached.block is not None)
        for name, floor in FLOORS.items():
            if name != domain and kind != "distrust":
                assert after[name] >= min(before[name], floor), "a domain fell below its floor for another"

    def read(self) -> None:
        for table, tokens in self.tables:
            if table.is_landed:
                self._read(table, tokens)

    def check(self) -> None:
        self.pool.check([table.ids for table, _ in self.tables])
        for table, _ in self.tables:
            table.check()
        for event in self.pool.prefix.drain_events():
            if event.change is CacheChange.STORED:
                assert not self.reported[event.tier] & set(event.keys), "stored twice"
                self.reported[event.tier] |= set(event.keys)
                self.events[event.tier] += len(event.keys)
            elif event.change is CacheChange.EVICTED:
                assert self.reported[event.tier] >= set(event.keys), "evicted and never stored"
                self.reported[event.tier] -= set(event.keys)
            else:
                self.reported = {"device": set(), "host": set()}
        snapshot = {event.tier: set(event.keys) for event in self.pool.prefix.snapshot()}
        assert {"device": set(), "host": set(), **snapshot} == self.reported, "events and cache disagree"

    def end(self) -> None:
        for table, _ in self.tables:
            table.release()
        self.tables.clear()
        self.pool.pins.expire(float("inf"))
        self.check()
        assert self.pool.available_for("a") == self.pool.size
        assert self.pool.host.room == self.pool.host.size

    def _act(self) -> tuple[str, str]:
        roll = self.rng.random()
        if roll < 0.002:
            self._clear(None)
            return "clear", ""
        if roll < 0.006:
            self._clear(self.rng.choice(DOMAINS))
            return "clear", ""
        if roll < 0.015:
            name = self.rng.choice(PINS)
            self.pool.pins.unpin(name)
            self.pinned.pop(name, None)
            return "unpin", ""
        if roll < 0.06:
            return "pin", self._pin()
        if not self.tables or (roll < 0.15 and len(self.tables) < 6):
            return "start", self._start()
        table, tokens = self.rng.choice(self.tables)
        if roll < 0.25:
            return self._end(table)
        if roll < 0.4 and table.is_parked:
            return self._unpark(table), table.domain
        if roll < 0.35 and not table.is_parked:
            return ("park" if table.park() else "no room to park"), table.domain
        return self._grow(table, tokens), table.domain

    def _clear(self, domain: str | None) -> None:
        others = {cached for cached in self.pool.prefix if domain is not None and cached.domain != domain}
        self.pool.clear(domain)
        assert set(self.pool.prefix) == others, "another domain lost something, or this one did not"
        for _, blocks in self.pinned.values():
            blocks &= others
        for table, _ in self.tables:
            if domain is None or table.domain == domain:
                table.unchain()

    def _pin(self) -> str:
        self.now_s += self.rng.random()
        domain = self.rng.choice(DOMAINS)
        known = [cached for cached in self.pool.prefix if cached.domain == domain]
        if known:
            cached, until_s = self.rng.choice(known), self.now_s + self.rng.random() * 20
            name, promised = self.rng.choice(PINS), self.pool.guaranteed - self.pool.owned
            if self.pool.pins.pin(name, [cached.key], domain=domain, until_s=until_s, now_s=self.now_s):
                known_s, blocks = self.pinned.setdefault(name, (until_s, set()))
                path: CachedBlock | None = cached
                while path is not None:
                    blocks.add(path)
                    path = path.parent
                self.pinned[name] = (max(known_s, until_s), blocks)
            assert self.pool.available_for("a") + self.pool.available_for("b") >= promised, "pins took what is promised"
        return domain

    def _start(self) -> str:
        domain, rank = self.rng.choice(DOMAINS), self.rng.randint(0, 2)
        table, tokens = BlockTable(self.pool, domain, rank=rank), self.rng.choices([1, 2], k=self.rng.randint(1, 8))
        had = table.follow(lambda index: a_block(tokens[index]), limit=len(tokens))
        self.tables.append((table, tokens))
        tokens[had:] = []
        return domain

    def _end(self, table: BlockTable) -> tuple[str, str]:
        self.tables = [(entry, tokens) for entry, tokens in self.tables if entry is not table]
        kind = "distrust" if self.rng.random() < 0.1 else "end"
        if kind == "distrust":
            mine = set(table.path)
            table.distrust()
            gone = {block for block in mine if block not in self.pool.prefix}
            for _, blocks in self.pinned.values():
                blocks -= gone
        table.release()
        return kind, table.domain

    def _unpark(self, table: BlockTable) -> str:
        assert table._slots is not None
        could = self.pool.unpark_need(table.path, table._slots) <= self.pool.available_for(table.domain)
        try:
            table.unpark()
        except OutOfBlocks:
            assert not could
            return "no room to unpark"
        assert could
        return "unpark"

    def _grow(self, table: BlockTable, tokens: list[int]) -> str:
        """Compute one more block: what is there already is read, the new one is written and then cached, or not yet."""
        if table.is_parked:
            return "parked"
        if not table.is_landed:
            return "not landed"
        had = len(tokens)
        if len(table) == had:
            table.follow(lambda index: a_block([*tokens, 1][index]), limit=had + 1)
            if len(table) > had:
                tokens.append(1)
                return "follow"
        if len(table) == had:
            if not self.pool.available_for(table.domain):
                with pytest.raises(OutOfBlocks):
                    table.grow((had + 1) * BLOCK_TOKENS)
                return "full"
            table.grow((had + 1) * BLOCK_TOKENS)
            self._write(table, (table.domain, tuple(tokens), "in part"))
            if self.rng.random() < 0.5:
                return "in part"
        tokens.append(self.rng.randint(1, 2))
        self._write(table, (table.domain, tuple(tokens)))
        table.store(lambda index: a_block(tokens[index]), computed_tokens=len(tokens) * BLOCK_TOKENS)
        return "grow"

    def _write(self, table: BlockTable, content: object) -> None:
        block = table.ids[-1]
        assert not self.pool.host.flights.is_busy(block), "a block is written while it is copied"
        self.copier.device[block] = content

    def _read(self, table: BlockTable, tokens: list[int]) -> None:
        expected: list[object] = [(table.domain, tuple(tokens[: index + 1])) for index in range(len(tokens))]
        expected += [(table.domain, tuple(tokens), "in part")] * (len(table) - len(tokens))
        assert [self.copier.device[block] for block in table.ids] == expected, "a block holds something else"


@pytest.mark.parametrize(("seed", "blocks", "slots"), [(1, 24, 16), (2, 24, 4), (3, 12, 40), (4, 24, 0), (5, 130, 40)])
def test_ten_thousand_operations_lose_nothing_and_mix_nothing(seed: int, blocks: int, slots: int) -> None:
    machine = Machine(seed, blocks=blocks, slots=slots)
    for step in range(STEPS):
        machine.step()
        machine.read()
        if step % 8 == 0:
            machine.check()
    machine.end()
    print(seed, dict(machine.seen), dict(machine.events))
    assert {"start", "grow", "in part", "follow", "park", "pin", "distrust", "clear"} <= set(machine.seen)
    assert bool(machine.events["host"]) == bool(slots)
