"""The worked example of docs/capacity.md: its trace is what its script writes, its tables have what is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.start.cli import app

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/capacity"


def test_the_trace_is_what_its_script_writes() -> None:
    done = subprocess.run([sys.executable, EXAMPLE / "make_trace.py"], capture_output=True, check=True)
    assert done.stdout == (EXAMPLE / "trace.jsonl").read_bytes()


def test_the_tables_of_the_page_have_the_columns_and_rows_that_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    # not the figures: every better decision changes some of them
    page = (ROOT / "docs/capacity.md").read_text().split()
    for name in ("ASSISTANT_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, name)
    files = (str(EXAMPLE / "sla.yaml"), "--trace", str(EXAMPLE / "trace.jsonl"), "--requests", "60")
    profile = ("--profile", str(EXAMPLE / "l4-profile.yaml"))
    done = CliRunner().invoke(app, ["simulate", *files, *profile, "--backends", "own=3"])
    assert done.exit_code == 0, done.output
    words = [word for word in done.stdout.split() if word.isalpha()]
    assert {"class", "long-rag", "batch", "missed"} - set(done.stdout.split()) == set()
    assert [word for word in words if word not in page] == []
