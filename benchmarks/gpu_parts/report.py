"""The figures, printed and saved as they come and kept for the table."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS = ("s", "ms")


@dataclass(frozen=True)
class Figure:
    """`floor` is the limit of the hardware, in the same unit; for times less is better, for rates more."""

    part: str
    name: str
    achieved: float
    floor: float | None
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Achieved as a share of the floor: 1 is the hardware's limit."""
        if not self.floor or not self.achieved:
            return None
        return self.floor / self.achieved if self.unit in SECONDS else self.achieved / self.floor

    def __str__(self) -> str:
        floor = "" if self.floor is None else f"{self.floor:10.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:6.1%}"
        return f"{self.part:8} {self.name:58} {self.achieved:10.4g} {floor:>10} {self.unit:8} {ratio:>6}  {self.note}"


HEADING = f"{'part':8} {'what':58} {'achieved':>10} {'floor':>10} {'unit':8} {'ratio':>6}  note"


class Poisoned(Exception):
    """A kernel broke the device's context: nothing else can run in this process."""


LEAST_LIMIT_S = 90.0
"""Time allowed for compiling before a measurement, however short."""


@dataclass
class Report:
    """Saved in `file` after each line, under `head`, so that measured figures survive the end of the process.

    `is_alive` tells whether the device still works. `tried` are the names of the begun parts; parts that an earlier
    process began are not begun again.
    """

    deadline_s: float
    file: Path | None = None
    head: dict[str, Any] = field(default_factory=dict)
    is_alive: Callable[[], bool] = lambda: True
    figures: list[Figure] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)

    def add(
        self, part: str, name: str, achieved: float, *, floor: float | None = None, unit: str, note: str = ""
    ) -> None:
        self.figures.append(Figure(part, name, achieved, floor, unit, note))
        print(self.figures[-1], flush=True)
        self.save()

    def check(self, name: str, error: float, tolerance: float) -> None:
        """An error that is NaN fails too."""
        passed = error <= tolerance
        self.checks.append({"name": name, "error": error, "tolerance": tolerance, "passed": passed})
        print(f"{'ok' if passed else 'FAILED':8} {name:58} off by {error:.3g}, may be {tolerance:.3g}", flush=True)
        self.save()

    @contextmanager
    def survive(self, name: str) -> Iterator[None]:
        """Print and record any error inside, and continue with the next part.

        Raises Poisoned if this process cannot continue.
        """
        try:
            yield
        except Poisoned:
            raise
        except Exception as error:
            self.errors.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            print(f"ERROR    {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            self.save()
            if not self.is_alive():
                raise Poisoned(name) from error

    def attempt(self, name: str, measure: Callable[[], None], *, needs_s: float, limit_s: float | None = None) -> None:
        """Run `measure` and survive it, if `needs_s` are left. It is ended after `limit_s`, or ten times `needs_s`."""
        if name in self.tried:
            return
        left_s = self.deadline_s - time.monotonic()
        if left_s < needs_s:
            self.skip(name, "not enough time is left")
            return
        self.tried.append(name)
        self.save()
        print(f"         {name} ... ({left_s:.0f} s left)", flush=True)
        with self.survive(name), limited(min(left_s, limit_s or max(LEAST_LIMIT_S, 10 * needs_s))):
            measure()

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(f"{name}: {why}")
        print(f"SKIPPED  {self.skipped[-1]}", flush=True)
        self.save()

    def fits(self, name: str, blocks: int, room: int | None) -> bool:
        """Whether `blocks` KV blocks fit into `room` (None: any number does); records what is skipped if not."""
        if room is None or blocks <= room:
            return True
        self.skip(name, f"it needs {blocks} KV blocks, and {max(0, room)} fit beside the weights")
        return False

    def save(self) -> None:
        """Write all present figures to the file."""
        if self.file is not None:
            beside = self.file.with_name(self.file.name + ".new")
            beside.write_text(json.dumps(self.head | self.as_json(), indent=1))
            beside.replace(self.file)

    def resume(self) -> None:
        """Continue after the contents of the file."""
        if self.file is not None and self.file.exists():
            saved = json.loads(self.file.read_text())
            self.figures = [
                Figure(**{k: v for k, v in saved_figure.items() if k != "ratio"}) for saved_figure in saved["figures"]
            ]
            self.checks, self.errors = saved["checks"], saved["errors"]
            self.skipped, self.tried = saved["skipped"], saved["tried"]

    def as_json(self) -> dict[str, Any]:
        figures = [asdict(figure) | {"ratio": figure.ratio} for figure in self.figures]
        return {
            "figures": figures,
            "checks": self.checks,
            "errors": self.errors,
            "skipped": self.skipped,
            "tried": self.tried,
        }

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
            print(f"skipped: {name}")


@contextmanager
def limited(most_s: float) -> Iterator[None]:
    """Raise TimeoutError inside after `most_s`, or at the end of an enclosing limit, whichever comes first."""

    def ring(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"took more than {limit_s:.0f} s")

    outer_s, _ = signal.getitimer(signal.ITIMER_REAL)
    limit_s = min(most_s, outer_s or most_s)
    before, started = signal.signal(signal.SIGALRM, ring), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        # never 0, which would mean no limit
        signal.setitimer(signal.ITIMER_REAL, max(0.01, outer_s - time.monotonic() + started) if outer_s else 0)
        signal.signal(signal.SIGALRM, before)
