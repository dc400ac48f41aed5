"""`pointsman plan`: from decision logs to text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from router.operate.diagnose.logged import USUAL_MOST, read_logs
from router.operate.diagnose.progress import BarSteps, progress, size_of
from router.operate.plan.plan import plan_of
from router.operate.plan.text import as_text, shown
from router.terminal import inert_console


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command line's options. `json` prints JSON in place of text; only the last `most` requests are read."""

    logs: Sequence[Path]
    json: bool = False
    most: int = USUAL_MOST


def run(options: PlanOptions) -> None:
    """Print the plan of the logs. Raises InvalidRequest if they are no decision logs or have nothing to plan."""
    with progress() as bars:
        steps = BarSteps(bars, bars.add_task("reading", total=sum(map(size_of, options.logs))))
        contents = read_logs(options.logs, most=options.most, on_read=steps.advance)
    plan = plan_of(contents, options.logs)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())  # noqa: T201
    elif sys.stdout.isatty():
        inert_console().print(shown(plan))
    else:
        print(as_text(plan))  # noqa: T201
