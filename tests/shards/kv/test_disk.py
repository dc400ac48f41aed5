from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from shards.kv.block_files import BlockFiles
from shards.kv.copier import InlineCopier
from shards.kv.disk import KvDirectory
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.pool import BlockPool
from shards.kv.raw_block import BlockLabels
from shards.kv.table import BlockTable
from shards.nouns import CacheChange
from tests.shards.kv.blocks_on_disk import FINGERPRINT, LateDisk, a_block

FILE_BYTES = 4096
CONTENT_BYTES = 32
STAGING = 3


def content_of(domain: str, tokens: list[int]) -> bytes:
    """What stands for the KV of the last of `tokens`."""
    return f"{domain}:{','.join(map(str, tokens))}".encode()[-CONTENT_BYTES:].ljust(CONTENT_BYTES)


class Clock:
    """Stands still until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Contents:
    """Memory with blocks of 32 bytes."""

    layout = (("uint8", (CONTENT_BYTES,)),)

    def __init__(self, blocks: int, slots: int) -> None:
        self.slots = slots
        self.device = np.zeros((blocks, CONTENT_BYTES), dtype=np.uint8)
        self.host = np.zeros((slots, CONTENT_BYTES), dtype=np.uint8)

    def raw(self, slot: int) -> tuple[memoryview, ...]:
        return (memoryview(self.host[slot, :20]), memoryview(self.host[slot, 20:]))

    def save(self, block: int, slot: int) -> None:
        self.host[slot] = self.device[block]

    def load(self, slot: int, block: int) -> None:
        self.device[block] = self.host[slot]


class Shard:
    """A pool with all tiers, and tables that write what they stand for. Steps are those of the scheduler."""

    def __init__(
        self,
        path: Path,
        *,
        blocks: int = 8,
        slots: int = 16,
        most: int = 100,
        rng: random.Random | None = None,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        self.clock, self.memory = Clock(), Contents(blocks, slots + STAGING)
        files = BlockFiles(path, fingerprint)
        self.worker = LateDisk(files, rng, self.clock)
        headers, broken = files.scan()
        labels = BlockLabels("m", fingerprint)
        directory = KvDirectory(
            self.worker, self.memory, labels, most * FILE_BYTES, STAGING, headers, files.foreign(), broken, self.clock
        )
        options = PoolOptions(pin_share=0.25)
        self.pool = BlockPool(blocks, model="m", options=options, copier=InlineCopier(self.memory), directory=directory)

    def table(
        self, *tokens: int, domain: str = "", found: list[int] | None = None, computes: bool = True
    ) -> BlockTable:
        """A table with the blocks of `tokens`, found in any tier or computed; `found` gets the number of found ones."""
        table = BlockTable(self.pool, domain)
        limit = len(tokens)
        for _ in range(50):
            self.pool.settle_tiers()
            table.follow(lambda index: a_block(tokens[index]), limit=limit)
            labels = self.pool.disk.find(table.path, lambda index: a_block(tokens[index]), limit=limit, domain=domain)
            if not (labels and self.pool.disk.fetch(labels, domain=domain)):
                break
        had = len(table)
        if found is not None:
            found.append(had)
        table.grow(limit * BLOCK_TOKENS)
        for index in range(had, limit):
            self.write(table.ids[index], domain, list(tokens[: index + 1]))
        table.store(lambda index: a_block(tokens[index]), computed_tokens=limit * BLOCK_TOKENS)
        self.read(table, tokens)
        return table

    def write(self, block: int, domain: str, tokens: list[int]) -> None:
        self.memory.device[block] = np.frombuffer(content_of(domain, tokens), dtype=np.uint8)

    def read(self, table: BlockTable, tokens: tuple[int, ...]) -> None:
        for index, block in enumerate(table.ids):
            expected = content_of(table.domain, list(tokens[: index + 1]))
            assert self.memory.device[block].tobytes() == expected, "a block holds something else"

    def leave(self, *tokens: int, domain: str = "") -> int:
        """Compute `tokens` and release them; the number that was found."""
        found: list[int] = []
        self.table(*tokens, domain=domain, found=found).release()
        self.pool.check([])
        return found[0]

    def flush(self) -> None:
        """Evict everything from the device, and write it."""
        self.pool.release(self.pool.take(self.pool.size))
        for _ in range(10):
            self.pool.settle_tiers()

    def stop(self) -> int:
        """An orderly stop."""
        kept = self.pool.preserve(until_s=60.0)
        self.pool.check()
        self.pool.disk.close()
        return kept

    def files(self) -> list[Path]:
        return sorted(self.worker.files._folder.glob("*.kv"))


def test_what_leaves_the_device_is_written_and_found_by_a_later_shard(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2, 3)
    assert not shard.files()
    shard.flush()
    assert (len(shard.files()), shard.pool.disk.counts.written) == (3, 3)
    shard.worker.die()
    later = Shard(tmp_path)
    assert later.leave(1, 2, 3, 4) == 3
    assert later.pool.disk.counts.read == 3


def test_an_orderly_stop_writes_everything_parents_first(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2, 3)
    shard.leave(1, 5)
    assert shard.stop() == 4
    later = Shard(tmp_path)
    assert later.leave(1, 2, 3) == 3
    assert later.leave(1, 5) == 2


def test_pinned_blocks_are_written_first_and_kept_longest(tmp_path: Path) -> None:
    shard = Shard(tmp_path, most=2)
    shard.leave(1, 2)
    keys = [cached.key for cached in shard.pool.prefix]
    assert shard.pool.pins.pin("p", keys, domain="", until_s=60.0, now_s=0.0) == 2
    shard.leave(7, 8)
    assert shard.stop() == 2
    assert Shard(tmp_path).leave(1, 2) == 2


def test_a_stop_without_time_writes_what_it_can(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2)
    assert shard.pool.preserve(until_s=0.0) == 0
    shard.pool.disk.close()
    assert not shard.files()


def test_blocks_of_sequences_that_still_run_are_written_too(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.table(1, 2)
    assert shard.pool.preserve(until_s=60.0) == 2
    shard.pool.disk.close()
    later = Shard(tmp_path)
    assert later.leave(1, 2) == 2
    assert later.pool.disk.used_bytes == 2 * FILE_BYTES


def test_another_domain_fingerprint_or_model_finds_nothing(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2, domain="acme")
    shard.stop()
    later = Shard(tmp_path)
    assert later.leave(1, 2, domain="other") == 0
    assert later.leave(1, 2, domain="acme") == 2
    later.worker.die()
    assert Shard(tmp_path, fingerprint=bytes(32)).leave(1, 2, domain="acme") == 0


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "other"])
def test_a_damaged_file_is_a_miss_and_is_deleted(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2, 3)
    shard.stop()
    later = Shard(tmp_path)
    path = later.files()[0]
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif damage == "delete":
        path.unlink()
    else:
        later.files()[1].replace(path)
    with caplog.at_level(logging.WARNING):
        assert later.leave(1, 2, 3) < 3
    assert later.pool.disk.counts.broken >= 1
    assert "computed again" in caplog.text
    later.flush()
    assert later.pool.disk.blocks == len(later.files()) == 3


def test_a_file_that_was_damaged_between_two_shards_is_counted(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1)
    shard.stop()
    shard.files()[0].write_bytes(b"")
    later = Shard(tmp_path)
    assert (later.pool.disk.counts.broken, later.pool.disk.blocks) == (1, 0)


def test_the_size_is_bounded_and_the_least_worth_goes(tmp_path: Path) -> None:
    shard = Shard(tmp_path, most=3)
    for token in range(6):
        shard.leave(token)
        shard.flush()
        assert shard.pool.disk.used_bytes <= 3 * FILE_BYTES
    assert shard.pool.disk.blocks == 3
    shard.worker.die()
    assert [Shard(tmp_path / "0", most=3).pool.disk.blocks, Shard(tmp_path, most=2).pool.disk.blocks] == [0, 2]


def test_files_of_another_fingerprint_are_deleted_when_space_is_needed(tmp_path: Path) -> None:
    shard = Shard(tmp_path, most=3)
    shard.leave(1, 2, 3)
    shard.stop()
    later = Shard(tmp_path, most=3, fingerprint=bytes(32))
    assert later.pool.disk.used_bytes == 3 * FILE_BYTES
    assert shard.files()
    later.leave(7)
    later.flush()
    assert not shard.files()
    assert later.pool.disk.used_bytes == FILE_BYTES


def test_a_full_disk_hurts_no_sequence_and_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shard.worker.files, "write", full)
        shard.leave(1)
        shard.flush()
        shard.leave(2)
        shard.flush()
    assert (shard.pool.disk.counts.failed, shard.pool.disk.blocks) == (1, 0)
    assert "No space left on device" in caplog.text
    assert not shard.pool.disk.is_busy
    assert shard.leave(1) == 1, "it is in host memory"
    shard.clock.now_s = 31.0
    shard.flush()
    assert shard.pool.disk.blocks >= 1


def test_clearing_a_domain_deletes_its_files_even_those_that_are_being_written_or_read(tmp_path: Path) -> None:
    shard = Shard(tmp_path, rng=random.Random(0))
    shard.leave(1, 2, domain="acme")
    shard.leave(3, domain="other")
    assert shard.pool.disk.clear("nothing") == set()
    shard.pool.release(shard.pool.take(shard.pool.size))
    shard.pool.settle_tiers()
    assert shard.pool.clear("acme") == 2
    shard.pool.disk.finish(60.0)
    shard.pool.settle_tiers()
    shard.pool.disk.close()
    assert len(shard.files()) == 1
    later = Shard(tmp_path, rng=random.Random(1))
    labels = later.pool.disk.find([], lambda _: a_block(3), limit=1, domain="other")
    assert later.pool.disk.fetch(labels, domain="other")
    assert later.pool.clear("other") == 1
    for _ in range(20):
        later.pool.settle_tiers()
        later.pool.check([])
    assert not len(later.pool.prefix)
    assert not later.files()


def test_distrusted_blocks_leave_the_disk_too(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2)
    shard.flush()
    table = shard.table(1, 2)
    table.distrust()
    table.release()
    shard.pool.settle_tiers()
    assert (shard.pool.disk.blocks, shard.files()) == (0, [])
    shard.pool.check([])


def test_a_block_that_is_being_written_can_be_distrusted(tmp_path: Path) -> None:
    shard = Shard(tmp_path, rng=random.Random(0))
    shard.leave(1)
    shard.pool.release(shard.pool.take(shard.pool.size))
    assert shard.pool.disk._writes
    table = BlockTable(shard.pool, "")
    assert table.follow(lambda _: a_block(1), limit=1) == 1
    table.distrust()
    shard.pool.check([table.ids])
    table.release()
    for _ in range(20):
        shard.pool.settle_tiers()
    shard.pool.disk.close()
    assert not shard.files()
    assert shard.pool.host.free == shard.pool.host.size


def test_events_and_snapshot_name_the_tier_with_parents_first(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(1, 2, 3)
    keys = tuple(cached.key for cached in shard.pool.prefix)
    shard.stop()
    later = Shard(tmp_path)
    (event,) = later.pool.disk.snapshot()
    assert (event.change, event.keys, event.tier) == (CacheChange.STORED, keys, "disk")
    assert later.pool.prefix.drain_events() == (event,)
    later.pool.clear()
    assert later.pool.disk.snapshot() == ()


def test_waiting_is_predicted_from_what_reads_took(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.leave(*range(8))
    shard.stop()
    later = Shard(tmp_path)
    disk = later.pool.disk
    labels = disk.find([], a_block, limit=5, domain="")
    assert disk.wait_s(labels) == pytest.approx(5 * CONTENT_BYTES / 500e6)

    def slow(*_: object) -> None:
        later.clock.now_s += 0.5

    disk.fetch(labels, domain="")
    later.clock.now_s = 9.0
    assert disk.wait_s(labels) == 9.0, "a disk that hangs looks ever slower"
    later.worker.files.read = slow  # type: ignore[method-assign]
    later.pool.settle_tiers()
    measured_s = disk.wait_s(disk.find([], a_block, limit=1, domain=""))
    assert 0.3 < measured_s < 0.5
    disk.decline()
    assert disk.wait_s(disk.find([], a_block, limit=1, domain="")) < measured_s


def test_a_tier_without_a_directory_has_no_blocks() -> None:
    pool = BlockPool(4, model="m")
    assert (pool.disk.is_open, pool.disk.is_busy, pool.disk.blocks, pool.disk.used_bytes) == (False, False, 0, 0)
    assert pool.preserve(until_s=1.0) == 0
    pool.disk.close()
    assert "DiskIndex(0 blocks, 0 bytes), 0 are read, 0 written" in repr(pool)


class Machine:
    """Random life of shards that follow one another on one directory; contents are compared whenever they are read."""

    def __init__(self, path: Path, seed: int, *, slots: int, most: int) -> None:
        self.rng, self.path, self.slots, self.most = random.Random(seed), path, slots, most
        self.seen: Counter[str] = Counter()
        self.held: list[tuple[BlockTable, tuple[int, ...]]] = []
        self.start()

    def start(self) -> None:
        self.shard = Shard(self.path, blocks=12, slots=self.slots, most=self.most, rng=self.rng)
        self.pool = self.shard.pool
        self.reported: dict[str, set[int]] = {"device": set(), "host": set(), "disk": set()}

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.01:
            self.restart()
        elif roll < 0.03:
            self.damage()
        elif roll < 0.04:
            self.clear()
        elif roll < 0.06:
            self.shard.clock.now_s += 10.0
        elif roll < 0.3 and self.held:
            self.end()
        elif roll < 0.4 and self.held:
            self.park()
        elif roll < 0.5:
            self.pool.make_room(self.rng.randint(1, 12))
            self.seen["evict"] += 1
        else:
            self.begin()
        for table, tokens in self.held:
            if table.is_landed:
                self.shard.read(table, tokens)

    def check(self) -> None:
        self.pool.check([table.ids for table, _ in self.held])
        for event in self.pool.prefix.drain_events():
            keys, there = set(event.keys), self.reported[event.tier]
            if event.change is CacheChange.STORED:
                assert len(keys) == len(event.keys), "stored twice"
                assert not keys & there, "stored twice"
                there |= keys
            elif event.change is CacheChange.EVICTED:
                assert keys <= there, "evicted and never stored"
                there -= keys
            else:
                for tier in self.reported.values():
                    tier.clear()
        now = (*self.pool.prefix.snapshot(), *self.pool.disk.snapshot())
        assert {tier: keys for tier, keys in self.reported.items() if keys} == {
            event.tier: set(event.keys) for event in now
        }

    def begin(self) -> None:
        if len(self.held) > 3:
            return
        tokens = tuple(self.rng.choices([1, 2], k=self.rng.randint(1, 6)))
        if self.pool.available_for(None) < len(tokens):
            return
        before = self.pool.disk.counts.read
        self.held.append((self.shard.table(*tokens, domain=self.rng.choice("abc")), tokens))
        self.seen["from disk"] += self.pool.disk.counts.read - before
        self.seen["begin"] += 1

    def end(self) -> None:
        table, _ = self.held.pop(self.rng.randrange(len(self.held)))
        if self.rng.random() < 0.1:
            table.distrust()
            self.seen["distrust"] += 1
        table.release()

    def park(self) -> None:
        table, _ = self.rng.choice(self.held)
        if not table.is_parked:
            self.seen["park"] += table.park()
        elif self.pool.unpark_need(table.path, table._slots or ()) <= self.pool.available_for(table.domain):
            table.unpark()

    def clear(self) -> None:
        domain = self.rng.choice([None, "a", "b", "c"])
        self.pool.clear(domain)
        for table, _ in self.held:
            if domain in (None, table.domain):
                table.unchain()
        self.seen["clear"] += 1

    def damage(self) -> None:
        files = self.shard.files()
        if not files:
            return
        path = self.rng.choice(files)
        kind = self.rng.choice(["flip", "truncate", "delete", "swap"])
        data = bytearray(path.read_bytes())
        if kind == "flip":
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
        elif kind == "truncate":
            path.write_bytes(data[: self.rng.randrange(len(data))])
        elif kind == "delete":
            path.unlink()
        else:
            path.write_bytes(self.rng.choice(files).read_bytes())
        self.seen[kind] += 1

    def restart(self) -> None:
        for table, _ in self.held:
            table.release()
        self.held.clear()
        if self.rng.random() < 0.5:
            self.shard.stop()
            self.seen["stop"] += 1
        else:
            self.shard.worker.die()
            self.seen["die"] += 1
        self.start()


def weak_keys(token_ids: bytes, parent: int) -> tuple[int, ...]:
    """Keys of which any two blocks may have the same."""
    return (xxh3_64_intdigest(token_ids, parent) % 40,)


@pytest.mark.parametrize(
    ("seed", "slots", "most", "is_weak"),
    [(1, 16, 100, False), (2, 4, 30, False), (3, 40, 8, False), (4, 16, 30, True), (5, 6, 1000, True)],
)
def test_two_thousand_operations_serve_no_wrong_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, slots: int, most: int, is_weak: bool
) -> None:
    if is_weak:
        monkeypatch.setattr("shards.kv.prefix.block_keys", weak_keys)
        monkeypatch.setattr("shards.kv.raw_block.block_keys", weak_keys)
    # thousands of warnings; monkeypatch restores it
    monkeypatch.setattr(logging.getLogger("shards.kv.disk"), "disabled", True)
    machine = Machine(tmp_path, seed, slots=slots, most=most)
    for _ in range(2_000):
        machine.step()
        machine.check()
    print(dict(machine.seen))
    wanted = {"begin", "evict", "from disk", "stop", "die", "clear", "distrust", "flip", "truncate", "delete", "swap"}
    assert all(machine.seen[kind] for kind in wanted)
