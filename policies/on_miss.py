"""Steps for a request with a predicted TTFT above its class's target: taken in order, each tried once."""

from __future__ import annotations

from dataclasses import dataclass

from policies.quantities import written_seconds


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait in the router's queue, at most `seconds` in all, before the next step."""

    seconds: float

    def __str__(self) -> str:
        return f"queue {written_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True)
class Spill:
    """Let the backends of `pool` take it too, although its rule does not name them."""

    pool: str

    def __str__(self) -> str:
        return f"spill to {self.pool}"


@dataclass(frozen=True, slots=True)
class Degrade:
    """Let `model` answer it."""

    model: str

    def __str__(self) -> str:
        return f"degrade to {self.model}"


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse it with this HTTP status: 429 or 503."""

    status: int = 429

    def __str__(self) -> str:
        return f"shed with {self.status}"


Step = Queue | Spill | Degrade | Shed
