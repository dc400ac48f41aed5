from __future__ import annotations

from threading import Event

import pytest

from shards.kv.copier import BlockCopy, CopyFailed, InlineCopier, ThreadCopier


class Memory:
    """Notes what was copied; `gate` holds copies back."""

    slots = 4

    def __init__(self) -> None:
        self.copied: list[tuple[str, int, int]] = []
        self.gate = Event()
        self.gate.set()

    def save(self, block: int, slot: int) -> None:
        self.gate.wait()
        self.copied.append(("save", block, slot))

    def load(self, slot: int, block: int) -> None:
        self.gate.wait()
        if slot == 99:
            raise IndexError("there is no slot 99")
        self.copied.append(("load", slot, block))


COPIES = [BlockCopy(1, 2, is_save=True), BlockCopy(3, 2, is_save=False)]


@pytest.mark.parametrize("kind", [InlineCopier, ThreadCopier])
def test_copies_are_made_in_order(kind):
    memory = Memory()
    copier = kind(memory)
    tickets = [copier.start(COPIES) for _ in range(3)]
    assert tickets == sorted(set(tickets))
    copier.wait(tickets[-1])
    assert all(copier.done(ticket) for ticket in tickets)
    assert memory.copied == [("save", 1, 2), ("load", 2, 3)] * 3
    assert copier.slots == 4
    copier.close()


def test_a_thread_copies_in_the_background_and_reports_the_end():
    memory = Memory()
    memory.gate.clear()
    copier = ThreadCopier(memory)
    ticket = copier.start(COPIES)
    assert not copier.done(ticket)
    memory.gate.set()
    copier.wait(ticket)
    assert copier.done(ticket)
    copier.close()
    copier.close()


def test_closing_finishes_what_was_started():
    memory = Memory()
    copier = ThreadCopier(memory)
    for _ in range(10):
        copier.start(COPIES)
    copier.close()
    assert len(memory.copied) == 20
    with pytest.raises(RuntimeError, match="closed"):
        copier.start(COPIES)


def test_a_failed_copy_is_reported_to_its_caller_and_nothing_is_copied_after_it():
    memory = Memory()
    copier = ThreadCopier(memory)
    ticket = copier.start([BlockCopy(0, 99, is_save=False)])
    later = copier.start(COPIES)
    with pytest.raises(CopyFailed, match="no slot 99"):
        copier.wait(ticket)
    with pytest.raises(CopyFailed, match="no slot 99"):
        copier.done(later)
    copier.close()
    assert memory.copied == []
