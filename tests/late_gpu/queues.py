"""Queues of work of a device that runs as late as it may: only what the host waits for, and what that depends on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakSet, ref

Work = Callable[[], object]
"""One piece of work, such as a copy or a kernel."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a queue: everything in front of it has run once the queue has done `count` pieces."""

    queue: Queue
    count: int

    @property
    def is_reached(self) -> bool:
        """Whether the queue is there."""
        return self.queue.done >= self.count

    def run(self) -> None:
        """Run the queue up to here."""
        self.queue.run(self.count)


class Queue:
    """Work in order. None of it runs before the host, or other work that runs, waits for it."""

    def __init__(self) -> None:
        self.done = 0
        self._due: deque[Work] = deque()

    def __repr__(self) -> str:
        return f"Queue({self.done} done, {len(self._due)} due)"

    @property
    def end(self) -> Place:
        """The place behind all work so far."""
        return Place(self, self.done + len(self._due))

    def put(self, work: Work) -> None:
        """Add `work` at the end."""
        self._due.append(work)

    def wait_for(self, place: Place) -> None:
        """Let what is put from now on run after `place`."""
        self._due.append(place.run)

    def run(self, count: int) -> None:
        """Run until `count` pieces have been done since the beginning. Raises what the work raises."""
        while self.done < count:
            self.done += 1
            self._due.popleft()()


@dataclass(slots=True)
class Recording:
    """Work that was captured instead of queued, to be queued again and again.

    `made` is the memory that was allocated meanwhile, which belongs to the graph's `pool`, and `used` the memory from
    elsewhere that the work reads and writes.
    """

    pool: object
    work: list[Work] = field(default_factory=list)
    made: WeakSet[object] = field(default_factory=WeakSet)
    used: set[ReferenceType[object]] = field(default_factory=set)
    spoils: list[Work] = field(default_factory=list)
    """Fills its memory with what no result may depend on: another graph of the same pool may use it."""

    def use(self, memory: object) -> None:
        """Note that the work needs `memory`."""
        if memory not in self.made:
            self.used.add(ref(memory))

    @property
    def is_stale(self) -> bool:
        """Whether memory that the work needs was freed."""
        return any(memory() is None for memory in self.used)
