"""What was measured, printed as it comes and kept for the table."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

SECONDS = ("s", "ms")


@dataclass(frozen=True)
class Figure:
    """`floor` is what the hardware allows, in the same unit; of times less is better, of rates more."""

    part: str
    name: str
    achieved: float
    floor: float | None
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Achieved as a share of the floor: 1 is all that the hardware gives."""
        if not self.floor or not self.achieved:
            return None
        return self.floor / self.achieved if self.unit in SECONDS else self.achieved / self.floor

    def __str__(self) -> str:
        floor = "" if self.floor is None else f"{self.floor:10.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:6.1%}"
        return f"{self.part:8} {self.name:58} {self.achieved:10.4g} {floor:>10} {self.unit:8} {ratio:>6}  {self.note}"


HEADING = f"{'part':8} {'what':58} {'achieved':>10} {'floor':>10} {'unit':8} {'ratio':>6}  note"


@dataclass
class Report:
    deadline_s: float
    figures: list[Figure] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(
        self, part: str, name: str, achieved: float, *, floor: float | None = None, unit: str, note: str = ""
    ) -> None:
        self.figures.append(Figure(part, name, achieved, floor, unit, note))
        print(self.figures[-1], flush=True)

    def check(self, name: str, error: float, tolerance: float) -> None:
        """An error that is not a number fails too."""
        passed = error <= tolerance
        self.checks.append({"name": name, "error": error, "tolerance": tolerance, "passed": passed})
        print(f"{'ok' if passed else 'FAILED':8} {name:58} off by {error:.3g}, may be {tolerance:.3g}", flush=True)

    @contextmanager
    def survive(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is printed and noted, and the next thing goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - minutes on a GPU are dear: the rest must still be measured
            self.errors.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            print(f"ERROR    {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()

    def attempt(self, name: str, measure: Callable[[], None], *, needs_s: float) -> None:
        """Run `measure` and survive it, if `needs_s` are left."""
        if time.monotonic() + needs_s > self.deadline_s:
            self.skipped.append(name)
            print(f"SKIPPED  {name}: not enough time is left", flush=True)
            return
        with self.survive(name):
            measure()

    def as_json(self) -> dict[str, Any]:
        figures = [asdict(one) | {"ratio": one.ratio} for one in self.figures]
        return {"figures": figures, "checks": self.checks, "errors": self.errors, "skipped": self.skipped}

    def print_table(self) -> None:
        print(f"\n{HEADING}")
        for figure in self.figures:
            print(figure)
        failed = [check["name"] for check in self.checks if not check["passed"]]
        print(f"\n{len(self.checks) - len(failed)} of {len(self.checks)} checks passed")
        for name in failed:
            print(f"failed: {name}")
        for error in self.errors:
            print(f"error in {error['name']}: {error['error']}")
        for name in self.skipped:
            print(f"skipped for lack of time: {name}")
