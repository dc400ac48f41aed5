from __future__ import annotations

from pathlib import Path

import pytest

from shards.exec.fake import FakeHostMemory, FakeNetwork
from shards.exec.hosting import host_slots, kv_facts, open_hosting
from shards.kv.copier import InlineCopier
from shards.kv.disk_jobs import DiskDelete
from shards.model import Model
from shards.options import EngineOptions

MODEL = Model("m", FakeNetwork(), weights="some")
BLOCK = MODEL.network.block_bytes


class Rigid:
    """A network with KV that cannot be moved."""

    vocabulary, context_tokens, block_bytes = 256, 4096, 512


class Opaque(FakeNetwork):
    """A network with KV that cannot be read as bytes."""

    def host_memory(self, slots: int):
        memory = super().host_memory(slots)

        class Blind:
            slots, save, load = memory.slots, memory.save, memory.load

        return Blind()


class ClosedCopier(InlineCopier):
    closed = False

    def close(self) -> None:
        type(self).closed = True


def test_a_directory_needs_64_slots_of_host_memory_and_16_for_blocks_on_their_way(tmp_path: Path) -> None:
    assert host_slots(EngineOptions(), BLOCK) == 0
    assert host_slots(EngineOptions(host_bytes=10 * BLOCK), BLOCK) == 10
    assert host_slots(EngineOptions(host_bytes=10 * BLOCK, kv_dir=tmp_path), BLOCK) == 80
    assert host_slots(EngineOptions(host_bytes=100 * BLOCK, kv_dir=tmp_path), BLOCK) == 116


def test_without_room_there_is_neither_tier() -> None:
    assert open_hosting(MODEL, EngineOptions(), InlineCopier) == (None, None, None)


def test_kv_that_cannot_be_moved_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be moved"):
        open_hosting(Model("m", Rigid()), EngineOptions(kv_dir=tmp_path), InlineCopier)
    opaque = Opaque()
    opaque.allocate(4)
    with pytest.raises(ValueError, match="cannot be read as bytes"):
        open_hosting(Model("m", opaque, weights="x"), EngineOptions(kv_dir=tmp_path), InlineCopier)


def test_the_copier_is_closed_if_the_directory_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    MODEL.network.allocate(4)
    with pytest.raises(OSError, match="file"):
        open_hosting(MODEL, EngineOptions(kv_dir=tmp_path / "file"), ClosedCopier)
    assert ClosedCopier.closed


def test_reading_from_disk_is_timed_by_the_clock_of_the_engine(tmp_path: Path) -> None:
    MODEL.network.allocate(4)
    hosting = open_hosting(MODEL, EngineOptions(kv_dir=tmp_path), InlineCopier, clock=lambda: 7.0)
    assert hosting.directory is not None
    worker = hosting.directory.worker
    worker.start(DiskDelete(1))
    worker.wait(60)
    assert [(outcome.began_s, outcome.ended_s) for outcome in worker.outcomes()] == [(7.0, 7.0)]
    worker.close()


def test_a_deterministic_engine_has_a_fingerprint_of_its_own() -> None:
    MODEL.network.allocate(4)
    memory = MODEL.network.host_memory(4)
    assert isinstance(memory, FakeHostMemory)
    usual, exact = (kv_facts(MODEL, EngineOptions(deterministic=flag), memory) for flag in (False, True))
    assert usual.fingerprint() != exact.fingerprint()
    assert (usual.numerics, "torch" in exact.numerics) == ("", True)


def test_weights_made_in_memory_have_no_fingerprint() -> None:
    MODEL.network.allocate(4)
    with pytest.raises(ValueError, match="made in memory"):
        kv_facts(Model("m", FakeNetwork()), EngineOptions(), MODEL.network.host_memory(4))
