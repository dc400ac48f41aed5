"""The FastChat workers that have registered here, with the time of each one's last heart beat.

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
    """One worker at `address` (its URL). `queue_length` counts its requests; `speed` is relative."""

    address: str
    models: frozenset[str]
    speed: float = 1.0
    queue_length: int = 0
    is_multimodal: bool = False
    beats: bool = True
    """It sends heart beats, and is removed without them."""


class WorkerListener(Protocol):
    """Gets the changes of the workers."""

    def joined(self, worker: Worker) -> None:
        """`worker` is new, or has other models now."""
        ...

    def left(self, worker: Worker) -> None:
        """`worker` has sent no heart beat in time, or no longer answers."""
        ...

    def holds(self, worker: Worker) -> bool:
        """Whether `worker`, which joined, is still a member. It may have been ill for so long that it was removed."""
        ...


@dataclass(slots=True)
class Workers:
    """The registered workers. `clock` is in seconds. `listener` gets each worker that comes or goes, once."""

    listener: WorkerListener
    clock: Callable[[], float] = time.monotonic
    known: dict[str, Worker] = field(default_factory=dict)
    beaten_at: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Workers {len(self.known)} of {len(self.models())} models>"

    def register(self, worker: Worker) -> None:
        """Add `worker`. Raises Overloaded if there are too many, and the listener's errors."""
        before = self.known.get(worker.address)
        if before is None and len(self.known) >= MOST_WORKERS:
            raise Overloaded(f"{MOST_WORKERS} workers are registered already")
        if before is None or before.models != worker.models:
            # the listener may reject it
            self.listener.joined(worker)
        self.known[worker.address] = worker
        self.beaten_at[worker.address] = self.clock()

    def beat(self, address: str, queue_length: int) -> bool:
        """Record a heart beat; returns whether the worker was known. If not, it will register again."""
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
        """Remove the workers that should have sent a heart beat and did not."""
        oldest = self.clock() - EXPIRES_AFTER_S
        for address in [worker.address for worker in self.known.values() if worker.beats]:
            if self.beaten_at[address] < oldest:
                self.remove(address)

    def models(self, *, multimodal: bool | None = None) -> list[str]:
        """Names of the models of all workers, or of those that are (not) multimodal."""
        chosen = (worker for worker in self.known.values() if multimodal is None or worker.is_multimodal is multimodal)
        return sorted({name for worker in chosen for name in worker.models})

    def address_for(self, model: str) -> str:
        """The worker of `model` with the shortest queue for its speed, which grows by one; empty if there is none."""
        serving = [worker for worker in self.known.values() if model in worker.models and worker.speed > 0]
        if not serving:
            return ""
        chosen = min(serving, key=lambda worker: worker.queue_length / worker.speed)
        self.known[chosen.address] = replace(chosen, queue_length=chosen.queue_length + 1)
        return chosen.address

    def check(self) -> None:
        """Assert that every worker has the time of a heart beat."""
        assert self.known.keys() == self.beaten_at.keys(), "a worker has no time, or a time no worker"
