"""FastChat's workers that have registered here: who they are, and since when each has been silent.

Source: FastChat 0.2.36, its controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from policies.errors import Overloaded

EXPIRES_AFTER_S = 90.0
"""A worker beats every 45 s."""

MOST_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker at `address` (its URL). `queue_length` counts the requests that it has; `speed` is relative."""

    address: str
    models: frozenset[str]
    speed: float = 1.0
    queue_length: int = 0
    is_multimodal: bool = False
    beats: bool = True
    """It sends heart beats, and is gone without them."""


class WorkerListener(Protocol):
    """Hears which workers there are."""

    def joined(self, worker: Worker) -> None:
        """`worker` is new, or now has other models."""
        ...

    def left(self, worker: Worker) -> None:
        """`worker` has not beaten, or no longer answers."""
        ...

    def holds(self, worker: Worker) -> bool:
        """Does `worker`, which joined, still count? It may have been ill for so long that it was given up."""
        ...


@dataclass(slots=True)
class Workers:
    """Who is registered. `clock` is in seconds. `listener` hears of each that comes and goes, once."""

    listener: WorkerListener
    clock: Callable[[], float] = time.monotonic
    known: dict[str, Worker] = field(default_factory=dict)
    beaten_at: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Workers {len(self.known)} of {len(self.models())} models>"

    def register(self, worker: Worker) -> None:
        """`worker` is there. Raises Overloaded if there are too many, and what the listener raises."""
        before = self.known.get(worker.address)
        if before is None and len(self.known) >= MOST_WORKERS:
            raise Overloaded(f"{MOST_WORKERS} workers are registered already")
        if before is None or before.models != worker.models:
            # which may refuse it
            self.listener.joined(worker)
        self.known[worker.address] = worker
        self.beaten_at[worker.address] = self.clock()

    def beat(self, address: str, queue_length: int) -> bool:
        """Was it known? If not, it will register again."""
        worker = self.known.get(address)
        if worker is None:
            return False
        if not self.listener.holds(worker):
            self.remove(address)
            return False
        self.known[address] = replace(worker, queue_length=queue_length)
        self.beaten_at[address] = self.clock()
        return True

    def remove(self, address: str) -> None:
        """It is gone."""
        self.beaten_at.pop(address, None)
        worker = self.known.pop(address, None)
        if worker is not None:
            self.listener.left(worker)

    def expire(self) -> None:
        """Remove those that should have beaten and did not."""
        oldest = self.clock() - EXPIRES_AFTER_S
        for address in [one.address for one in self.known.values() if one.beats]:
            if self.beaten_at[address] < oldest:
                self.remove(address)

    def models(self, *, multimodal: bool | None = None) -> list[str]:
        """Names of models, of all workers or of those that are (not) multimodal."""
        chosen = (one for one in self.known.values() if multimodal is None or one.is_multimodal is multimodal)
        return sorted({name for worker in chosen for name in worker.models})

    def address_for(self, model: str) -> str:
        """Where `model` has the shortest queue for its speed; empty if nowhere. It is counted as one longer."""
        serving = [worker for worker in self.known.values() if model in worker.models and worker.speed > 0]
        if not serving:
            return ""
        chosen = min(serving, key=lambda worker: worker.queue_length / worker.speed)
        self.known[chosen.address] = replace(chosen, queue_length=chosen.queue_length + 1)
        return chosen.address

    def check(self) -> None:
        """Raise AssertionError if a worker's beats were lost count of."""
        assert self.known.keys() == self.beaten_at.keys(), "a worker has no time, or a time no worker"
