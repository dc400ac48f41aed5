"""Blocks that other shards fetch from this one. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple

from shards.kv.host import HostTier
from shards.kv.prefix import CachedBlock, PrefixCache
from shards.kv.raw_block import BlockLabel, BlockLabels, RawMemory

MOST_LOANS = 16
"""Requests of other shards at once."""

MOST_OUT = 8
"""Blocks that are handed over to one request and not returned: a slow borrower does not keep the host tier."""


class Lent(NamedTuple):
    """A block that may be read until it is given back: the bytes `pieces` of host slot `slot`. None: it is not here."""

    slot: int
    pieces: Sequence[memoryview]


@dataclass(eq=False, slots=True)
class Loan:
    """One request of another shard for the blocks of `labels`, in order.

    The engine's thread hands blocks over, and the connection's thread takes, sends and returns them.
    """

    labels: Sequence[BlockLabel]
    _lent: SimpleQueue[Lent | None] = field(default_factory=SimpleQueue)
    _returned: SimpleQueue[int] = field(default_factory=SimpleQueue)
    _lock: Lock = field(default_factory=Lock)
    _is_over: bool = False

    def next(self, timeout_s: float) -> Lent | None:
        """The next block; None: this shard does not have it. Raises TimeoutError."""
        try:
            return self._lent.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"the engine gave no block within {timeout_s} s") from None

    def give_back(self, lent: Lent) -> None:
        """`lent` is not read any more."""
        self._returned.put(lent.slot)

    def end(self) -> None:
        """No block is wanted any more, and those that were handed over are returned."""
        with self._lock:
            self._is_over = True
        while not self._lent.empty():
            if (lent := self._lent.get()) is not None:
                self._returned.put(lent.slot)

    @property
    def is_over(self) -> bool:
        """Whether no block is wanted any more."""
        return self._is_over

    def hand_over(self, lent: Lent | None) -> bool:
        """Lend a block, or say that there is none; False if none is wanted any more."""
        with self._lock:
            if not self._is_over:
                self._lent.put(lent)
            return not self._is_over

    def returned(self) -> list[int]:
        """The slots that were returned since the last call."""
        return [self._returned.get() for _ in range(self._returned.qsize())]


@dataclass(eq=False, slots=True)
class _Open:
    """A loan as the engine sees it: `at` is the next label, `out` the slots that were handed over."""

    loan: Loan
    at: int = 0
    out: list[int] = field(default_factory=list)
    copying: deque[int] = field(default_factory=deque)


class KvLending(NamedTuple):
    """What lending needs: `staging` slots of `memory`, from slot `first` on, take copies of blocks of the device."""

    memory: RawMemory
    labels: BlockLabels
    first: int
    staging: int


class Lending:
    """Hands cached blocks over to other shards, from the host tier itself or copied from the device.

    A label proves domain, prefix and tokens, so a block goes only to a shard that has the same tokens in the same cache
    domain. All but `ask` is called from the engine's thread.
    """

    def __init__(self, prefix: PrefixCache, host: HostTier, lending: KvLending | None = None) -> None:
        self._prefix, self._host, self._lending = prefix, host, lending
        self._asked: SimpleQueue[Loan] = SimpleQueue()
        self._open: list[_Open] = []
        self._free = [] if lending is None else list(range(lending.first, lending.first + lending.staging))
        self._is_closed = False
        self.lent = 0

    def __repr__(self) -> str:
        return f"<Lending: {len(self._open)} loans, {self.lent} blocks lent>"

    @property
    def is_open(self) -> bool:
        """Whether blocks are lent."""
        return self._lending is not None

    @property
    def is_busy(self) -> bool:
        """Whether a loan is open."""
        return bool(self._open) or not self._asked.empty()

    def ask(self, labels: Sequence[BlockLabel]) -> Loan:
        """A loan of the blocks of `labels`; from any thread. The caller bounds their number, and ends each."""
        loan = Loan(labels)
        self._asked.put(loan)
        if self._is_closed:
            loan.hand_over(None)
        return loan

    def settle(self) -> None:
        """Hand over the blocks that are wanted, as far as there are slots, and take back what was returned."""
        if self._lending is None:
            return
        for _ in range(self._asked.qsize()):
            self._open.append(_Open(self._asked.get()))
        for open_loan in self._open:
            for slot in open_loan.loan.returned():
                open_loan.out.remove(slot)
                self._release(slot)
        for open_loan in self._open:
            if not open_loan.loan.is_over:
                self._serve(open_loan)
        self._open = [each for each in self._open if not self._is_done(each)]

    def close(self) -> None:
        """Lend nothing any more: no step follows, and nothing waits for one."""
        self._is_closed = True
        for _ in range(self._asked.qsize()):
            self._open.append(_Open(self._asked.get()))
        for open_loan in self._open:
            open_loan.loan.hand_over(None)

    def check(self) -> None:
        """Assert that each slot is free or lent."""
        if self._lending is None:
            return
        first, staging = self._lending.first, self._lending.staging
        out = [slot for each in self._open for slot in (*each.out, *each.copying)]
        assert sorted([*self._free, *(slot for slot in out if slot >= first)]) == list(range(first, first + staging)), (
            "a slot for lending is lost"
        )
        assert all(self._host.is_held(slot) for slot in out if slot < first), "a lent slot is not held"

    def _is_done(self, open_loan: _Open) -> bool:
        """Is nothing of it out? Copies that are not wanted any more are dropped once they have landed."""
        if not open_loan.loan.is_over:
            return False
        for slot in list(open_loan.copying):
            if not self._host.flights.is_slot_busy(slot):
                open_loan.copying.remove(slot)
                self._release(slot)
        return not (open_loan.out or open_loan.copying)

    def _serve(self, open_loan: _Open) -> None:
        """Hand over in order: finished copies first, then further blocks of the host tier, or begin to copy them."""
        loan = open_loan.loan
        while (
            len(open_loan.out) < MOST_OUT
            and open_loan.copying
            and not self._host.flights.is_slot_busy(open_loan.copying[0])
        ):
            if not self._hand_over(open_loan, open_loan.copying.popleft()):
                return
        while open_loan.at < len(loan.labels) and len(open_loan.out) + len(open_loan.copying) < MOST_OUT:
            cached = self._find(loan.labels[open_loan.at])
            if cached is None:
                if not open_loan.copying:
                    open_loan.at = len(loan.labels)
                    loan.hand_over(None)
                return
            if cached.slot is not None:
                if open_loan.copying or self._host.flights.is_slot_busy(cached.slot):
                    # blocks go in order
                    return
                self._host.hold(cached.slot)
                open_loan.at += 1
                if not self._hand_over(open_loan, cached.slot):
                    return
            elif self._free and cached.block is not None:
                slot = self._free.pop()
                self._host.flights.save(cached.block, slot)
                open_loan.copying.append(slot)
                open_loan.at += 1
            else:
                return

    def _hand_over(self, open_loan: _Open, slot: int) -> bool:
        assert self._lending is not None, "nothing is lent"
        if not open_loan.loan.hand_over(Lent(slot, self._lending.memory.raw(slot))):
            self._release(slot)
            return False
        open_loan.out.append(slot)
        self.lent += 1
        return True

    def _find(self, label: BlockLabel) -> CachedBlock | None:
        assert self._lending is not None, "nothing is lent"
        cached = self._prefix.named(label.key)
        return cached if cached is not None and self._lending.labels.of(cached) == label else None

    def _release(self, slot: int) -> None:
        assert self._lending is not None, "nothing is lent"
        if slot >= self._lending.first:
            self._free.append(slot)
        else:
            self._host.release(slot)
