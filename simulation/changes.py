"""Changes of the fleet during a simulation: a backend becomes slower, or joins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From `at_s` on, each step of `backend` takes `factor` times as long as its machine's."""

    at_s: float
    backend: str
    factor: float


@dataclass(frozen=True, slots=True)
class Joining:
    """`backend` gets no requests before `at_s`: it is reached for the first time then."""

    at_s: float
    backend: str


Change = Slowdown | Joining
