"""What one run of pytest did: `--account FILE` writes it as JSON, and .ci/suite.py reads it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest


def account_of(reporter: pytest.TerminalReporter, status: int) -> dict[str, Any]:
    """The run's exit status, the number of tests that passed, the ids that failed, what was skipped, and the files.

    `skipped` has [file, reason, number of tests]. An id is that of a file where the file could not be read.
    """
    stats = reporter.stats
    passed = [*stats.get("passed", ()), *stats.get("xfailed", ())]
    failed = [*stats.get("failed", ()), *stats.get("error", ()), *stats.get("xpassed", ())]
    skipped = Counter((_file_of(report), _reason_of(report)) for report in stats.get("skipped", ()))
    return {
        "status": status,
        "passed": len(passed),
        "failed": list(dict.fromkeys(report.nodeid for report in failed)),
        "skipped": [[file, reason, count] for (file, reason), count in sorted(skipped.items())],
        "files": sorted({_file_of(report) for report in chain(*stats.values()) if _is_of_a_test(report)}),
    }


def write(file: Path, account: dict[str, Any]) -> None:
    """Write the whole account, or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(account, indent=1))
    part.replace(file)


def _is_of_a_test(report: object) -> bool:
    return isinstance(report, pytest.TestReport | pytest.CollectReport)


def _file_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.nodeid.partition("::")[0]


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
